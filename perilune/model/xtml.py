"""XTML, the markup of K3's chat format: how a tag is written as segments, and how tags are found again in token ids.

An element is `<|open|>tag key="value"<|sep|> … <|close|>tag<|sep|>`. Only the four control tokens are special; tag names,
attributes and everything between are ordinary text. So the writer marks the control tokens alone as special, and the
reader goes by token *ids* alone: text that spells `<|open|>` is text in both directions.

Source: K3 technical report (arXiv 2607.24653), App. F; K3 chat template.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from perilune.model.special_tokens import CLOSE, END_OF_MESSAGE, OPEN, SEP
from perilune.model.vocabulary import Segment, StreamDecoder, Tokenizer


def control(token: str, is_target: bool = False) -> Segment:
    """One control token."""
    return Segment(token, allow_special=True, is_target=is_target)


def plain(text: str, is_target: bool = False) -> list[Segment]:
    """Text that stays text; no segment if it is empty."""
    return [Segment(text, is_target=is_target)] if text else []


def open_tag(tag: str, attributes: Mapping[str, str | int] | None = None, is_target: bool = False) -> list[Segment]:
    """`<|open|>tag key="value" …<|sep|>`. Values come from anywhere; `&` and `"` in them are escaped.

    A value is a segment of its own, so the ids of the markup around it do not depend on it.
    """
    segments = [control(OPEN, is_target), *plain(tag, is_target)]
    for key, value in (attributes or {}).items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        for text in (f" {key}", '="', escaped, '"'):
            segments += plain(text, is_target)
    return [*segments, control(SEP, is_target)]


def close_tag(tag: str, is_target: bool = False) -> list[Segment]:
    """`<|close|>tag<|sep|>`."""
    return [control(CLOSE, is_target), *plain(tag, is_target), control(SEP, is_target)]


@dataclass(frozen=True)
class Text:
    """Some text between tags; long text comes as several of these."""

    text: str


@dataclass(frozen=True)
class OpenTag:
    """`well_formed` is False if some of the header could not be read as a tag and quoted attributes."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    well_formed: bool = True


@dataclass(frozen=True)
class CloseTag:
    tag: str


@dataclass(frozen=True)
class EndOfMessage:
    pass


@dataclass(frozen=True)
class Stray:
    """A special token where it means nothing, or a tag that was never finished. `text` is how it reads."""

    text: str


Item: TypeAlias = Text | OpenTag | CloseTag | EndOfMessage | Stray

# Possessive, and attributes only from the start of a word: a model can fill a tag with anything, at any length.
_HEADER = re.compile(r'([^\s"=]++)((?: [^\s"=]++="[^"]*+")*+)')
_ATTRIBUTE = re.compile(r'(?<![^\s"=])([^\s"=]++)="([^"]*+)"')


def _read_open_tag(header: str) -> OpenTag:
    whole = _HEADER.fullmatch(header)
    words = header.split(maxsplit=1)
    tag = whole[1] if whole else (words[0] if words else "")
    pairs = _ATTRIBUTE.findall(whole[2] if whole else header)
    attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
    return OpenTag(tag, attributes, well_formed=whole is not None and len(attributes) == len(pairs))


class XtmlScanner:
    """Turns token ids, given piece by piece, into text and tags. Never raises for ids of the vocabulary, in any order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `UserError` if the vocabulary has no XTML control tokens (a K2 or Kimi Linear one)."""
        self._tokenizer = tokenizer
        self._text = StreamDecoder(tokenizer)
        self._open, self._close, self._sep, self._end = (tokenizer.special_id(name) for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE))
        self._header: list[str] | None = None
        """The text of the tag being read, None between tags."""
        self._header_closes = False

    def push(self, ids: Iterable[int]) -> list[Item]:
        """What the ids complete. Raises `UserError` for an id outside the vocabulary."""
        items: list[Item] = []
        for token_id in ids:
            name = self._tokenizer.special_name(token_id)
            if name is None:
                items += self._take_text(self._text.push(token_id))
                continue
            items += self._take_text(self._text.finish())
            if token_id == self._sep and self._header is not None:
                header, self._header = "".join(self._header), None
                items.append(CloseTag(header) if self._header_closes else _read_open_tag(header))
            elif token_id in (self._open, self._close):
                items += self._abandon_header()
                self._header, self._header_closes = [], token_id == self._close
            elif token_id == self._end:
                items += self._abandon_header()
                items.append(EndOfMessage())
            else:
                items.append(Stray(name))
        return items

    def finish(self) -> list[Item]:
        """What the end of the ids leaves over: at most a tag never finished. Bytes of an unfinished character are dropped."""
        self._text.finish()
        return self._abandon_header()

    def _take_text(self, text: str) -> list[Item]:
        if self._header is not None:
            self._header.append(text)
            return []
        return [Text(text)] if text else []

    def _abandon_header(self) -> list[Item]:
        if self._header is None:
            return []
        text, self._header = "".join(self._header), None
        return [Stray((CLOSE if self._header_closes else OPEN) + text)]
