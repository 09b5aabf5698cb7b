"""One request id of a connection: how much of its stream the client has been shown.

Gives in this order: `Accepted`; `Progress` until there is text; `Delta`s without a gap; one terminal. With
``values`` each delta has the `Value`s in front of it that it completes: a connection that is lost between the two
then repeats values, which their paths tell, in place of losing some. Of a stream
with a ``window`` it takes no more than so many tokens beyond what was acknowledged; the rest waits in the log.
No I/O and no clock: time comes in as an argument.
"""

import time
from collections import deque
from math import inf

from msgspec import UNSET, UnsetType

from streamengine.errors import SlowConsumer, StreamEngineError
from streamengine.guided.values import Value, ValueTracker
from streamengine.log import Log
from streamengine.session.translate import to_call, to_error, to_logprob, to_progress, to_terminal
from streamengine.streams import Attachment
from streamengine_sdk import wire

PIECE_CHARACTERS = 8 * 1024
PIECE_TOKENS = 512
"""Of text and of tokens in one delta at most: about 16 KiB, far above the average."""

PIECE_LOGPROBS = 32
"""The same with log-probabilities, of which there may be 21 for each."""

PROGRESS_S = 0.25
"""No two `Progress` of one request are closer than this, in seconds."""

Terminal = wire.Done | wire.Error


