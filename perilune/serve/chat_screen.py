"""What a terminal chat writes: text from a model, piece by piece, which nobody has checked.

Control characters never reach the terminal raw: a model could otherwise move the cursor, retitle the window or forge
output. Nothing in a text is taken for markup, and no line is wrapped or cut by us.

On a terminal, asides (thinking, statistics, remarks) are dimmed. Where there are no styles (a pipe, a file), each of their
lines begins with "~ " instead, so that a filter can tell them from the answer.
"""

import unicodedata

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

_DIM = Style(dim=True)
# They reorder what stands around them, so that a line reads as something else than it is.
_DIRECTION_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    """`text` with control characters (all but line feed and tab) and those that turn the direction of writing as escapes."""
    return "".join(_escaped(character) if _is_control(character) else character for character in text)


def _is_control(character: str) -> bool:
    return character in _DIRECTION_CONTROLS or (unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t")


def _escaped(character: str) -> str:
    return repr(character)[1:-1] if unicodedata.category(character) != "Cf" else f"\\u{ord(character):04x}"


class Screen:
    """Writes to a console and knows whether it stands at the beginning of a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at_line_start = True

    @property
    def has_styles(self) -> bool:
        return self._console.color_system is not None

    def write(self, text: str) -> None:
        """A piece of the answer."""
        self._put(visible(text), None)

    def aside(self, text: str) -> None:
        """A piece of what is not the answer."""
        text = visible(text)
        if not self.has_styles:
            lines = text.split("\n")
            begins = [self._at_line_start, *[True] * (len(lines) - 1)]
            text = "\n".join("~ " + line if begin and line else line for line, begin in zip(lines, begins, strict=True))
        self._put(text, _DIM)

    def remark(self, text: str) -> None:
        """An aside on lines of its own."""
        self.end_line()
        self.aside(text + "\n")

    def end_line(self) -> None:
        if not self._at_line_start:
            self._put("\n", None)

    def _put(self, text: str, style: Style | None) -> None:
        if text:
            self._console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)
            self._at_line_start = text.endswith("\n")
