from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from perilune.moe.activations import SituGlu
from perilune.moe.mxfp4 import decode_mxfp4, encode_mxfp4

GOLDEN = Path(__file__).parent.parent / "golden" / "k3-mxfp4"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0"


@pytest.fixture(params=[False, True], ids=["subnormals", "flush-to-zero"])
def flush(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs a test twice: with the processor's floating-point unit as it is, and with one that flushes subnormals to zero."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield request.param
    torch.set_flush_denormal(False)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.float32 and torch.equal(left.view(torch.int32), right.view(torch.int32))


def golden(file: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / file)


def cases() -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """(name, packed, scale, source, decoded) for the golden expert's three matrices and for the edge rows."""
    packed, source, decoded, edge = (
        golden(f"{name}.safetensors") for name in ("expert_packed", "expert_source", "expert_dequant", "edge_cases")
    )
    matrices = []
    for name in ("w1", "w2", "w3"):
        codes, scale = packed[f"{EXPERT}.{name}.weight_packed"], packed[f"{EXPERT}.{name}.weight_scale"]
        matrices.append((name, codes, scale, by_suffix(source, name), by_suffix(decoded, name)))
    return [*matrices, ("edge", edge["edge.weight_packed"], edge["edge.weight_scale"], edge["edge.source"], edge["edge.dequant"])]


def by_suffix(tensors: dict[str, Tensor], name: str) -> Tensor:
    (found,) = [tensor for key, tensor in tensors.items() if key.endswith(f"{name}.weight")]
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case[0])
def test_decoding_is_exact_bit_for_bit(case: tuple[str, Tensor, Tensor, Tensor, Tensor], flush: bool) -> None:
    _, packed, scale, _, decoded = case
    assert same_bits(decode_mxfp4(packed, scale), decoded)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case[0])
def test_encoding_follows_the_stated_rule_bit_for_bit(case: tuple[str, Tensor, Tensor, Tensor, Tensor], flush: bool) -> None:
    _, packed, scale, source, _ = case
    encoded = encode_mxfp4(source)
    assert torch.equal(encoded[0], packed) and torch.equal(encoded[1], scale)


def test_every_scale_byte_times_every_code_is_exact() -> None:
    arrays = np.load(GOLDEN / "expert_io.npz")
    codes, scale_bytes, scales = arrays["code_values"].astype(np.float64), arrays["scale_bytes"], arrays["scale_values"]
    packed = (torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)).to(torch.uint8).repeat(len(scale_bytes), 2)
    scale = torch.from_numpy(scale_bytes.astype(np.uint8)).view(-1, 1)
    expected = torch.from_numpy(np.tile(scales[:, None] * codes[None, :], (1, 2)))
    assert torch.equal(decode_mxfp4(packed, scale, torch.float64), expected)
    assert same_bits(decode_mxfp4(packed, scale), expected.float())
    assert torch.equal(decode_mxfp4(packed, scale, torch.bfloat16).view(torch.int16), expected.bfloat16().view(torch.int16))


def test_the_decoded_expert_computes_what_the_golden_one_does() -> None:
    arrays = np.load(GOLDEN / "expert_io.npz")
    packed = golden("expert_packed.safetensors")
    w1, w2, w3 = (
        decode_mxfp4(packed[f"{EXPERT}.{name}.weight_packed"], packed[f"{EXPERT}.{name}.weight_scale"], torch.float64)
        for name in ("w1", "w2", "w3")
    )
    x = torch.from_numpy(arrays["x"]).double()
    torch.testing.assert_close(SituGlu()(x @ w1.T, x @ w3.T) @ w2.T, torch.from_numpy(arrays["y"]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_byte_255_is_nan_and_stays_in_its_group(dtype: torch.dtype) -> None:
    decoded = decode_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[255, 127]], dtype=torch.uint8), dtype)
    assert decoded.dtype == dtype
    assert decoded[0, :32].isnan().all() and torch.equal(decoded[0, 32:], torch.zeros(32, dtype=dtype))


