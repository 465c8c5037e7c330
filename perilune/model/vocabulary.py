"""What every vocabulary can do: text to ids and back, with special tokens kept apart from text.

The rule that makes chat rendering safe against injection lives here and nowhere else: `encode_text` works with a text
vocabulary that does not know the special tokens at all, so no spelling of one can ever become its id. Special ids come
only out of segments whose author said `allow_special`.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from perilune.errors import UserError


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered prompt, encoded on its own (ids never merge across a segment's edge).

    `allow_special`: special tokens spelled in `text` become their ids. Only control markup written by this package sets it.
    `is_target`: the assistant itself would have sampled this piece, so supervised fine-tuning trains on it.
    """

    text: str
    allow_special: bool = False
    is_target: bool = False


class Tokenizer(ABC):
    """A vocabulary of text tokens `0 … num_text_tokens - 1` followed by special tokens up to `vocab_size - 1`.

    Text is any `str` that UTF-8 can carry. A lone surrogate (which JSON's `\\ud800` can produce) raises `UserError` rather
    than being replaced, because ids must decode to exactly the text they came from.
    """

    def __init__(self, num_text_tokens: int, special_names: Sequence[str], end_of_message: str) -> None:
        self.num_text_tokens = num_text_tokens
        self.special_names = tuple(special_names)
        self.vocab_size = num_text_tokens + len(self.special_names)
        self._special_ids = {name: num_text_tokens + place for place, name in enumerate(self.special_names)}
        # Longest first: a name that begins another must not win over it.
        longest_first = sorted(self.special_names, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.bos_id = self.special_id("[BOS]")
        self.eos_id = self.special_id("[EOS]")
        """Ends a document in pre-training. Generation stops at `end_of_message_id`, which is config.json's eos_token_id."""
        self.pad_id = self.special_id("[PAD]")
        self.end_of_message_id = self.special_id(end_of_message)

    @abstractmethod
    def _encode_utf8_text(self, text: str) -> list[int]:
        """Ids of `text`, which UTF-8 can carry; every id is below `num_text_tokens`."""

    @abstractmethod
    def _text_token_bytes(self, token_id: int) -> bytes:
        """The bytes of one text token; `token_id` is in range."""

    @abstractmethod
    def save(self, directory: Path | str) -> None:
        """Write the files `load_tokenizer` reads into `directory` (made if missing), each aside and renamed."""

    @final
    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as plain text: never a special id, whatever the text spells.

        Raises `UserError` if `text` holds a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text holds the lone surrogate {text[error.start]!r} at character {error.start}, which UTF-8 cannot carry: "
                'replace it first, for example with text.encode("utf-8", "replace").decode("utf-8")'
            ) from None
        return self._encode_utf8_text(text)

    @final
    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of the segments, one after the other. Special ids come only from segments with `allow_special`."""
        ids: list[int] = []
        for segment in segments:
            ids += self._encode_segment(segment)
        return ids

    @final
    def encode_with_targets(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        """`encode`, and for each id whether it is a target of supervised fine-tuning (`Segment.is_target`)."""
        ids: list[int] = []
        is_target: list[bool] = []
        for segment in segments:
            piece = self._encode_segment(segment)
            ids += piece
            is_target += [segment.is_target] * len(piece)
        return ids, is_target

    def _encode_segment(self, segment: Segment) -> list[int]:
        if not segment.allow_special:
            return self.encode_text(segment.text)
        ids: list[int] = []
        for piece in self._special_pattern.split(segment.text):
            special = self._special_ids.get(piece)
            if special is not None:
                ids.append(special)
            elif piece:
                ids += self.encode_text(piece)
        return ids

    @final
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its name's. Raises `UserError` for an id outside the vocabulary."""
        name = self.special_name(token_id)
        return self._text_token_bytes(token_id) if name is None else name.encode()

    @final
    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all tokens in order. Raises `UserError` for an id outside the vocabulary."""
        return b"".join(map(self.token_bytes, ids))

    @final
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens by their names, bytes that are not UTF-8 as U+FFFD.

        For people to read: decoding and encoding again need not give the same ids. Keep ids where ids matter.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @final
    def special_id(self, name: str) -> int:
        """The id of a special token by name. Raises `UserError` if this vocabulary has none of that name."""
        try:
            return self._special_ids[name]
        except KeyError:
            raise UserError(
                f"this vocabulary has no special token {name!r}: "
                "check that the tokenizer's family (K3, or K2 and Kimi Linear) is that of the chat format in use"
            ) from None

    @final
    def special_name(self, token_id: int) -> str | None:
        """The name of a special id, None for a text id. Raises `UserError` for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise UserError(
                f"token id {token_id} is outside this vocabulary of {self.vocab_size} tokens: "
                "check that the ids came from the model this tokenizer belongs to"
            )
        return None if token_id < self.num_text_tokens else self.special_names[token_id - self.num_text_tokens]


class StreamDecoder:
    """Decodes ids one at a time for streaming: text comes out as soon as its UTF-8 bytes are complete.

    The pieces and `finish()` joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty. Raises `UserError` for an id outside the vocabulary."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held back, incomplete bytes as U+FFFD; the decoder is then ready for a new text."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
