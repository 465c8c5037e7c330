"""What reaches a terminal: every text, and nothing that drives it."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from perilune.serve.chat_screen import Screen, visible


@given(text=st.text())
def test_visible_text_holds_no_control_characters_and_is_the_text_where_there_were_none(text: str) -> None:
    shown = visible(text)
    assert not any((character < " " and character not in "\n\t") or "\x7f" <= character < "\xa0" for character in shown)
    assert visible(shown) == shown
    if text.isprintable():
        assert shown == text


@given(pieces=st.lists(st.text("ab\n\t~ ", max_size=5)))
def test_what_is_written_in_pieces_reads_like_what_is_written_at_once(pieces: list[str]) -> None:
    screens = io.StringIO(), io.StringIO()
    in_pieces, at_once = (Screen(Console(file=file, width=5)) for file in screens)
    for piece in pieces:
        in_pieces.aside(piece)
    at_once.aside("".join(pieces))
    assert screens[0].getvalue() == screens[1].getvalue()
