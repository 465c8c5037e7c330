"""One choice of a chat answer as JSON: in one piece, or in chunks."""

from collections.abc import Sequence

from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.chat_reader import CallPiece, ChatPiece
from perilune.serve.api.chat_request import ChatRequest
from perilune.serve.api.logprobs import chat_logprobs
from perilune.serve.api.responses import (
    ChatAnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from perilune.serve.generation import SampledToken


class ChatChunks:
    """Writes the pieces of choice `index` as the choices of chunks. Every token is reported once, with the first chunk after it."""

    def __init__(self, index: int, body: ChatRequest, tokenizer: Tokenizer) -> None:
        self._index, self._body, self._tokenizer = index, body, tokenizer
        self._has_begun = False
        self._unsent: list[SampledToken] = []

    def take(self, piece: ChatPiece) -> list[ChatChunkChoice]:
        """The chunks that are due after `piece`: often none."""
        if piece.token is not None:
            self._unsent.append(piece.token)
        deltas = _deltas(piece)
        if not self._has_begun:
            deltas.insert(0, Delta(role="assistant", content=""))
            self._has_begun = True
        choices = [self._choice(delta, None) for delta in deltas]
        if piece.finish_reason is not None:
            choices.append(self._choice(Delta(), piece.finish_reason))
        return choices

    def _choice(self, delta: Delta, finish_reason: FinishReason | None) -> ChatChunkChoice:
        tokens, self._unsent = self._unsent, []
        return ChatChunkChoice(
            index=self._index,
            delta=delta,
            finish_reason=finish_reason,
            logprobs=_logprobs(self._body, self._tokenizer, tokens) if tokens else None,
            token_ids=_token_ids(self._body, tokens),
        )


def _deltas(piece: ChatPiece) -> list[Delta]:
    deltas = []
    if piece.reasoning:
        deltas.append(Delta(reasoning_content=piece.reasoning))
    if piece.content:
        deltas.append(Delta(content=piece.content))
    for call in piece.calls:
        if call.id is not None and call.name is not None:
            begin = ToolCallDelta(index=call.index, id=call.id, type="function", function=FunctionDelta(name=call.name, arguments=""))
            deltas.append(Delta(tool_calls=[begin]))
        if call.arguments:
            deltas.append(Delta(tool_calls=[ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))]))
    return deltas


def chat_choice(index: int, body: ChatRequest, tokenizer: Tokenizer, pieces: Sequence[ChatPiece]) -> ChatChoice:
    """The choice that `pieces` make up. Calls that were cut off are left out."""
    tokens = [piece.token for piece in pieces if piece.token is not None]
    reasoning = "".join(piece.reasoning for piece in pieces)
    content = "".join(piece.content for piece in pieces)
    calls = _whole_calls([call for piece in pieces for call in piece.calls])
    message = ChatAnswerMessage(
        role="assistant",
        content=content if content or not calls else None,
        refusal=None,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )
    finish_reason = pieces[-1].finish_reason
    assert finish_reason is not None
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=finish_reason,
        logprobs=_logprobs(body, tokenizer, tokens),
        token_ids=_token_ids(body, tokens),
    )


def _whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCall]:
    by_index: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_call(of_call) for of_call in by_index.values() if of_call[-1].is_last]


def _call(pieces: Sequence[CallPiece]) -> ToolCall:
    first = pieces[0]
    assert first.id is not None and first.name is not None
    function = FunctionCall(name=first.name, arguments="".join(piece.arguments for piece in pieces))
    return ToolCall(id=first.id, type="function", function=function)


def _logprobs(body: ChatRequest, tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
    return chat_logprobs(tokenizer, tokens) if body.logprobs else None


def _token_ids(body: ChatRequest, tokens: Sequence[SampledToken]) -> list[int] | None:
    return [token.id for token in tokens] if body.return_token_ids else None
