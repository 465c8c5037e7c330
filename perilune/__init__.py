"""Perilune: an open, complete implementation of the Kimi K3 system, from kernels to post-training."""

__version__ = "0.1.0"
