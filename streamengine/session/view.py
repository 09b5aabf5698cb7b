"""One request id of a connection: how much of its stream the client has been shown.

Gives in this order: `Accepted`; `Progress` until there is text; `Delta`s without a gap; one terminal.
No I/O and no clock: time comes in as an argument.
"""

import time
from math import inf

from msgspec import UNSET

from streamengine.engine import Engine
from streamengine.errors import StreamEngineError
from streamengine.log import Log, Reader
from streamengine.session.translate import to_error, to_logprob, to_progress, to_terminal
from streamengine_sdk import wire

PIECE_TOKENS = 512
"""Tokens in one delta at most: about 16 KiB at 32 bytes a token, far above the average."""

PIECE_LOGPROBS = 32
"""The same with log-probabilities, of which there may be 21 for each."""

PROGRESS_S = 0.25
"""No two `Progress` of one request are closer than this, in seconds."""


class View:
    """A reader of one log with the client's wishes on delivery; takes at most ``piece`` tokens at once."""

    def __init__(self, id: str, delivery: wire.Delivery, heartbeat_s: float, piece: int) -> None:
        self.id = id
        self._piece = piece
        self._delivery = delivery
        self._heartbeat_s = heartbeat_s
        self._log: Log | None = None
        self._reader: Reader | None = None
        self._refusal: StreamEngineError | None = None
        self._cause: str | None = None
        self._accepted = False
        self._progress: wire.Progress | None = None
        self._progress_at = -inf
        self._delta_at = -inf
        self._shown = 0
        self._held: list[int] = []
        self._held_logprobs: list[wire.Logprob] = []

    def attach(self, engine: Engine, log: Log, reader: Reader) -> None:
        """The engine took the request; a cancel that came before that is carried out now."""
        self._log, self._reader = log, reader
        if self._cause is not None:
            engine.abort(log, self._cause)

    def refuse(self, error: StreamEngineError) -> None:
        """The engine did not take the request."""
        self._refusal = error

    def cancel(self, engine: Engine, cause: str) -> None:
        """Ask for the end; `Done` follows when the engine has let go. A repeat changes nothing."""
        if self._cause is None:
            self._cause = cause
            if self._log is not None:
                engine.abort(self._log, cause)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def due(self) -> float:
        """When `take` is worth calling: ``-inf`` is now, ``inf`` not before the log or `attach` says so."""
        if self._log is None or self._reader is None:
            return inf if self._refusal is None else -inf
        if not self._accepted or self._log.ended:
            return -inf
        if len(self._log) > self._reader.position:
            return self._flush_at(len(self._log) - self._shown)
        if len(self._log):
            return inf
        changed = self._progress != to_progress(self.id, self._log)
        return self._progress_at + (PROGRESS_S if changed else self._heartbeat_s)

    def _flush_at(self, waiting: int) -> float:
        tokens, ms = self._delivery.coalesce_tokens, self._delivery.coalesce_ms
        if self._shown == 0 or waiting >= tokens > 1 or (tokens == 1 and ms == 0):
            return -inf
        return self._delta_at + ms / 1000 if ms else inf

    def take(self, model: str, now: float) -> wire.ServerMessage | None:
        """The next message, if there is one."""
        if self._log is None or self._reader is None:
            return None if self._refusal is None else to_error(self._refusal, self.id)
        if not self._accepted:
            self._accepted = True
            return wire.Accepted(id=self.id, stream=self._log.id, after=0, model=model, created=time.time())
        if delta := self._take_delta(self._reader, now):
            return delta
        if self._reader.ended:
            return to_terminal(self.id, self._log)
        if len(self._log):
            return None
        self._progress, self._progress_at = to_progress(self.id, self._log), now
        return self._progress

    def _take_delta(self, reader: Reader, now: float) -> wire.Delta | None:
        """Tokens that complete no text ride with the next that do, unless the client wants the ids."""
        text = ""
        if new := reader.take(self._piece):
            text = new.text
            self._held += new.token_ids
            self._held_logprobs += map(to_logprob, new.logprobs)
        if not self._held or not (text or reader.ended or self._delivery.token_ids):
            return None
        tokens, self._held = self._held, []
        logprobs, self._held_logprobs = self._held_logprobs, []
        self._shown += len(tokens)
        self._delta_at = now
        ids = tokens if self._delivery.token_ids else UNSET
        return wire.Delta(id=self.id, seq=self._shown, n=len(tokens), text=text, tokens=ids, logprobs=logprobs or UNSET)
