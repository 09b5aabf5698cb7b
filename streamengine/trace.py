"""What the scheduler saw and decided, as lines of JSON, so that a user's hang becomes a test.

Every arrival, abort, plan and result is one line, in the order in which the core acted. A trace holds no content
unless it is asked to: of a prompt and an answer only the lengths, and a digest of each full page, chained and keyed
with a secret that is never written. Equal digests say that two sequences began with the same tokens, and nothing
else, which is enough to replay hits in the prefix cache. Tenants are digests too. With ``text`` the token ids are
recorded as well; only then does a replay guess the same drafts. Beams replay with made-up candidates in any case.

Written at once and unbuffered, so that it is there after a kill. A trace that cannot be written any more ends,
and the core goes on.
"""

import dataclasses
import logging
import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from os import SEEK_END
from pathlib import Path
from typing import Self

import msgspec

from compiled.step import KVSpec, ModelSpec, Step
from streamengine.config import EngineConfig
from streamengine.request import Delta, Request

VERSION = 1

_logger = logging.getLogger(__name__)


class Opened(msgspec.Struct, frozen=True, tag="open", tag_field="kind"):
    """A core is ready. One file holds a session of lines for each core that was started on it."""

    version: int
    config: EngineConfig
    model: ModelSpec
    kv: KVSpec
    depth: int


class Submitted(msgspec.Struct, frozen=True, tag="submit", tag_field="kind", omit_defaults=True):
    """``request`` without its prompt, which had ``length`` tokens. ``at`` is in seconds since the core was ready."""

    at: float
    request: Request
    length: int
    pages: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


class Aborted(msgspec.Struct, frozen=True, tag="abort", tag_field="kind"):
    """Also of a request that the scheduler has just refused: then ``cause`` is the error's code."""

    at: float
    request: int
    cause: str
    index: int | None = None


class Planned(msgspec.Struct, frozen=True, tag="plan", tag_field="kind"):
    """``rows`` are ``(request, start, tokens, sampled)``; a plan without rows is not recorded."""

    at: float
    step: int
    rows: tuple[tuple[int, int, int, int], ...]


class Told(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one answer got: a number of tokens, perhaps its end, and the pages that were filled by that."""

    request: int
    index: int
    count: int
    finish: str = ""
    pages: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


class Landed(msgspec.Struct, frozen=True, tag="result", tag_field="kind"):
    """A step is over after ``seconds``; None: it raised."""

    at: float
    step: int
    seconds: float | None
    answers: tuple[Told, ...]


Line = Opened | Submitted | Aborted | Planned | Landed


def rows_of(step: Step) -> tuple[tuple[int, int, int, int], ...]:
    """See `Planned.rows`."""
    return tuple(
        (row.request, row.start, len(row.tokens), 0 if row.sampling is None else 1 + row.drafts) for row in step.rows
    )


class Tracer:
    """The trace of one core. ``at`` is counted from ``now``, the core's clock.

    Raises:
        OSError: the file cannot be opened for appending.
    """

    def __init__(
        self, path: str, config: EngineConfig, model: ModelSpec, kv: KVSpec, depth: int, now: float, *, text: bool
    ) -> None:
        was_cut = _ends_in_the_middle_of_a_line(Path(path))
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._encode = msgspec.json.Encoder().encode
        self._start = now
        self._text = text
        self._key = secrets.token_bytes(32)
        self._page_size = kv.page_size
        self._chains: dict[int, dict[int, _Chain]] = {}
        if was_cut:
            self._append(b"\n")
        self._write(Opened(VERSION, config, model, kv, depth))

    def close(self) -> None:
        self._file.close()

    def submitted(self, request: Request, now: float) -> None:
        """Before the scheduler sees ``request``."""
        chain = _Chain(self._key, self._page_size)
        known = request.prompt + request.answered
        pages = chain.push(known)
        self._chains[request.id] = {index: chain.fork() for index in range(request.n)}
        tokens = known if self._text else ()
        self._write(Submitted(self._at(now), self._without_content(request), len(known), pages, tokens))

    def aborted(self, request: int, cause: str, now: float, index: int | None = None) -> None:
        """An abort came in, perhaps of one answer, or the scheduler refused what was just submitted."""
        self._forget(request, index)
        self._write(Aborted(self._at(now), request, cause, index))

    def planned(self, step: Step, now: float) -> None:
        self._write(Planned(self._at(now), step.number, rows_of(step)))

    def landed(self, step: Step, seconds: float | None, deltas: Iterable[Delta], now: float) -> None:
        """``step`` gave ``deltas``; without ``seconds`` it raised."""
        told = tuple(self._tell(delta) for delta in deltas if delta.tokens or delta.finish is not None)
        self._write(Landed(self._at(now), step.number, seconds, told))

    def _tell(self, delta: Delta) -> Told:
        chain = self._chains.get(delta.request, {}).get(delta.index)
        pages = () if chain is None else chain.push(delta.tokens)
        finish = "" if delta.finish is None else delta.finish.reason
        if finish:
            self._forget(delta.request, delta.index)
        tokens = delta.tokens if self._text else ()
        return Told(delta.request, delta.index, len(delta.tokens), finish, pages, tokens)

    def _forget(self, request: int, index: int | None) -> None:
        chains = self._chains.get(request, {})
        if index is not None:
            chains.pop(index, None)
        if index is None or not chains:
            self._chains.pop(request, None)

    def _without_content(self, request: Request) -> Request:
        sampling = request.sampling
        if not self._text:
            # Which ids are of no concern to the scheduler; whether there are any is.
            bad_words = ((0,),) if sampling.bad_words else ()
            sampling = dataclasses.replace(sampling, logit_bias=(), allowed_token_ids=(), bad_words=bad_words)
        tenant = request.tenant and _digest(self._key, request.tenant.encode())
        # To the scheduler the beginning of an answer is a longer prompt.
        left = max(1, request.max_tokens - len(request.answered))
        given = {"prompt": (), "answered": (), "max_tokens": left, "sampling": sampling, "tenant": tenant}
        return msgspec.structs.replace(request, **given)

    def _at(self, now: float) -> float:
        return round(now - self._start, 6)

    def _write(self, line: Line) -> None:
        self._append(self._encode(line) + b"\n")

    def _append(self, data: bytes) -> None:
        if self._file.closed:
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line could be written")
        except OSError as error:
            _logger.error("the trace ends here: %s", error)
            self._file.close()


class _Chain:
    """The digests of one sequence's full pages, each made of the one before it and the page's tokens."""

    def __init__(self, key: bytes, page_size: int) -> None:
        self._key = key
        self._page_size = page_size
        self._last = ""
        self._rest: tuple[int, ...] = ()

    def push(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The digests of the pages that ``tokens`` complete."""
        waiting, size, pages = (*self._rest, *tokens), self._page_size, []
        whole = len(waiting) - len(waiting) % size
        for begin in range(0, whole, size):
            self._last = _digest(self._key, f"{self._last}:{waiting[begin : begin + size]}".encode())
            pages.append(self._last)
        self._rest = waiting[whole:]
        return tuple(pages)

    def fork(self) -> Self:
        other = type(self)(self._key, self._page_size)
        other._last, other._rest = self._last, self._rest
        return other


def _ends_in_the_middle_of_a_line(path: Path) -> bool:
    """As the trace of a core does that was killed, or whose disk was full."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, SEEK_END)
        return file.read(1) != b"\n"


def _digest(key: bytes, data: bytes) -> str:
    return blake2b(data, key=key, digest_size=8).hexdigest()
