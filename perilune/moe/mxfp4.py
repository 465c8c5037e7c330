"""Packed MXFP4 weights: exact decoding, and encoding by the OCP microscaling rule.

Format ("mxfp4-pack-quantized", OCP Microscaling Formats v1.0): the columns of a weight row (its input dimension) come in groups of 32
that share one scale byte b, worth 2^(b − 127), 255 meaning NaN (E8M0). A value is one of the 16 E2M1 codes, bits s e e m:
0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (code 8 is −0). Two codes share a byte, the even column in the low nibble.

Both directions work on bit patterns instead of floating-point products, because a process may run with flush-to-zero
(`torch.set_flush_denormal`), where a product below 2^-126 silently becomes 0: scale bytes 0 and 1 do produce such values.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

GROUP = 32
"""Columns that share one scale byte."""

_TWICE_MAGNITUDE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Two times the magnitude of codes 0..7, which makes them integers."""


def decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`packed` [..., columns/2] uint8 and `scale` [..., columns/32] uint8 -> weights [..., columns], exact, f32 subnormals included.

    `dtype` is float32, bfloat16 (the values are exact in both) or float64. A scale byte of 255 makes its 32 values NaN; values of
    magnitude 2^128 and more (scale bytes from 253 up) are infinite in float32 and bfloat16, as an IEEE product would be.

    Raises ValueError for another dtype or shapes that do not fit.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed and scale must be uint8, got {packed.dtype} and {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"packed [..., columns/2] and scale [..., columns/{GROUP}] do not fit: got {tuple(packed.shape)} and {tuple(scale.shape)}"
        )
    table = _decode_table(dtype, packed.device)
    groups = packed.reshape(*scale.shape, GROUP // 2).int()
    base = scale.int().unsqueeze(-1) << 4
    index = torch.stack((base | (groups & 15), base | (groups >> 4)), dim=-1)
    return table.index_select(0, index.view(-1)).view(dtype).view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., columns] -> (packed [..., columns/2] uint8, scale [..., columns/32] uint8), by the OCP microscaling rule.

    Scale exponent floor(log2(max |w|)) − 2, clipped to [−127, 127] (a group of zeros gets 0, byte 127); elements round to the nearest
    code, ties to the even code, and saturate at ±6. `weight` is float32, bfloat16 or float16. The largest error of an element is
    one scale step, or two where it saturates (magnitudes of 6 to 8 steps).

    Raises ValueError for another dtype, columns that are not a multiple of 32, or values that are not finite.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"encode_mxfp4 takes float32, bfloat16 or float16 weights, got {weight.dtype}")
    if weight.dim() == 0 or weight.shape[-1] % GROUP:
        raise ValueError(f"the last axis must be a multiple of {GROUP}, got shape {tuple(weight.shape)}")
    bits = weight.detach().float().contiguous().view(torch.int32).view(*weight.shape[:-1], weight.shape[-1] // GROUP, GROUP)
    magnitude = bits & 0x7FFFFFFF
    # The bits of positive floats are ordered like the floats, so the largest pattern holds the exponent of the largest magnitude.
    largest = magnitude.amax(-1, keepdim=True)
    if bool((largest >= 0x7F800000).any()):
        raise ValueError("encode_mxfp4 needs finite weights, got infinities or NaN")
    # Exponent field f means floor(log2) = f − 127, hence byte f − 2; subnormals (f = 0) would be below −127 and are clipped.
    scale = torch.where(largest == 0, 127, ((largest >> 23) - 2).clamp_(min=0))

    field = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((field > 0).int() << 23)
    # |w| = mantissa · 2^(max(field, 1) − 150), so |w| / 2^(scale − 127) = mantissa · 2^(max(field, 1) − 23 − scale). The clamp keeps
    # fp32 normal and moves only ratios that round to code 0 anyway.
    exponent = (field.clamp_(min=1) - 23 - scale).clamp_(min=-100)
    ratio = mantissa.float() * ((exponent + 127) << 23).view(torch.float32)
    codes = torch.bucketize(ratio, _rounding_boundaries(weight.device), out_int32=True) | ((bits >> 28) & 8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8).view(*weight.shape[:-1], weight.shape[-1] // 2), scale.squeeze(-1).to(torch.uint8)


@functools.cache
def _decode_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256 · 16] values by (scale byte, code): fp64 as such, fp32 and bf16 as integers with their bit patterns."""
    if dtype == torch.float64:
        values = [_signed(code) * _scale_value(byte) for byte in range(256) for code in range(16)]
        return torch.tensor(values, dtype=dtype, device=device)
    patterns = torch.tensor([_float32_pattern(byte, code) for byte in range(256) for code in range(16)], dtype=torch.int64, device="cpu")
    if dtype == torch.float32:
        return _as_signed(patterns, 32).to(device, torch.int32)
    if dtype == torch.bfloat16:
        # Values have two significant bits and a smallest step of 2^-128: the lower half of the fp32 pattern is empty.
        return _as_signed(patterns >> 16, 16).to(device, torch.int16)
    raise ValueError(f"decode_mxfp4 gives float32, bfloat16 or float64, not {dtype}")


@functools.cache
def _rounding_boundaries(device: torch.device) -> Tensor:
    """[7] fp32: a ratio belongs to code i when i of these are smaller than it.

    They are the midpoints between codes, where a tie goes to the even code: the midpoint above an odd code is moved
    down by one fp32 step, so that the tie itself counts as being above it.
    """
    midpoints = torch.tensor([(low + high) / 4 for low, high in itertools.pairwise(_TWICE_MAGNITUDE)], device=device)
    above_odd = torch.arange(7, device=device) % 2 == 1
    return torch.where(above_odd, torch.nextafter(midpoints, torch.zeros_like(midpoints)), midpoints)


def _signed(code: int) -> float:
    return math.copysign(_TWICE_MAGNITUDE[code & 7] / 2, -1.0 if code & 8 else 1.0)


def _scale_value(byte: int) -> float:
    return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)


def _float32_pattern(byte: int, code: int) -> int:
    """The IEEE single-precision pattern of the value, put together from integers: no floating-point unit that could flush it."""
    sign = (code >> 3) << 31
    twice = _TWICE_MAGNITUDE[code & 7]
    if byte == 255:
        return 0x7FC00000
    if twice == 0:
        return sign
    top = twice.bit_length() - 1
    exponent = top + byte - 128  # the value is twice · 2^(byte − 128)
    if exponent > 127:
        return sign | 0x7F800000
    if exponent < -126:
        return sign | (twice << (byte - 128 + 149))
    return sign | ((exponent + 127) << 23) | ((twice << (23 - top)) & 0x7FFFFF)


def _as_signed(patterns: Tensor, width: int) -> Tensor:
    return torch.where(patterns >= 1 << (width - 1), patterns - (1 << width), patterns)
