"""Token ids to text, as they come: the incremental detokenizer and the stop strings.

Owns which characters of an answer are final and which token each rides on. Pure: no I/O, no clock, and
no tokenizer library, only a ``decode`` function. Refuses to guess: what more tokens could still change
(an incomplete character, the beginning of a stop string) is held, and given out at the end.

Joined, the texts are what decoding all answer ids at once behind the prompt gives, up to the first stop
string, whatever the split into pushes. One exception is meant: where a decoder turns *every* byte of a
run into U+FFFD because one is invalid (byte-fallback vocabularies), characters shown before stay as shown.
"""

from collections.abc import Callable, Sequence

from streamengine.calls.parser import CallHead, CallParser, Piece

REPLACEMENT = "\ufffd"
"""What a decoder makes of bytes that are no character, or not yet."""

_HELD_LIMIT = 16
"""Tokens held for an incomplete character. A character has 4 bytes, so more than that is no character."""

_CONTEXT = 6
"""Tokens that suffice to decode what follows: more than a character's, so that decoding falls into step."""

Entry = tuple[int, str]
"""A token's id and the text that it completed, possibly empty."""


class Detokenizer:
    """Turns one answer's ids into log entries.

    Args:
        decode: ids → text; special tokens give no text.
        prompt: ids before the answer: context only, so that the first token gets its right leading space.
        stop: the answer ends before the first of these that is completed; of several completed by the same
            character, the longest. The text of ids pushed later is of no interest and is dropped.
        min_tokens: a stop that is completed by an earlier token than this is text like any other.
        include_stop: the stop itself is part of the answer.
        calls: tells the calls of tools from text; their markup has no text. Stops are looked for in text alone.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        calls: CallParser | None = None,
    ) -> None:
        self._window = _Window(decode, prompt)
        self._stops = _StopStrings(stop, include_stop)
        self._before_stops = min_tokens
        """Tokens to come before a stop counts, the one that completes it included."""
        self._waiting: list[Entry] = []
        self._ended = False
        self._calls = calls
        self._pieces: list[Piece] = []
        """Read, and on no token yet: each carries text of one kind, so a second waits for the next token."""
        self._call: CallHead | None = None
        self._count = 0
        self.switches: list[tuple[int, CallHead | None]] = []
        """After how many tokens the texts are no longer what they were: arguments of that call, or text. Whoever takes
        the entries takes them away."""

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.hit

    def push(self, tokens: Sequence[int]) -> list[Entry]:
        """Entries that are final now, in order. A token that holds something back comes with a later one.

        The token that completes a stop string is the last ever given.
        """
        entries: list[Entry] = []
        for token in tokens:
            if self._ended:
                break
            self._before_stops -= 1
            self._count += 1
            text = self._read(self._window.push(token))
            self._waiting.append((token, text))
            self._ended = self._stops.hit is not None
            entries += self._release()
        return entries

    def finish(self, end_token: int | None = None, *, cut: bool = False) -> list[Entry]:
        """Everything held; the answer is over, though it would have gone on if it was ``cut``. ``end_token`` is the one
        that ended it: it gives no text."""
        if self._ended:
            return []
        self._ended = True
        if self._waiting:
            # Something is held, so the newest token is here to carry it.
            token, text = self._waiting[-1]
            text += self._read(self._window.flush(), last=True, cut=cut)
            self._waiting[-1] = (token, text + self._stops.flush())
        if end_token is not None:
            self._waiting.append((end_token, ""))
        return self._release()

    def _read(self, text: str, *, last: bool = False, cut: bool = False) -> str:
        """The text of the newest token, without what is held back."""
        armed = self._before_stops <= 0
        if self._calls is None:
            return self._stops.feed(text, armed=armed)
        self._pieces += self._calls.feed(text)
        if last:
            self._pieces += self._calls.finish(cut=cut)
        said = ""
        while self._pieces and (not said or self._pieces[0].call is self._call):
            text, call = self._pieces.pop(0)
            if call is not self._call:
                self._call = call
                self.switches.append((self._count - 1, call))
            said += text if call else self._stops.feed(text, armed=armed)
            if self._stops.hit is not None:
                return said
        assert not (last and self._pieces), "an answer with more kinds of text than tokens"
        return said + self._stops.flush() if self._calls.inside and self._call is None else said

    def _release(self) -> list[Entry]:
        ready = len(self._waiting)
        if not self._ended and (self._window.holds or self._stops.holds or (self._calls and self._calls.holds)):
            # The newest token stays to carry what is held, and textless ones before it stay with it, so
            # that nobody is sent an empty delta.
            ready -= 1
            while ready and not self._waiting[ready - 1][1]:
                ready -= 1
        entries = self._waiting[:ready]
        del self._waiting[:ready]
        return entries


class _Window:
    """Decodes each token next to a few before it, so the cost does not grow with the answer.

    ::

        ids     c c c | n n      c: context, whole characters that are out     n: new, incomplete so far
        text    [ _shown  ][ held ]
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = _clean_tail(decode, prompt)
        self._context = len(self._ids)
        self._shown = decode(self._ids) if self._ids else ""
        self.holds = False

    def push(self, token: int) -> str:
        """The text that is final with ``token`` and was not before."""
        self._ids.append(token)
        text = self._text()
        shown = len(self._shown)
        self.holds = text.endswith(REPLACEMENT)
        if self.holds and len(self._ids) - self._context < _HELD_LIMIT:
            self._shown = max(self._shown, text.rstrip(REPLACEMENT), key=len)
            return text[shown : len(self._shown)]
        if self.holds:
            # A long run of bytes that are no text: all but the last replacement character is final.
            self._rebase(self._ids[-_CONTEXT:])
            self.holds = self._shown.endswith(REPLACEMENT)
            self._shown = self._shown.removesuffix(REPLACEMENT)
            return text[shown : len(text) - self.holds]
        if len(text) == shown:
            self._forget_textless()
        else:
            self._rebase(self._ids[self._context :])
        return text[shown:]

    def flush(self) -> str:
        """The text that is held, incomplete as it is."""
        if not self.holds:
            return ""
        self.holds = False
        text = self._text()
        return text[len(self._shown) :]

    def _text(self) -> str:
        """The window's text; it begins with what is out already."""
        text = self._decode(self._ids)
        if not text.startswith(self._shown):
            # New bytes made the decoder see the context differently. It is out, so it is dropped.
            del self._ids[: self._context]
            self._context, self._shown = 0, ""
            text = self._decode(self._ids)
        return text

    def _forget_textless(self) -> None:
        """Keep context that has text: the first token of a decoded run may lose its leading space."""
        if self._shown:
            self._ids.pop()
        elif len(self._ids) > _HELD_LIMIT:
            del self._ids[:-_CONTEXT]

    def _rebase(self, ids: list[int]) -> None:
        self._ids = ids
        self._context = len(ids)
        self._shown = self._decode(ids)


