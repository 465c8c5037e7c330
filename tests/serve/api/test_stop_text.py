from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.serve.api.stop_text import StopText

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=3, max_size=8) | st.text("ab", min_size=1, max_size=2), max_size=3)


def slow_twin(text: str, stops: list[str]) -> tuple[str, bool]:
    """Up to the first stop string, found by looking at every beginning of the text in turn."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 99), max_size=12))
def test_what_is_let_out_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    stop = StopText(stops)
    shown = "".join([stop.push(piece) for piece in pieces_of(text, cuts)])
    shown += stop.flush()
    assert (shown, stop.is_met) == slow_twin(text, stops)


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists)
def test_at_every_moment_all_is_shown_that_can_be_in_no_stop_string_and_nothing_else(text: str, stops: list[str]) -> None:
    stop = StopText(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += stop.push(character)
        if stop.is_met:
            break
        beginnings = [length for one in stops for length in range(len(one)) if text[:end].endswith(one[:length])]
        assert shown == text[: end - max(beginnings, default=0)]


def test_a_long_stop_string_that_never_comes_costs_no_more_than_the_text() -> None:
    stop = StopText(["a" * 1000 + "b"])
    assert sum(len(stop.push("a")) for _ in range(20_000)) == 19_000
    assert stop.flush() == "a" * 1000


def test_of_two_stop_strings_that_end_together_no_part_of_the_longer_is_shown() -> None:
    assert StopText(["c", "abc"]).push("xabcx") == "x"


def test_after_a_flush_what_was_shown_is_no_part_of_a_stop_string() -> None:
    stop = StopText(["ab"])
    assert (stop.push("a"), stop.flush(), stop.push("b"), stop.is_met) == ("", "a", "b", False)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopText([]).push("abc") == "abc"
