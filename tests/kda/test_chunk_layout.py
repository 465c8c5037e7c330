"""Every token has exactly one row, chunks never straddle sequences, and chunks that advance together lie together."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kda.chunk_layout import chunk_layout

CPU = torch.device("cpu")


@given(lengths=st.lists(st.integers(0, 70), max_size=8).map(tuple), chunk=st.sampled_from([16, 32, 64]))
@settings(max_examples=150, deadline=None)
def test_rows_tokens_and_steps_agree_for_any_lengths(lengths, chunk):
    layout = chunk_layout(lengths, chunk, CPU)
    total = layout.rows.numel() // chunk
    counts = [-(-n // chunk) for n in lengths]
    assert total == sum(counts)
    assert sorted(layout.order.tolist()) == list(range(len(lengths)))
    assert [counts[n] for n in layout.order] == sorted(counts, reverse=True)

    rows = layout.rows.view(-1, chunk).tolist()
    valid = torch.ones(total, chunk, dtype=torch.bool) if layout.valid is None else layout.valid
    assert (layout.valid is None) == all(n % chunk == 0 for n in lengths)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    seen = 0
    for c, (first, sequences) in enumerate(layout.steps):
        assert first == seen
        seen += sequences
        assert sequences == sum(count > c for count in counts)
        for i, n in enumerate(layout.order[:sequences].tolist()):
            tokens = list(range(starts[n] + c * chunk, min(starts[n] + (c + 1) * chunk, starts[n] + lengths[n])))
            assert valid[first + i].tolist() == [True] * len(tokens) + [False] * (chunk - len(tokens))
            assert rows[first + i] == tokens + tokens[-1:] * (chunk - len(tokens))
    assert seen == total

    assert layout.place.shape == (sum(lengths),)
    assert layout.rows[layout.place].tolist() == list(range(sum(lengths)))
    assert valid.flatten()[layout.place].all()


def test_an_example_written_out():
    layout = chunk_layout((3, 0, 18), 16, CPU)
    assert layout.order.tolist() == [2, 0, 1]
    assert layout.steps == ((0, 2), (2, 1))
    assert layout.rows.view(3, 16).tolist() == [list(range(3, 19)), [0, 1, *[2] * 14], [19, *[20] * 15]]
    assert layout.place.tolist() == [16, 17, 18, *range(16), 32, 33]