def _clean_tail(decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> list[int]:
    """The last few prompt ids whose text begins and ends between characters; none if there are none.

    A prompt may end inside a character: its bytes are the prompt's and must not appear in the answer.
    """
    tail = list(prompt[-2 * _CONTEXT :])
    for end in range(len(tail), max(0, len(tail) - _CONTEXT), -1):
        for start in range(end - 1, max(-1, end - 1 - _CONTEXT), -1):
            text = decode(tail[start:end])
            if text and REPLACEMENT not in text:
                return tail[start:end]
    return []


class _StopStrings:
    """Finds the first completed stop string in a text that comes in parts: Knuth-Morris-Pratt for each."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._include = include
        self._stops = [(stop, _failure_table(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.hit: str | None = None

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, armed: bool) -> str:
        """The part of the text so far that can no longer belong to a stop string and was not given out yet.

        Stops that ``text`` completes count only if they are ``armed``.
        """
        if not self._stops:
            return text
        before = len(self._held)
        text = self._held + text
        for end in range(before, len(text)):
            if stop := self._step(text[end], armed):
                self.hit, self._held = stop, ""
                return text[: end + 1 - (0 if self._include else len(stop))]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What is held: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str, armed: bool) -> str | None:
        """Advance every stop by one character. The longest that is complete, if any."""
        hit = None
        for index, (stop, failure) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            complete = matched == len(stop)
            self._matched[index] = failure[-1] if complete else matched
            if complete and armed:
                # Sorted by length: the first is the longest. The answer ends, so the others' state is moot.
                hit = stop
                break
        return hit


def _failure_table(stop: str) -> list[int]:
    """For every prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = table[matched - 1]
        if stop[i] == stop[matched]:
            matched += 1
        table[i] = matched
    return table
