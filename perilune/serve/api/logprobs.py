"""Log-probabilities as the OpenAI API reports them: with the text of tokens, which need not be whole characters."""

from collections.abc import Sequence

from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from perilune.serve.generation import SampledToken

LOWEST = -9999.0
"""Stands for a probability of zero, whose logarithm JSON cannot say (OpenAI's convention)."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself: its text, a special token's name, or, where its bytes are no whole characters, these: `bytes:\\xe6\\xbc`."""
    content = token_bytes(tokenizer, token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """A model may have more ids than its tokenizer; those have no bytes."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> ChatLogprobs:
    content = []
    for token in tokens:
        top = [_top(tokenizer, *pair) for pair in token.top]
        own = _top(tokenizer, token.id, token.logprob)
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(token=token_text(tokenizer, token_id), logprob=max(logprob, LOWEST), bytes=list(token_bytes(tokenizer, token_id)))


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken], offsets: Sequence[int]) -> CompletionLogprobs:
    """`offsets`: of each token. The sampled token is among its own `top_logprobs`, likely or not. Of two tokens that read the same, the
    likelier is named."""
    top_logprobs = []
    for token in tokens:
        by_text: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.id, token.logprob)):
            by_text.setdefault(token_text(tokenizer, token_id), max(logprob, LOWEST))
        top_logprobs.append(by_text)
    return CompletionLogprobs(
        tokens=[token_text(tokenizer, token.id) for token in tokens],
        token_logprobs=[max(token.logprob, LOWEST) for token in tokens],
        top_logprobs=top_logprobs,
        text_offset=list(offsets),
    )
