"""What must stand after a K3 message that was cut off, so that the conversation can go on after it.

Sampling stops at a length limit or because someone stopped it, in the middle of anything, a tag included. The ids stay as
they were sampled. An unfinished tag is ended (its name and quotes are completed, attributes it lacks are not), every open
element gets its closing tag, and a message that never came to its response gets an empty one, as every K3 message has one.
A message cut off in its text thus ends as `chat.render` ends it.
"""

from collections.abc import Sequence

from perilune.model.special_tokens import CLOSE, END_OF_MESSAGE, OPEN, SEP
from perilune.model.vocabulary import Tokenizer
from perilune.model.xtml import CloseTag, EndOfMessage, OpenTag, Stray, XtmlScanner, close_tag, control, open_tag, plain

_CHILDREN = {"tools": ("call",), "call": ("argument", "json")}
"""Which tag a model was probably writing inside of which; in a message it is the next channel."""


def k3_closing_ids(sampled_ids: Sequence[int], tokenizer: Tokenizer, thinking: bool = True) -> list[int]:
    """The ids that close what is open after `sampled_ids`, which follow a generation prefix; none if `<|end_of_msg|>` is among them.

    Raises `UserError` for an id outside the vocabulary.
    """
    scanner = XtmlScanner(tokenizer)
    open_elements = ["message", "think" if thinking else "response"]
    has_response = not thinking
    for item in scanner.push(sampled_ids):
        match item:
            case OpenTag(tag):
                open_elements.append(tag)
                has_response = has_response or tag == "response"
            case CloseTag(tag) if tag in open_elements:
                while open_elements.pop() != tag:
                    pass
            case EndOfMessage():
                return []
    match scanner.finish():
        case [Stray(unfinished)]:
            innermost = open_elements[-1] if open_elements else ""
            likely = _CHILDREN.get(innermost, ("tools" if has_response else "response",))
            if unfinished.startswith(OPEN):
                rest_of_tag = _rest_of_tag(unfinished.removeprefix(OPEN), likely)
            else:
                rest_of_tag = _rest_of_tag(unfinished.removeprefix(CLOSE), (innermost,))
            rest = tokenizer.encode([*plain(rest_of_tag), control(SEP)])
            return rest + k3_closing_ids([*sampled_ids, *rest], tokenizer, thinking)
    segments = []
    for element in reversed(open_elements):
        if element == "message" and not has_response:
            segments += [*open_tag("response"), *close_tag("response")]
        segments += close_tag(element)
    return tokenizer.encode([*segments, control(END_OF_MESSAGE)])


def _rest_of_tag(header: str, likely: Sequence[str]) -> str:
    """What makes a whole of `header`, a tag as far as it came: one of `likely` if it begins so."""
    whole = next((tag for tag in likely if tag.startswith(header)), header)
    return whole[len(header) :] + ('"' if header.count('"') % 2 else "")
