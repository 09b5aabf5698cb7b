"""The streams of one server: whose they are, how long they are kept, and what they may cost.

A stream is a log, and a connection is a view of it, so a stream outlives its connections. One that lost its last
reader lingers, then it is cancelled; one that has ended is retained, then it is forgotten. What the logs of a
principal hold is counted as they grow: above the cap of a stream, log-probabilities go that every reader has; above
that of a principal, streams that have ended go, the oldest first, and nothing new is taken.

Refuses: messages and sockets (the session's and the server's), tokens and pages (the engine's).
"""

import hmac
import secrets
from collections import defaultdict, deque
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf

import anyio
import msgspec
from msgspec import structs

from streamengine.bell import Bell
from streamengine.config import ServerConfig
from streamengine.engine import Engine, Generate
from streamengine.errors import (
    InvalidRequest,
    RateLimited,
    ShuttingDown,
    StreamEngineError,
    StreamNotFound,
    TooManyStreams,
)
from streamengine.log import Log, Reader, Wake

MAX_ATTACHMENTS = 4
"""Readers of one stream at once."""

LEAST_RETRY_MS, MOST_RETRY_MS = 250, 60_000
FIRST_RETRY_MS = 1000
"""What is told before anything has ended that a rate could be seen from."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. Streams are its own, ``tenant`` shares the engine and its cache with nobody else."""

    name: str = ""
    tenant: str = ""
    admin: bool = False

    @property
    def anonymous(self) -> bool:
        """Anybody: there are no keys."""
        return not self.name


ANONYMOUS = Principal(admin=True)


class Attachment:
    """One reader of a stream, from `Streams.attach` until `Streams.detach`."""

    def __init__(self, record: "StreamRecord", reader: Reader, wake: Wake) -> None:
        self.record = record
        self.reader = reader
        self.acked = reader.position
        """What it will not ask for again; the owner moves it."""
        self.lapsed = False
        """It held back more than a stream may keep, and may not read on."""
        self._wake = wake

    def lapse(self) -> None:
        self.lapsed = True
        self._wake.set()


class StreamRecord:
    """One stream and who reads it. Is told of its log's growth, as a `Wake`."""

    def __init__(self, streams: "Streams", log: Log, principal: Principal, key: str | None) -> None:
        self.log = log
        self.principal = principal
        self.key = key
        self.request: bytes = b""
        """What the key was used for."""
        self.attachments: list[Attachment] = []
        self.attaches = 0
        self.ended_at: float | None = None
        self.due = inf
        """When `Streams.expire` is to look at it."""
        self.size = 0
        self._streams = streams

    def set(self) -> None:
        self._streams.follow(self)


class _Account:
    """What one principal has here."""

    def __init__(self) -> None:
        self.size = 0
        self.running = 0
        self.ended: dict[str, StreamRecord] = {}
        """In the order of their ends."""


