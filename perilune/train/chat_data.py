"""Conversations to fine-tune on: a JSONL reader that checks every line, and the step from conversations to tokens.

A line is an object `{"messages": [...], "tools": [...], "effort": "..."}` in the style of OpenAI's chat API:

- roles system (or developer, read as system), user, assistant, tool; content is a string, null, or a list of text parts;
- an assistant's hidden reasoning is `reasoning_content` or `thinking`;
- `tool_calls` is a list of `{"id"?, "function": {"name", "arguments"}}`, arguments an object or the JSON text of one;
- a tool message answers a call of the last assistant message: the one named by `tool_call_id`, else the next unanswered one;
- `"weight": 0` on an assistant message keeps it out of the loss.

Other keys of a line are left to its owner (ids, notes); an unknown key of a message is an error unless it is null or empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from perilune.errors import UserError
from perilune.model.chat import render
from perilune.model.chat_messages import (
    AssistantMessage,
    Effort,
    Message,
    SystemMessage,
    ToolCall,
    ToolDeclaration,
    ToolMessage,
    UserMessage,
)
from perilune.model.tokenizer import Tokenizer
from perilune.train.packing import TokenDocuments
from perilune.train.split import split_by_hash, text_hash

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Conversation:
    """A line of the file. `place` is file:line, for messages to people; `text_hash` decides whether it is held out."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDeclaration, ...]
    effort: Effort | None
    place: str
    text_hash: int


