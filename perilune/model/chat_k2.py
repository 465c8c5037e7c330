"""The chat format of Kimi K2 and Kimi Linear, as segments: role, then text, between `<|im_…|>` tokens.

The same safety rule as in `chat.py`: control tokens alone are special, everything from outside is plain text. Calls are
numbered from 0 through the whole conversation and named `functions.NAME:NUMBER`; a result repeats that name. These
models have no think channel, so thinking is not rendered, and no default system message is added.

A turn the model sampled is kept as its ids; `render_k2_continuation` gives what follows it. `chat_k2_parser.py` is the way
back, from sampled ids to a message.

Source: K2 chat template.
"""

from collections.abc import Sequence

from perilune.errors import UserError
from perilune.model.chat_messages import AssistantMessage, Message, SystemMessage, ToolCall, ToolDeclaration, ToolMessage, UserMessage
from perilune.model.json_text import compact_json
from perilune.model.vocabulary import Segment
from perilune.model.xtml import control, plain


def render_k2(messages: Sequence[Message], tools: Sequence[ToolDeclaration] = (), add_generation_prefix: bool = True) -> list[Segment]:
    """The whole prompt for the next assistant message. Targets are an assistant's text and calls through `<|im_end|>`.

    Raises `UserError` for a message this format has no place for (options, tools declared later, an incomplete call).
    """
    segments: list[Segment] = []
    if tools:
        declared = [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
            for tool in tools
        ]
        segments += [*_opened("system", "tool_declare"), *plain(compact_json(declared)), control("<|im_end|>")]
    return segments + render_k2_continuation(messages, (), add_generation_prefix)


def render_k2_continuation(messages: Sequence[Message], after: Sequence[Message], add_generation_prefix: bool = True) -> list[Segment]:
    """Only what follows a conversation already held as ids (through `<|im_end|>`): more messages, and the next prefix.

    `after`: the messages of that conversation. Nothing of them is written; their calls are counted, whole or cut off, for
    a call and its result carry its number in the whole conversation. Raises `UserError` as `render_k2` does.
    """
    segments: list[Segment] = []
    first_number = next_number = 0
    for message in after:
        if isinstance(message, AssistantMessage):
            first_number, next_number = next_number, next_number + len(message.tool_calls)
    for message in messages:
        match message:
            case SystemMessage() | UserMessage():
                role = "system" if isinstance(message, SystemMessage) else "user"
                segments += [*_opened(role, message.name or role), *plain(message.content)]
            case AssistantMessage():
                first_number, next_number = next_number, next_number + len(message.tool_calls)
                segments += [*_opened("assistant", "assistant"), *plain(message.response, message.learn)]
                segments += _calls(message.tool_calls, first_number, message.learn)
            case ToolMessage():
                identity = f"functions.{message.tool}:{first_number + message.index - 1}"
                segments += [*_opened("system", "tool"), *plain(f"## Return of {identity}\n{message.content}")]
            case _:
                raise UserError(f"the K2 chat format has no place for a {type(message).__name__}: leave it out, or use a K3 model")
        segments.append(control("<|im_end|>", isinstance(message, AssistantMessage) and message.learn))
    return segments + (_opened("assistant", "assistant") if add_generation_prefix else [])


def _opened(role: str, name: str) -> list[Segment]:
    return [control(f"<|im_{role}|>"), *plain(name), control("<|im_middle|>")]


def _calls(calls: Sequence[ToolCall], first_number: int, learn: bool) -> list[Segment]:
    if not calls:
        return []
    segments = [control("<|tool_calls_section_begin|>", learn)]
    for number, call in enumerate(calls, start=first_number):
        if call.incomplete:
            raise UserError(f"call {call.index} ({call.name}) was cut off: drop it from the conversation")
        arguments = call.arguments if isinstance(call.arguments, str) else compact_json(call.arguments)
        segments += [
            control("<|tool_call_begin|>", learn),
            *plain(f"functions.{call.name}:{number}", learn),
            control("<|tool_call_argument_begin|>", learn),
            *plain(arguments, learn),
            control("<|tool_call_end|>", learn),
        ]
    return [*segments, control("<|tool_calls_section_end|>", learn)]
