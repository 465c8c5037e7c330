"""Kimi Delta Attention: the operator and nothing else."""

from perilune.kda.api import chunk_kda, decode_kda_, fused_recurrent_kda
from perilune.kda.gates import log_decay
from perilune.kda.short_conv import short_convolution

__all__ = ["chunk_kda", "decode_kda_", "fused_recurrent_kda", "log_decay", "short_convolution"]
