"""Per-head Muon against its slow twin, and the properties it is chosen for."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.train import muon
from perilune.train.muon import MatrixParameter, Muon, muon_step_reference, newton_schulz, update_scale

SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    ((16, 12), 4),
    ((16, 12), None),
    ((8, 12), 2),
    ((12, 8), None),
    ((24, 4), 3),  # blocks taller than wide on top of blocks of the transposed shape
    ((4, 8), None),
    ((3, 8, 12), None),
    ((2, 8, 6), 2),
    ((5, 1), None),
]


def make(shapes: list[tuple[tuple[int, ...], int | None]], dtype: torch.dtype = torch.float64) -> list[MatrixParameter]:
    return [MatrixParameter(torch.nn.Parameter(torch.randn(shape, dtype=dtype)), heads) for shape, heads in shapes]


@pytest.mark.parametrize("stack_elements", [1, 200, 1 << 17])
def test_the_batched_optimizer_agrees_with_one_head_at_a_time(stack_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_CPU_STACK_ELEMENTS", stack_elements)
    matrices = make(SHAPES)
    twins = copy.deepcopy(matrices)
    buffers = [torch.zeros_like(twin.parameter) for twin in twins]
    optimizer = Muon(matrices, lr=0.02, weight_decay=0.3)
    for step in range(4):
        for number, (matrix, twin, buffer) in enumerate(zip(matrices, twins, buffers, strict=True)):
            if (step + number) % 3 == 0:
                matrix.parameter.grad = None  # left alone in this step: neither decay nor momentum moves it
                continue
            matrix.parameter.grad = torch.randn_like(matrix.parameter)
            muon_step_reference(twin, matrix.parameter.grad, buffer, lr=0.02, weight_decay=0.3)
        optimizer.step()
        for matrix, twin in zip(matrices, twins, strict=True):
            torch.testing.assert_close(matrix.parameter, twin.parameter, rtol=1e-9, atol=1e-11)


def test_gradients_of_any_memory_layout_give_the_same_step() -> None:
    matrices = make([((6, 8), 2), ((2, 4, 8), None)])
    twins = copy.deepcopy(matrices)
    for matrix, twin in zip(matrices, twins, strict=True):
        gradient = torch.randn_like(matrix.parameter)
        matrix.parameter.grad = gradient.mT.contiguous().mT
        twin.parameter.grad = gradient
    Muon(matrices, lr=0.1).step()
    Muon(twins, lr=0.1).step()
    for matrix, twin in zip(matrices, twins, strict=True):
        assert torch.equal(matrix.parameter, twin.parameter)


@settings(max_examples=50)
@given(st.integers(1, 24), st.integers(1, 24), st.floats(-6, 6), st.integers(0, 2**31))
def test_orthogonalised_blocks_have_singular_values_near_one(rows: int, columns: int, exponent: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Singular values within a factor of 30 of the largest reach the plateau in five steps; a random square matrix may have smaller ones.
    rank = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, rank, generator=generator)).Q
    spectrum = torch.logspace(0, -1.4, rank) * 10.0**exponent
    values = torch.linalg.svdvals(newton_schulz((u * spectrum @ v.T)[None])[0])
    assert values.min() > 0.6 and values.max() < 1.25


def test_each_head_is_orthogonalised_by_itself() -> None:
    heads, rows, columns = 4, 6, 32
    (matrix,) = make([((heads * rows, columns), heads)])
    gradient = torch.randn_like(matrix.parameter)
    gradient[:rows] *= 1e4  # a loud head must not drown the others
    before = matrix.parameter.detach().clone()
    matrix.parameter.grad = gradient
    Muon([matrix], lr=1.0, weight_decay=0.0).step()
    for head in ((before - matrix.parameter) / update_scale(rows, columns)).split(rows):
        values = torch.linalg.svdvals(head)
        assert values.min() > 0.6 and values.max() < 1.25


@pytest.mark.parametrize(("shape", "heads"), [((64, 64), None), ((32, 128), None), ((128, 32), None), ((128, 64), 8), ((4, 16, 48), None)])
def test_an_updates_rms_is_near_a_fifth_whatever_the_shape(shape: tuple[int, ...], heads: int | None) -> None:
    (matrix,) = make([(shape, heads)])
    before = matrix.parameter.detach().clone()
    matrix.parameter.grad = torch.randn_like(matrix.parameter)
    Muon([matrix], lr=1.0, weight_decay=0.0).step()
    rms = (before - matrix.parameter).square().mean().sqrt().item()
    assert rms == pytest.approx(0.2, rel=0.2)


def test_the_scale_of_the_gradient_does_not_matter() -> None:
    loud, quiet = (make([((8, 8), 2)]) for _ in range(2))
    quiet[0].parameter.data.copy_(loud[0].parameter.data)
    gradient = torch.randn(8, 8, dtype=torch.float64)
    loud[0].parameter.grad, quiet[0].parameter.grad = gradient * 1e3, gradient * 1e-3
    Muon(loud, lr=0.1).step()
    Muon(quiet, lr=0.1).step()
    torch.testing.assert_close(loud[0].parameter, quiet[0].parameter, rtol=1e-5, atol=1e-6)


def test_weight_decay_is_decoupled_and_a_zero_gradient_moves_nothing_else() -> None:
    (matrix,) = make([((4, 6), 2)], torch.float32)
    before = matrix.parameter.detach().clone()
    matrix.parameter.grad = torch.zeros_like(matrix.parameter)
    Muon([matrix], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(matrix.parameter.detach(), before * 0.95)


def test_momentum_is_nesterovs() -> None:
    (matrix,) = make([((3, 3), None)])
    optimizer = Muon([matrix], lr=0.0, momentum=0.75)
    matrix.parameter.grad = torch.ones_like(matrix.parameter)
    optimizer.step()
    matrix.parameter.grad = torch.full_like(matrix.parameter, 3.0)
    optimizer.step()
    assert torch.equal(
        optimizer.state[matrix.parameter]["momentum_buffer"], torch.full((3, 3), 0.75 * 0.25 + 0.25 * 3.0, dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_a_linear_map(dtype: torch.dtype) -> None:
    target = torch.randn(8, 16) * 0.3
    matrix = MatrixParameter(torch.nn.Parameter(torch.zeros(8, 16)), heads=2)
    optimizer = Muon([matrix], lr=0.2, weight_decay=0.0, orthogonalise_dtype=dtype)
    losses = []
    for step in range(60):
        inputs = torch.randn(64, 16)
        loss = (inputs @ (matrix.parameter - target).T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * (1 - step / 60)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_saved_state_continues_to_the_same_bits() -> None:
    matrices = make(SHAPES, torch.float32)
    twins = copy.deepcopy(matrices)
    first = Muon(matrices, lr=0.02)
    gradients = [[torch.randn_like(matrix.parameter) for matrix in matrices] for _ in range(4)]

    def advance(optimizer: Muon, target: list[MatrixParameter], steps: range) -> None:
        for step in steps:
            for matrix, gradient in zip(target, gradients[step], strict=True):
                matrix.parameter.grad = gradient.clone()
            optimizer.step()

    advance(first, matrices, range(2))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    for matrix, twin in zip(matrices, twins, strict=True):
        twin.parameter.data.copy_(matrix.parameter.data)
    second = Muon(twins, lr=0.02)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    advance(first, matrices, range(2, 4))
    advance(second, twins, range(2, 4))
    for matrix, twin in zip(matrices, twins, strict=True):
        assert torch.equal(matrix.parameter, twin.parameter)


def test_state_of_other_heads_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    saved = Muon([MatrixParameter(parameter, 2)]).state_dict()
    with pytest.raises(ValueError, match=r"\[2\] heads, this model into \[4\]"):
        Muon([MatrixParameter(parameter, 4)]).load_state_dict(saved)


def test_a_closure_gives_the_loss() -> None:
    (matrix,) = make([((2, 2), None)])

    def closure() -> float:
        loss = matrix.parameter.square().sum()
        loss.backward()
        return loss.item()

    assert Muon([matrix]).step(closure) > 0.0
    assert Muon([matrix]).step() is None


def test_values_out_of_range_are_refused() -> None:
    matrix = MatrixParameter(torch.nn.Parameter(torch.randn(6, 4)))
    for options in ({"lr": -1.0}, {"weight_decay": -1.0}, {"momentum": 1.0}, {"newton_schulz_steps": 0}):
        with pytest.raises(ValueError):
            Muon([matrix], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a matrix"):
        MatrixParameter(torch.nn.Parameter(torch.randn(3)))
    with pytest.raises(ValueError, match="do not divide"):
        MatrixParameter(torch.nn.Parameter(torch.randn(6, 4)), heads=4)
    with pytest.raises(ValueError, match="fp32"):
        MatrixParameter(torch.nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16)))
