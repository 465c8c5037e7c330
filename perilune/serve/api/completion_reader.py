"""One choice of a completion: from sampled tokens to text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perilune.model.vocabulary import StreamDecoder, Tokenizer
from perilune.serve import generation
from perilune.serve.api.responses import FinishReason
from perilune.serve.api.stop_text import StopText
from perilune.serve.generation import SampledToken


@dataclass(frozen=True)
class TextPiece:
    """What one token added; or, without a token, the end of the choice added. `offset`: characters of text before the token."""

    token: SampledToken | None
    offset: int
    text: str
    finish_reason: FinishReason | None = None


class CompletionReader:
    """A `Reader` of plain text. Special tokens, those of `unseen_ids`, and those that a model may have beyond its tokenizer have no
    text; bytes of a character that the end cuts off are dropped."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], unseen_ids: Collection[int]) -> None:
        self._tokenizer, self._stop, self._unseen_ids = tokenizer, StopText(stops), frozenset(unseen_ids)
        self._decoder = StreamDecoder(tokenizer)
        self._length = 0

    @property
    def is_over(self) -> bool:
        return self._stop.is_met

    def push(self, token: SampledToken) -> TextPiece:
        offset = self._length
        is_seen = token.id < self._tokenizer.vocab_size and token.id not in self._unseen_ids
        text = self._decode(token.id) if is_seen else ""
        self._length += len(text)
        return TextPiece(token, offset, self._stop.push(text))

    def finish(self, reason: generation.FinishReason) -> TextPiece:
        return TextPiece(None, self._length, self._stop.flush(), reason)

    def _decode(self, token_id: int) -> str:
        is_special = self._tokenizer.special_name(token_id) is not None
        return self._decoder.finish() if is_special else self._decoder.push(token_id)
