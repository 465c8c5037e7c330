"""Keeping autocast out of code that chooses its own precision.

Inside `torch.autocast` every matrix product and dot product is turned into bf16, whatever the dtype of its operands: a recurrence or
a softmax written for fp32 would lose its digits silently, and a backward run outside the context would meet mixed dtypes.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with autocast off on the device of its first tensor argument while it runs."""

    @functools.wraps(function)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return exact
