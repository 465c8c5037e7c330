"""From the messages and tools of a request to those of the chat format: roles, and tool results matched to their calls."""

from collections.abc import Mapping, Sequence

from perilune.model.chat import in_call_order
from perilune.model.chat_messages import AssistantMessage, Message, SystemMessage, ToolCall, ToolDeclaration, ToolMessage, UserMessage
from perilune.serve.api.chat_request import ChatMessage, Tool
from perilune.serve.api.errors import ApiError

_FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"content", "name"}),
    "developer": frozenset({"content", "name"}),
    "user": frozenset({"content", "name"}),
    "assistant": frozenset({"content", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"content", "tool_call_id", "name"}),
}


def declarations(tools: Sequence[Tool]) -> tuple[ToolDeclaration, ...]:
    return tuple(ToolDeclaration(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools)


def conversation(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages as the model is shown them; tool results in the order of their calls.

    Raises ApiError, status 400, that names the field at fault.
    """
    said: list[Message] = []
    calls = _Calls(0, AssistantMessage(), ())
    for place, message in enumerate(messages):
        _check_fields(place, message)
        if message.role == "tool":
            calls.take_result(place, message)
            continue
        said += calls.results()
        calls = _Calls(place, AssistantMessage(), ())
        match message.role:
            case "user":
                said.append(UserMessage(message.text, message.name))
            case "assistant":
                answer = _assistant(message)
                calls = _Calls(place, answer, [call.id for call in message.tool_calls or ()])
                said.append(answer)
            case _:
                said.append(SystemMessage(message.text, message.name))
    return said + list(calls.results())


def _check_fields(place: int, message: ChatMessage) -> None:
    extra = message.model_fields_set - _FIELDS[message.role] - {"role"}
    if extra:
        where = f"messages[{place}].{min(extra)}"
        raise ApiError(400, f"{where}: a message of role {message.role} has no such field: leave it out", where)
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or message.reasoning_content)):
        where = f"messages[{place}].content"
        raise ApiError(400, f"{where} is missing", where, "missing_required_parameter")


def _assistant(message: ChatMessage) -> AssistantMessage:
    calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return AssistantMessage(message.text, message.reasoning_content or "", calls)


class _Calls:
    """The calls of the last assistant message, which stands at `place`, and the results given so far."""

    def __init__(self, place: int, answer: AssistantMessage, ids: Sequence[str]) -> None:
        self._place = place
        self._calls: dict[str, ToolCall] = {}
        self._results: dict[str, ToolMessage] = {}
        for number, (call_id, call) in enumerate(zip(ids, answer.tool_calls, strict=True)):
            if call_id in self._calls:
                where = f"messages[{place}].tool_calls[{number}].id"
                raise ApiError(400, f"{where}: two calls of this message have the id {call_id!r}: give each its own", where)
            self._calls[call_id] = call

    def take_result(self, place: int, message: ChatMessage) -> None:
        where = f"messages[{place}].tool_call_id"
        call_id = message.tool_call_id
        if call_id is None:
            raise ApiError(
                400, f"{where} is missing: give the id of the call that this is the result of", where, "missing_required_parameter"
            )
        call = self._calls.get(call_id)
        if call is None:
            raise ApiError(400, f"{where}: no call of the last assistant message has the id {call_id!r}", where)
        if call_id in self._results:
            raise ApiError(400, f"{where}: there is a result of {call_id!r} before this one: give each call one result", where)
        if message.name not in (None, call.name):
            where = f"messages[{place}].name"
            raise ApiError(400, f"{where} is {message.name!r}, and the call was of {call.name!r}: leave it out", where)
        self._results[call_id] = ToolMessage(call.name, message.text, call.index)

    def results(self) -> list[ToolMessage]:
        """All of them, now that no more can come."""
        for number, call_id in enumerate(self._calls):
            if call_id not in self._results:
                where = f"messages[{self._place}].tool_calls[{number}].id"
                raise ApiError(
                    400, f"{where}: the call {call_id!r} has no result: add a message of role tool with this tool_call_id", where
                )
        return in_call_order(self._results.values())
