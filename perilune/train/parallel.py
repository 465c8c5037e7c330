"""The ranks of a training job: one process, or those that `torchrun` started, joined over gloo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among the job's. All methods are collective: every rank calls them, in the same order."""

    rank: int
    world: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, on each of them; in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on any rank: what one must stop for, all must."""
        return bool(self.sum(torch.tensor(int(condition))).item())

    def wait(self) -> None:
        """Return when all ranks have come here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Joins the job described by torchrun's environment variables; alone without them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(0, 1)
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
