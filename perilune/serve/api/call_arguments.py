"""The arguments of a tool call, streamed so that a call that is cut off cannot be mistaken for a whole one."""


class CallArguments:
    """Lets the text of the arguments through, but for the brace that closes them and what follows, which waits for `close`.

    So what is shown of a call that is never closed is no JSON object. Nothing is shown before the first character that is not white
    space either: to many clients empty arguments mean none.
    """

    def __init__(self) -> None:
        self._blank = self._end = ""
        self._is_whole = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> str:
        """What can be shown now."""
        if self._is_whole:
            self._end += text
            return ""
        cut = next((place for place, character in enumerate(text) if self._closes(character)), len(text))
        self._is_whole, self._end = cut < len(text), text[cut:]
        shown = self._blank + text[:cut]
        self._blank = "" if shown.strip() else shown
        return shown if shown.strip() else ""

    def close(self) -> str:
        """The rest: the call is whole."""
        return self._blank + self._end

    def _closes(self, character: str) -> bool:
        """Whether this character closes the outermost object or array."""
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False
