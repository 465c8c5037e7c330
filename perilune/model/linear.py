"""The one kind of projection in the network."""

from torch import nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias, as every matrix of the network is; weight [outputs, inputs]."""
    return nn.Linear(inputs, outputs, bias=False)