class Streams:
    """`run` it beside ``engine``."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.epoch = secrets.token_hex(8)
        """Another one: all earlier streams are gone."""
        self._config = config
        self._records: dict[str, StreamRecord] = {}
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self._by_key: dict[tuple[str, str], StreamRecord] = {}
        self._opening: dict[tuple[str, str], anyio.Event] = {}
        self._timers: list[tuple[float, str]] = []
        """By id: an old timer may not keep a stream that was forgotten."""
        self._bell = Bell()
        self._ends: deque[float] = deque(maxlen=32)
        self._turned_away = 0

    async def run(self) -> None:
        """Cancel what nobody came back to and forget what is old, until cancelled."""
        while True:
            self._bell.rearm()
            self.expire(anyio.current_time())
            await self._bell.wait(self._timers[0][0] if self._timers else inf)

    # opening and finding

    async def open(self, principal: Principal, generate: Generate, key: str | None = None) -> tuple[StreamRecord, bool]:
        """A new stream, or with a ``key`` that was used before the one that it made (True). Attach to it at once.

        Raises:
            StreamEngineError: what `Engine.submit` does; `TooManyStreams` and `RateLimited` for the principal's own
                limits; `InvalidRequest` for a key that was used for another request.
        """
        if key is None:
            return (await self.open_all(principal, generate))[0], False
        slot = principal.name, key
        while (opening := self._opening.get(slot)) is not None:
            await opening.wait()
        request = blake2b(msgspec.msgpack.encode(generate), digest_size=16).digest()
        if (found := self._by_key.get(slot)) is not None:
            if not hmac.compare_digest(found.request, request):
                raise InvalidRequest("key was used for another request", param="key")
            return found, True
        opened = self._opening[slot] = anyio.Event()
        try:
            (record,) = await self.open_all(principal, generate)
        finally:
            del self._opening[slot]
            opened.set()
        record.key, record.request = key, request
        self._by_key[slot] = record
        return record, False

    async def open_all(self, principal: Principal, generate: Generate) -> list[StreamRecord]:
        """All answers of a request, as streams; more than one where it asks for them. Raises as `open` does."""
        self._check_limits(principal)
        generate = structs.replace(generate, tenant=principal.tenant)
        if generate.sampling.answers > 1:
            logs = await self.engine.submit_all(generate)
        else:
            logs = [await self.engine.submit(generate)]
        # Nothing is awaited from here on: what the engine has taken is in here.
        return [self._add(log, principal) for log in logs]

    def find(self, id: str, principal: Principal) -> StreamRecord:
        """The stream of this id, if it is the principal's own.

        Raises:
            StreamNotFound: it is not there, not any more, or somebody else's.
        """
        record = self._records.get(id)
        if record is None or record.principal.name != principal.name:
            raise StreamNotFound("there is no such stream: it is over for some time, or was never here", param="stream")
        return record

    # readers

    def attach(self, record: StreamRecord, wake: Wake, after: int = 0) -> Attachment:
        """A reader of what comes ``after`` so many tokens.

        Raises:
            InvalidRequest: ``after`` lies outside of the stream.
            ResumeGap: the log-probabilities behind ``after`` are no longer kept.
            TooManyStreams: it has `MAX_ATTACHMENTS` readers.
        """
        if len(record.attachments) >= MAX_ATTACHMENTS:
            raise TooManyStreams(f"{MAX_ATTACHMENTS} readers are attached to this stream, which is the most")
        attachment = Attachment(record, record.log.reader(wake, after), wake)
        record.attachments.append(attachment)
        record.attaches += 1
        record.due = inf
        return attachment

    def detach(self, attachment: Attachment, linger_s: float | None = None) -> None:
        """End of a reader. The last one's says how long the stream runs on: 0 cancels it now. Safe to repeat."""
        record = attachment.record
        if attachment not in record.attachments:
            return
        record.attachments.remove(attachment)
        attachment.reader.close()
        if record.attachments:
            return
        linger_s = self._config.linger_s if linger_s is None else linger_s
        if record.ended_at is not None:
            # A reader that lags may lose its connection long after the end, and has as much time to come back.
            self._schedule(record, max(record.ended_at + self._config.retain_s, anyio.current_time() + linger_s))
        elif linger_s == 0:
            self.cancel(record, "disconnect")
        else:
            self._linger(record, linger_s)

    def cancel(self, record: StreamRecord, cause: str = "client") -> None:
        """Ask for the end, which the log tells when pages are free. Never blocks; what has ended stays so."""
        self.engine.abort(record.log, cause)

    # what is told to whom has to wait

    def retry_after_ms(self, error: StreamEngineError) -> int | None:
        """When a place may be free for whom ``error`` turned away: the more there were since, the later."""
        if not error.retryable or error.status not in (429, 503):
            return None
        if "retry_after_ms" in error.details:
            return int(error.details["retry_after_ms"])
        if isinstance(error, ShuttingDown) or len(self._ends) < 2:
            return FIRST_RETRY_MS
        self._turned_away += 1
        gap_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return round(min(max(gap_s * 1000 * self._turned_away, LEAST_RETRY_MS), MOST_RETRY_MS))

    def statistics(self) -> dict[str, float]:
        return {
            "streams_kept": len(self._records),
            "streams_attached": sum(bool(record.attachments) for record in self._records.values()),
            "stream_log_bytes": sum(account.size for account in self._accounts.values()),
        }

    # growth and end

    def follow(self, record: StreamRecord) -> None:
        """Its log has grown or ended."""
        log = record.log
        if log.size > self._config.max_log_bytes:
            self._trim(record)
        self._resize(record)
        if log.ended and record.ended_at is None:
            self._end(record)

    def expire(self, now: float) -> None:
        """Do what is due: cancel a stream that nobody reads, forget one that has ended."""
        while self._timers and self._timers[0][0] <= now:
            due, id = heappop(self._timers)
            record = self._records.get(id)
            if record is None or record.due != due:
                continue  # a later timer counts, or somebody attached
            record.due = inf
            if record.ended_at is None:
                self.cancel(record, "disconnect")
            else:
                self._forget(record)

    def _add(self, log: Log, principal: Principal) -> StreamRecord:
        record = self._records[log.id] = StreamRecord(self, log, principal, None)
        self._accounts[principal.name].running += 1
        log.follow(record)
        self._linger(record, self._config.linger_s)
        return record

    def _linger(self, record: StreamRecord, seconds: float) -> None:
        self._schedule(record, anyio.current_time() + seconds)

    def _schedule(self, record: StreamRecord, due: float) -> None:
        record.due = due
        heappush(self._timers, (due, record.log.id))
        self._bell.set()

    def _trim(self, record: StreamRecord) -> None:
        """Drop log-probabilities that no reader needs; the reader that needs too many is let go."""
        log = record.log
        while log.size > self._config.max_log_bytes and log.has_logprobs:
            readers = [attachment for attachment in record.attachments if not attachment.lapsed]
            slowest = min(readers, key=lambda attachment: attachment.acked, default=None)
            if slowest is None:
                log.drop_logprobs(len(log))
            elif slowest.acked > log.logprobs_after:
                log.drop_logprobs(slowest.acked)
            else:
                slowest.lapse()

    def _resize(self, record: StreamRecord) -> None:
        account = self._accounts[record.principal.name]
        account.size += record.log.size - record.size
        record.size = record.log.size
        if account.size > self._config.max_principal_log_bytes:
            for old in _oldest_unread(account):
                if account.size <= self._config.max_principal_log_bytes:
                    break
                self._forget(old)

    def _end(self, record: StreamRecord) -> None:
        record.ended_at = anyio.current_time()
        record.log.unfollow(record)
        account = self._accounts[record.principal.name]
        account.running -= 1
        account.ended[record.log.id] = record
        self._ends.append(record.ended_at)
        self._turned_away = 0
        record.due = inf
        if not record.attachments:
            self._schedule(record, record.ended_at + self._config.retain_s)

    def _forget(self, record: StreamRecord) -> None:
        name = record.principal.name
        account = self._accounts[name]
        account.size -= record.size
        del account.ended[record.log.id], self._records[record.log.id]
        if record.key is not None:
            del self._by_key[name, record.key]
        if not (account.running or account.ended):
            del self._accounts[name]

    def _check_limits(self, principal: Principal) -> None:
        account = self._accounts.get(principal.name)
        if account is None:
            return
        most = self._config.max_principal_streams
        if account.running >= most and not principal.anonymous:
            raise TooManyStreams(f"{account.running} streams of this key are running, which is the most", limit=most)
        most = self._config.max_principal_log_bytes
        if account.size >= most:
            raise RateLimited(f"{account.size} bytes of streams are kept, at most {most}", limit=most)


def _oldest_unread(account: _Account) -> Sequence[StreamRecord]:
    return [record for record in account.ended.values() if not record.attachments]