def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """Read and check a whole JSONL file; blank lines are skipped. Raises UserError with file:line for the first bad line."""
    conversations = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    conversations.append(parse_conversation(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"Cannot read the conversations in {path}: {error.strerror}.") from error
    if not conversations:
        raise UserError(f"{path} holds no conversation: write one JSON object with `messages` on each line.")
    return tuple(conversations)


def split_conversations(conversations: Sequence[Conversation], held_out_fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out) by a hash of each line's text. Raises UserError as `split_by_hash` does."""
    return split_by_hash(conversations, [c.text_hash for c in conversations], held_out_fraction, conversations[0].place)


def tokenize_conversations(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> TokenDocuments:
    """Each conversation as one document with a target mask."""
    return TokenDocuments.from_sequences(
        tokenizer.encode_with_targets(render(c.messages, c.tools, c.effort, add_generation_prefix=False)) for c in conversations
    )


def parse_conversation(line: bytes, place: str) -> Conversation:
    """Check one line. `place` (file:line) opens the UserError that says what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON ({error}): each line must be one object with `messages`.") from error
    if not isinstance(record, dict):
        _fail(place, "the line", "an object with `messages`", record)
    tools = _tools(record.get("tools"), place)
    effort = record.get("effort")
    if effort is not None and effort not in get_args(Effort):
        _fail(place, "`effort`", "one of " + ", ".join(get_args(Effort)), effort)
    items = record.get("messages")
    if not isinstance(items, list) or not items:
        _fail(place, "`messages`", "a non-empty list", items)
    messages = _messages(items, frozenset(tool.name for tool in tools), place)
    if not any(isinstance(message, AssistantMessage) and message.learn for message in messages):
        raise UserError(f"{place}: no assistant message to learn from: add one, or remove the line.")
    return Conversation(messages, tools, effort, place, text_hash(line.decode("utf-8-sig").strip(), b"held-out"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _fail(place: str, what: str, expected: str, got: object) -> NoReturn:
    shown = json.dumps(got, ensure_ascii=True)
    raise UserError(f"{place}: {what} must be {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}.")


def _tools(value: object, place: str) -> tuple[ToolDeclaration, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _fail(place, "`tools`", "a list of tool declarations", value)
    return tuple(_tool(tool, f"tools[{number}]", place) for number, tool in enumerate(value))


def _tool(tool: object, where: str, place: str) -> ToolDeclaration:
    function = tool.get("function", tool) if isinstance(tool, dict) else None  # also the bare form, without the wrapper
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        _fail(place, where, "a declaration with a name, like {'type': 'function', 'function': {'name': ...}}", tool)
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    if not isinstance(parameters, dict):
        _fail(place, f"{where}.parameters", "a JSON Schema object", parameters)
    return ToolDeclaration(name, _text(description, f"{where}.description", place), parameters)


_COMMON_KEYS = frozenset({"role", "content", "name"})
_KEYS: Mapping[Role, frozenset[str]] = {
    "system": _COMMON_KEYS,
    "user": _COMMON_KEYS,
    "assistant": _COMMON_KEYS | {"reasoning_content", "thinking", "tool_calls", "weight"},
    "tool": _COMMON_KEYS | {"tool_call_id"},
}


def _messages(items: list[Any], declared: frozenset[str], place: str) -> tuple[Message, ...]:
    """The messages, tool results in the order of their calls."""
    messages: list[Message] = []
    open_calls: dict[int, tuple[str | None, str]] = {}  # call index -> (id, tool name), of the last assistant message
    for number, item in enumerate(items):
        where = f"messages[{number}]"
        role = _role(item, where, place)
        unknown = sorted(key for key, value in item.items() if key not in _KEYS[role] and value not in (None, "", [], {}))
        if unknown:
            known = ", ".join(sorted(_KEYS[role]))
            raise UserError(f"{place}: {where} ({role}) has {unknown[0]!r}, which is not understood: remove it (known: {known}).")
        content = _content(item.get("content"), where, place, may_be_absent=role == "assistant")
        if role == "tool":
            _insert_in_call_order(messages, _answer(item, content, open_calls, where, place))
            continue
        calls = _tool_calls(item.get("tool_calls"), declared, where, place) if role == "assistant" else []
        open_calls = {index: (call_id, call.name) for index, (call_id, call) in enumerate(calls, 1)}
        if role == "assistant":
            said = AssistantMessage(
                content, _reasoning(item, where, place), tuple(call for _, call in calls), learn=_learn(item.get("weight"), where, place)
            )
            if not (said.response or said.thinking or said.tool_calls):
                raise UserError(f"{place}: {where} is an assistant message without content, reasoning or tool calls: remove it.")
            messages.append(said)
        else:
            messages.append(SystemMessage(content) if role == "system" else UserMessage(content))
    return tuple(messages)


def _insert_in_call_order(messages: list[Message], result: ToolMessage) -> None:
    """The chat format wants results in the order of the calls; files have them in the order in which they came."""
    position = len(messages)
    while position and isinstance(before := messages[position - 1], ToolMessage) and before.index > result.index:
        position -= 1
    messages.insert(position, result)


def _role(item: object, where: str, place: str) -> Role:
    if not isinstance(item, dict):
        _fail(place, where, "an object with `role` and `content`", item)
    name = item.get("role")
    name = "system" if name == "developer" else name
    roles: tuple[Role, ...] = get_args(Role)
    for role in roles:
        if name == role:
            return role
    _fail(place, f"{where}.role", f"one of {', '.join(roles)}", name)


def _content(value: object, where: str, place: str, *, may_be_absent: bool) -> str:
    if value is None and may_be_absent:
        return ""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                _fail(place, f"{where}.content", "text, or a list of text parts", part)
        value = "".join(part["text"] for part in value)
    return _text(value, f"{where}.content", place)


def _text(value: object, what: str, place: str) -> str:
    if not isinstance(value, str):
        _fail(place, what, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        _fail(place, what, "valid Unicode", value)
    return value


def _reasoning(item: Mapping[str, Any], where: str, place: str) -> str:
    given = {key: item[key] for key in ("reasoning_content", "thinking") if item.get(key) is not None}
    if len(given) > 1:
        raise UserError(f"{place}: {where} has both `reasoning_content` and `thinking`: keep one.")
    for key, value in given.items():
        return _text(value, f"{where}.{key}", place)
    return ""


def _learn(weight: object, where: str, place: str) -> bool:
    if weight not in (None, 0, 1):
        _fail(place, f"{where}.weight", "0 or 1", weight)
    return weight != 0


def _tool_calls(value: object, declared: frozenset[str], where: str, place: str) -> list[tuple[str | None, ToolCall]]:
    """(id if any, call) of each entry."""
    if value is None:
        return []
    if not isinstance(value, list):
        _fail(place, f"{where}.tool_calls", "a list", value)
    calls: list[tuple[str | None, ToolCall]] = []
    for number, item in enumerate(value):
        what = f"{where}.tool_calls[{number}]"
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict):
            _fail(place, what, "an object with `function`", item)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _fail(place, f"{what}.function.name", "the name of a tool", name)
        if declared and name not in declared:
            _fail(place, f"{what}.function.name", "one of the declared tools (" + ", ".join(sorted(declared)) + ")", name)
        call_id = item.get("id")
        if call_id is not None and (not isinstance(call_id, str) or call_id in [other for other, _ in calls]):
            _fail(place, f"{what}.id", "text that no other call of the message has", call_id)
        calls.append((call_id, ToolCall(name, _arguments(function.get("arguments"), f"{what}.function.arguments", place))))
    return calls


def _arguments(value: object, what: str, place: str) -> Mapping[str, Any]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{place}: {what} is not valid JSON ({error}): a model trained on it would learn to write broken calls."
            ) from error
    if not isinstance(parsed, dict):
        _fail(place, what, "an object, or the JSON text of one", value)
    return parsed


def _answer(item: Mapping[str, Any], content: str, open_calls: dict[int, tuple[str | None, str]], where: str, place: str) -> ToolMessage:
    """Take the answered call out of `open_calls`."""
    call_id = item.get("tool_call_id")
    named = [index for index, (known, _) in open_calls.items() if call_id is not None and known == call_id]
    # Data whose calls carry no ids may still carry ids on answers: there, order decides.
    unnamed = [index for index, (known, _) in open_calls.items() if call_id is None or known is None]
    candidates = named or unnamed
    if not candidates:
        detail = "answers no open call" if call_id is None else f"answers call {call_id!r}, which is not open"
        raise UserError(f"{place}: {where} (tool) {detail}: a tool message must follow the assistant message whose call it answers.")
    index = candidates[0]
    _, name = open_calls.pop(index)
    if item.get("name") not in (None, name):
        _fail(place, f"{where}.name", f"{name!r}, the tool that was called", item["name"])
    return ToolMessage(name, content, index)
