"""Replacing a model's weights in place: what may be sent, whether it fits, and all of it or nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from perilune.errors import UserError
from perilune.model.decoder import Decoder


def check_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError unless `weights` has exactly the names and shapes of the model's state_dict, and finite numbers."""
    own = model.state_dict()
    if missing := own.keys() - weights.keys():
        raise UserError(f"the new weights lack {min(missing)!r} and {len(missing) - 1} others: send the whole state_dict of the same model")
    if unknown := weights.keys() - own.keys():
        raise UserError(f"the new weights hold {min(unknown)!r}, which this model does not have: send the state_dict of the same model")
    for name, tensor in own.items():
        new = weights[name]
        if new.shape != tensor.shape or not new.is_floating_point():
            raise UserError(
                f"the new weights' {name!r} is {new.dtype} {tuple(new.shape)}, this model's {tensor.dtype} {tuple(tensor.shape)}: "
                "send the state_dict of the same model"
            )
        if not torch.isfinite(new.to(tensor.dtype)).all():
            raise UserError(f"the new weights' {name!r} holds a number that is not finite in {tensor.dtype}: the engine keeps those it has")


@torch.no_grad()
def copy_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Overwrite the model's tensors with checked ones, converted to their dtypes."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])


def largest_update(model: Decoder) -> int:
    """Bytes of the largest safetensors file that can be this model's weights: fp32, or what is wider in the model, and the header."""
    tensors: dict[str, Tensor] = model.state_dict()
    header = 4096 + sum(256 + len(name) for name in tensors)
    return header + sum(tensor.numel() * max(tensor.element_size(), 4) for tensor in tensors.values())