def test_the_even_column_is_in_the_low_nibble() -> None:
    packed = torch.zeros(16, dtype=torch.uint8)
    packed[0] = 0x72
    assert decode_mxfp4(packed, torch.tensor([127], dtype=torch.uint8))[:3].tolist() == [1.0, 6.0, 0.0]


def test_leading_axes_are_kept() -> None:
    weight = torch.randn(3, 4, 64)
    packed, scale = encode_mxfp4(weight)
    assert packed.shape == (3, 4, 32) and scale.shape == (3, 4, 2)
    decoded = decode_mxfp4(packed, scale)
    assert decoded.shape == weight.shape
    assert same_bits(decoded[1], decode_mxfp4(packed[1], scale[1]))
    assert same_bits(decode_mxfp4(packed[:, 1], scale[:, 1]), decoded[:, 1])
    assert decode_mxfp4(packed[:0], scale[:0]).shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_encode_like_their_fp32_values(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 64).to(dtype)
    assert all(torch.equal(left, right) for left, right in zip(encode_mxfp4(weight), encode_mxfp4(weight.float()), strict=True))


float32_groups = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32)
nearby_groups = st.builds(
    lambda exponent, values: [value * 2.0**exponent for value in values],
    st.integers(-130, 100),
    st.lists(st.floats(-8, 8, width=16), min_size=32, max_size=32),
)


@settings(max_examples=50)
@given(values=float32_groups | nearby_groups)
def test_an_element_is_off_by_half_its_gap_or_saturates(values: list[float]) -> None:
    weight = torch.tensor([values])
    packed, scale = encode_mxfp4(weight)
    step = 2.0 ** (int(scale) - 127)
    ratio = (weight.double() / step).abs()
    # Gaps between codes: 0.5 up to 2, then 1 up to 4, then 2; beyond 6 the error is what is left over.
    allowed = torch.where(ratio <= 2, 0.25, torch.where(ratio <= 4, 0.5, torch.where(ratio <= 6, 1.0, ratio - 6)))
    error = (decode_mxfp4(packed, scale, torch.float64) - weight.double()).abs() / step
    assert (error <= allowed).all()
    assert (ratio < 8).all()


@settings(max_examples=50)
@given(values=float32_groups | nearby_groups)
def test_what_was_decoded_encodes_to_itself(values: list[float]) -> None:
    decoded = decode_mxfp4(*encode_mxfp4(torch.tensor([values])))
    again = encode_mxfp4(decoded)
    assert same_bits(decode_mxfp4(*again), decoded)


@settings(max_examples=50)
@given(codes=st.lists(st.integers(0, 15), min_size=32, max_size=32), scale_byte=st.integers(0, 252))
def test_codes_survive_a_round_trip_when_the_group_uses_its_range(codes: list[int], scale_byte: int) -> None:
    codes[5] = 6  # a 4.0: without a large element the rule would choose a smaller scale
    pairs = torch.tensor(codes, dtype=torch.uint8).view(16, 2)
    packed, scale = pairs[:, 0] | (pairs[:, 1] << 4), torch.tensor([scale_byte], dtype=torch.uint8)
    again = encode_mxfp4(decode_mxfp4(packed, scale))
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


def test_bad_arguments_are_named() -> None:
    packed, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="float16"):
        decode_mxfp4(packed, scale, torch.float16)
    with pytest.raises(ValueError, match=r"\(2, 16\).*\(2, 2\)"):
        decode_mxfp4(packed, scale.expand(2, 2))
    with pytest.raises(ValueError, match="uint8"):
        decode_mxfp4(packed.int(), scale)
    with pytest.raises(ValueError, match="multiple of 32"):
        encode_mxfp4(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="finite"):
        encode_mxfp4(torch.full((1, 32), torch.inf))
    with pytest.raises(ValueError, match="float64"):
        encode_mxfp4(torch.zeros(1, 32, dtype=torch.float64))