class View:
    """A reader of one stream with the client's wishes on delivery. Silent until `attach` or `refuse`."""

    def __init__(self, id: str, delivery: wire.Delivery, heartbeat_s: float, ack_stall_s: float) -> None:
        self.id = id
        self.delivery = delivery
        self.attachment: Attachment | None = None
        self.cause: str | None = None
        """Why the client, or its going, has ended the request."""
        self._heartbeat_s = heartbeat_s
        self._ack_stall_s = ack_stall_s
        self._refusal: wire.Error | None = None
        self._replay: bool | UnsetType = UNSET
        self._accepted = False
        self._progress: wire.Progress | None = None
        self._progress_at = -inf
        self._delta_at = -inf
        self._shown = 0
        self._frames = self._max_lag = 0
        self._held: list[int] = []
        self._held_logprobs: list[wire.Logprob] = []
        self._blocked_since: float | None = None
        self._values = ValueTracker() if delivery.values else None
        self._tracked = 0
        """Entries whose text the tracker has seen."""
        self._made: deque[wire.Value | wire.Delta] = deque()
        """Values, and the delta that completes them."""

    def attach(self, attachment: Attachment, *, replay: bool = False) -> None:
        """The stream is there; shown from where the attachment stands."""
        self.attachment = attachment
        self._shown = attachment.acked
        self._replay = replay or UNSET

    def refuse(self, error: StreamEngineError, retry_after_ms: int | None = None) -> None:
        """There will be no stream."""
        self._refusal = to_error(error, retry_after_ms=retry_after_ms, id=self.id)

    def ack(self, seq: int) -> bool:
        """The client has consumed up to ``seq``; False if it acknowledges nothing new or what it was not sent."""
        if self.attachment is None or not self.attachment.acked < seq <= self._shown:
            return False
        if self.delivery.window:
            self.attachment.acked = seq
            self._blocked_since = None
        return True

    def due(self, now: float) -> float:
        """When `take` is worth calling: ``-inf`` is now, ``inf`` not before the log, `ack` or `attach` says so."""
        if self._refusal is not None:
            return -inf
        if self.attachment is None:
            return inf
        log, position = self.attachment.record.log, self.attachment.reader.position
        if self.attachment.lapsed or not self._accepted or self._made:
            return -inf
        if len(log) > position and position >= self._limit():
            if self._blocked_since is None:
                self._blocked_since = now
            return self._blocked_since + self._ack_stall_s
        if log.ended:
            return -inf
        if len(log) > position:
            return -inf if log.runs.end(position) is not None else self._flush_at(len(log))
        if log.begun:
            return inf
        changed = self._progress != to_progress(self.id, log)
        return self._progress_at + (PROGRESS_S if changed else self._heartbeat_s)

    def take(self, model: str, now: float) -> wire.ServerMessage | None:
        """The next message, if there is one."""
        if self.attachment is None or self._refusal is not None:
            return self._refusal
        log = self.attachment.record.log
        if self._made:
            return self._made.popleft()
        if self.attachment.lapsed or (self._blocked_since or now) + self._ack_stall_s <= now:
            return self._slow(log)
        if not self._accepted:
            self._accepted = True
            return wire.Accepted(
                id=self.id,
                stream=log.id,
                after=self._shown,
                model=model,
                created=time.time(),
                replay=self._replay,
                seed=UNSET if log.seed is None else log.seed,
            )
        before = self._shown
        if delta := self._take_delta(self.attachment, now):
            if self._values is not None:
                self._values.feed(log.text_between(self._tracked, before))  # not shown here
                self._made += self._told(self._values.feed(delta.text))
                self._tracked = self._shown
            self._made.append(delta)
            return self._made.popleft()
        if self.attachment.reader.ended:
            if self._values is not None and (last := self._last_values(log)):
                self._made += last
                return self._made.popleft()
            attaches = self.attachment.record.attaches
            stats = wire.DeliveryStats(frames=self._frames, max_lag=self._max_lag, attaches=attaches)
            return to_terminal(self.id, log, stats)
        if log.begun:
            return None
        self._progress, self._progress_at = to_progress(self.id, log), now
        return self._progress

    def _limit(self) -> float:
        """The last token that may be taken now."""
        window = self.delivery.window
        return self.attachment.acked + window if window and self.attachment else inf

    def _flush_at(self, end: int) -> float:
        tokens, ms = self.delivery.coalesce_tokens, self.delivery.coalesce_ms
        waiting = end - self._shown
        if not self._frames or waiting >= tokens > 1 or (tokens == 1 and ms == 0) or end >= self._limit():
            return -inf
        return self._delta_at + ms / 1000 if ms else inf

    def _take_delta(self, attachment: Attachment, now: float) -> wire.Delta | None:
        """Tokens that complete no text ride with the next that do, unless the client wants the ids or nothing more
        may follow before it acknowledges them."""
        text, call, reader, log = "", None, attachment.reader, attachment.record.log
        self._max_lag = max(self._max_lag, len(log) - self._shown)
        piece = PIECE_LOGPROBS if log.has_logprobs else PIECE_TOKENS
        room = min(piece, self._limit() - reader.position)
        if room > 0 and (new := reader.take(int(room), PIECE_CHARACTERS)):
            text, call = new.text, new.call
            self._held += new.token_ids
            self._held_logprobs += map(to_logprob, new.logprobs)
        last = reader.ended or reader.position >= self._limit()
        if not self._held or not (text or last or self.delivery.token_ids):
            return None
        tokens, self._held = self._held, []
        logprobs, self._held_logprobs = self._held_logprobs, []
        self._shown += len(tokens)
        self._frames += 1
        self._delta_at = now
        if not self.delivery.window:
            attachment.acked = self._shown
        ids = tokens if self.delivery.token_ids else UNSET
        return wire.Delta(
            id=self.id,
            seq=self._shown,
            n=len(tokens),
            text=text,
            channel="tool" if call else "text",
            call=UNSET if call is None else to_call(call),
            tokens=ids,
            logprobs=logprobs or UNSET,
        )

    def _told(self, values: list[Value]) -> list[wire.Value]:
        return [wire.Value(id=self.id, seq=self._shown, path=path, value=value) for path, value in values]

    def _last_values(self, log: Log) -> list[wire.Value]:
        """Those that the end of the answer completes, which is a number; one that was cut is no value."""
        values, self._values = self._values, None
        whole = log.outcome is not None and log.outcome.finish_reason == "stop" and log.outcome.stop_sequence is None
        return self._told(values.finish()) if values is not None and whole else []

    def _slow(self, log: Log) -> wire.Error:
        text = f"nothing was acknowledged for {self._ack_stall_s} s, or too much is held back; attach to go on"
        error = SlowConsumer(text, retry_after_ms=0)
        return to_error(error, retry_after_ms=0, id=self.id, stream=log.id, seq=self._shown)
