"""Stop strings in text that comes piece by piece: text is let out as soon as it can no longer be part of one."""

from collections.abc import Sequence


class StopText:
    """Lets text through up to the first stop string.

    The first is the one whose last character comes first; of several that end there, the longest. What is let out, joined, does not
    depend on how the text was cut into pieces, and never holds a part of the stop string that was met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty."""
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.is_met = False

    def push(self, text: str) -> str:
        """What can be shown now. Nothing more once a stop string was met."""
        if self.is_met:
            return ""
        if not self._progress:
            return text
        waiting = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            met = [stop.length for stop in self._progress if stop.advance(character)]
            if met:
                self.is_met, self._held = True, ""
                return waiting[: end - max(met)]
        shown = len(waiting) - max(stop.matched for stop in self._progress)
        self._held = waiting[shown:]
        return waiting[:shown]

    def flush(self) -> str:
        """What was held back, because the text ends here; text pushed later is another text."""
        held, self._held = self._held, ""
        for stop in self._progress:
            stop.matched = 0
        return held


class _Progress:
    """How much of one stop string the text ends with: Knuth, Morris and Pratt, SIAM J. Comput. 6 (1977)."""

    def __init__(self, stop: str) -> None:
        self._stop, self.length, self.matched = stop, len(stop), 0
        # shorter[n]: the next shorter beginning of the stop string that its first n characters end with.
        self._shorter = [0] * (len(stop) + 1)
        for end in range(1, len(stop)):
            self._shorter[end + 1] = self._next(self._shorter[end], stop[end])

    def advance(self, character: str) -> bool:
        """Take one character; whether the stop string ends with it."""
        self.matched = self._next(self.matched, character)
        return self.matched == self.length

    def _next(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._shorter[matched]
        return matched + (self._stop[matched] == character)
