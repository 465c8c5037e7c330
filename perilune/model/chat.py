"""K3's chat format: a conversation as segments, ready for `Tokenizer.encode`.

Order: tool declaration, thinking effort, the conversation, one-shot options (tool choice, response format), generation
prefix. What can change from turn to turn stands last, so a longer conversation always begins with the tokens of the
shorter one: rendering is append-only, and a turn the model sampled is kept as its ids, never decoded and encoded again
(`render_continuation` gives what follows it).

In thinking mode every assistant message keeps its think channel, even an empty one; instruct mode has none.

Source: K3 technical report (arXiv 2607.24653), App. F; K3 chat template, whose option texts are used word for word
because the model was trained on them. Deviations: thinking that is only white space is kept (the template drops it, and
then a sampled turn would not render to its own tokens); a tool result carries the index of its call, not its place
among the results; argument values other than text are written without spaces; images are not supported.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from perilune.errors import UserError
from perilune.model.chat_messages import (
    AssistantMessage,
    Effort,
    Message,
    OptionMessage,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolDeclaration,
    ToolDeclarationMessage,
    ToolMessage,
    UserMessage,
)
from perilune.model.json_text import JsonValue, compact_json, json_type
from perilune.model.special_tokens import END_OF_MESSAGE
from perilune.model.vocabulary import Segment
from perilune.model.xtml import close_tag, control, open_tag, plain

__all__ = [
    "AssistantMessage",
    "Effort",
    "Message",
    "OptionMessage",
    "ResponseFormat",
    "SystemMessage",
    "ToolCall",
    "ToolChoice",
    "ToolDeclaration",
    "ToolDeclarationMessage",
    "ToolMessage",
    "UserMessage",
    "generation_prefix",
    "in_call_order",
    "render",
    "render_continuation",
]

TOOLS_INTRODUCTION = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
NEW_TOOLS_INTRODUCTION = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
)
TOOL_CHOICE_TEXTS = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
JSON_TEXT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA_INTRODUCTION = "\nThe JSON data must match the following schema:\n"

ResponseFormat = Literal["json_object"] | Mapping[str, JsonValue]
"""Any JSON object, or JSON that a schema (given as a mapping) describes."""


def render(
    messages: Sequence[Message],
    tools: Sequence[ToolDeclaration] = (),
    effort: Effort | None = "max",
    tool_choice: ToolChoice | None = None,
    response_format: ResponseFormat | None = None,
    thinking: bool = True,
    add_generation_prefix: bool = True,
) -> list[Segment]:
    """The whole prompt for the next assistant message.

    `effort` is said only in thinking mode; None leaves it out. `tool_choice` "auto" says nothing.
    Targets are what the assistant would have sampled: all of each assistant message after its generation prefix, up to
    and including `<|end_of_msg|>`, but not malformed arguments, nor anything of a message without `learn`.

    Raises `UserError` for an unknown effort or tool choice, tool results out of call order, or arguments JSON cannot say.
    """
    if effort not in (None, *get_args(Effort)):
        raise UserError(f"thinking effort {effort!r} is not one K3 knows: use low, high or max")
    segments: list[Segment] = []
    if tools:
        segments += _render_message(ToolDeclarationMessage(tuple(tools), extends=False), thinking)
    if thinking and effort is not None:
        segments += _render_message(OptionMessage("thinking-effort", EFFORT_TEXT.format(effort=effort)), thinking)
    return segments + render_continuation(messages, tool_choice, response_format, thinking, add_generation_prefix)


def render_continuation(
    messages: Sequence[Message],
    tool_choice: ToolChoice | None = None,
    response_format: ResponseFormat | None = None,
    thinking: bool = True,
    add_generation_prefix: bool = True,
) -> list[Segment]:
    """Only what follows a conversation already held as ids (through `<|end_of_msg|>`): more messages, options, the next prefix.

    Ids of the conversation so far + encoded `render_continuation(new)` = ids of the whole, with nothing encoded twice.
    Tools and effort cannot be changed here, for they stand before the conversation; a `ToolDeclarationMessage` adds tools.
    """
    segments: list[Segment] = []
    last_result = 0
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.index <= last_result:
                raise UserError(
                    f"the result of call {message.index} ({message.tool}) stands after that of call {last_result}: "
                    "give each call one result, in the order of the calls (in_call_order sorts them)"
                )
            last_result = message.index
        else:
            last_result = 0
        segments += _render_message(message, thinking)
    for option in _one_shot_options(tool_choice, response_format):
        segments += _render_message(option, thinking)
    return segments + (generation_prefix(thinking) if add_generation_prefix else [])


def generation_prefix(thinking: bool = True) -> list[Segment]:
    """What stands before the first token the model samples: an assistant message opened up to its first channel."""
    return open_tag("message", {"role": "assistant"}) + open_tag("think" if thinking else "response")


def in_call_order(results: Iterable[ToolMessage]) -> list[ToolMessage]:
    """Tool results of one assistant message, sorted as the format wants them: by the index of their call."""
    return sorted(results, key=lambda result: result.index)


def _one_shot_options(tool_choice: ToolChoice | None, response_format: ResponseFormat | None) -> list[OptionMessage]:
    options = []
    if tool_choice not in (None, *get_args(ToolChoice)):
        raise UserError(f"tool choice {tool_choice!r} is not one K3 knows: use auto, required or none")
    if tool_choice in TOOL_CHOICE_TEXTS:
        options.append(OptionMessage("tool-choice", TOOL_CHOICE_TEXTS[tool_choice]))
    if response_format == "json_object":
        options.append(OptionMessage("response-format", JSON_TEXT.format(kind="json_object")))
    elif isinstance(response_format, Mapping):
        text = JSON_TEXT.format(kind="json_schema") + SCHEMA_INTRODUCTION + _fenced(response_format)
        options.append(OptionMessage("response-format", text))
    elif response_format is not None:
        raise UserError(f"response format {response_format!r} is not one K3 knows: use json_object or a JSON Schema as a mapping")
    return options


def _fenced(value: object) -> str:
    return f"```json\n{compact_json(value, sort_keys=True)}\n```"


def _render_message(message: Message, thinking: bool) -> list[Segment]:
    match message:
        case AssistantMessage():
            return _render_assistant(message, thinking)
        case SystemMessage() | UserMessage():
            attributes: dict[str, str | int] = {"role": "system" if isinstance(message, SystemMessage) else "user"}
            if message.name is not None:
                attributes["name"] = message.name
            content = message.content
        case ToolMessage():
            attributes = {"role": "tool", "tool": message.tool, "index": message.index}
            content = message.content
        case ToolDeclarationMessage():
            attributes = {"role": "system", "type": "tool-declare"}
            declared = [_declaration(tool) for tool in message.tools]
            content = (NEW_TOOLS_INTRODUCTION if message.extends else TOOLS_INTRODUCTION) + _fenced(declared)
        case OptionMessage():
            attributes = {"role": "system", "type": message.kind}
            content = message.content
    return [*open_tag("message", attributes), *plain(content), *close_tag("message"), control(END_OF_MESSAGE)]


def _declaration(tool: ToolDeclaration) -> dict[str, object]:
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.parameters}}


def _render_assistant(message: AssistantMessage, thinking: bool) -> list[Segment]:
    learn = message.learn
    segments = generation_prefix(thinking)
    if thinking:
        segments += [*plain(message.thinking, learn), *close_tag("think", learn), *open_tag("response", None, learn)]
    segments += [*plain(message.response, learn), *close_tag("response", learn)]
    if message.tool_calls:
        segments += open_tag("tools", None, learn)
        for call in message.tool_calls:
            segments += _render_call(call, learn)
        segments += close_tag("tools", learn)
    return [*segments, *close_tag("message", learn), control(END_OF_MESSAGE, learn)]


def _render_call(call: ToolCall, learn: bool) -> list[Segment]:
    if call.incomplete:
        raise UserError(f"call {call.index} ({call.name}) was cut off: drop it, or keep the turn's token ids and use render_continuation")
    segments = open_tag("call", {"tool": call.name, "index": call.index}, learn)
    members = call.members()
    if members is None:
        # The model must see what it wrote and must not learn to write it.
        segments += [*open_tag("json", {"type": "object"}), *plain(str(call.arguments)), *close_tag("json")]
    else:
        for key, (value, literal) in members.items():
            if not isinstance(key, str):
                raise UserError(f"argument key {key!r} of {call.name} is not text: name every argument by text")
            text = value if isinstance(value, str) else literal or compact_json(value)
            segments += open_tag("argument", {"key": key, "type": json_type(value)}, learn)
            segments += [*plain(text, learn), *close_tag("argument", learn)]
    return segments + close_tag("call", learn)
