"""Pages between machines, by NIXL: over RDMA where there is, by the kernel on one machine, else over TCP.

A read cannot be cancelled. Releasing its handle, or forgetting its source, does not stop what is on its way from being
written, so a read here ends when NIXL says that it is done or has failed, and however long that takes its handle and
its landing pages stay. What bounds it is that it goes in parts: after a part no other one begins of a source that was
forgotten.

Over TCP a read is answered by messages that the other side must take in, so both sides poll. NIXL's own thread for
that is off: it costs two to three times as much as a poll by the thread that is there anyway.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from compiled.step import KVMemory
from streamengine.transfer.transport import Outcome, TransportError, check_pairs

PART_BYTES = 16 * 2**20
"""Where the kernel copies, the call that begins a part returns when it is done: no control message is read before."""

BUSY_S = 0.001
"""A read is polled for so long, and then not for so long."""

ATTENTIVE_S, IDLE_S = 0.002, 0.05
"""How often others' reads are looked after: for `EXPECT_S` after `expect`, and later."""

EXPECT_S = 10.0


class _Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: str
    metadata: bytes
    base: int
    pages: int
    page_bytes: int


@dataclass(slots=True)
class _Source:
    agent: str
    pages: int
    prepared: Any
    reads: int = 0
    forgotten: bool = False


@dataclass(slots=True)
class _Reading:
    transfer: str
    source: _Source
    pairs: Sequence[tuple[int, int]]
    begun: int = 0
    handle: Any = None


@dataclass(eq=False)
class Nixl:
    """See `Transport`. One part of each read is on its way at a time.

    Raises:
        TransportError: NIXL is not installed, or cannot start.
    """

    name = "nixl"

    _sources: dict[str, _Source] = field(default_factory=dict, init=False)
    _readings: list[_Reading] = field(default_factory=list, init=False)
    _refused: list[Outcome] = field(default_factory=list, init=False)
    _expected: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs to standard output, which is not its own
        try:
            import nixl._api as api  # optional: the extra `nixl`
        except ImportError as error:
            raise TransportError(f"NIXL is not installed; get it with: pip install nixl ({error})") from error
        from importlib.metadata import version  # not before it is known to be there

        self.version = version("nixl")
        settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            # UCX's handling of dead peers is on by default, and must be: a read from one would never end.
            self._agent: Any = api.nixl_agent(uuid4().hex, settings)
        except Exception as error:  # its exceptions have no common base
            raise TransportError(f"NIXL cannot start: {error}") from error

    def register(self, memory: KVMemory) -> bytes:
        self._memory = memory  # it must live as long as somebody may write into it
        self._base = np.frombuffer(memory.view, np.uint8).ctypes.data
        try:
            self._registered = self._agent.register_memory([(self._base, memory.view.nbytes, 0, "")], "DRAM")
            self._prepared = self._prepare("", self._base, memory.pages)
        except Exception as error:
            raise TransportError(f"NIXL cannot register the KV cache: {error}") from error
        address = _Address(
            self._agent.name, self._agent.get_agent_metadata(), self._base, memory.pages, memory.page_bytes
        )
        return msgspec.msgpack.encode(address)

    def _prepare(self, agent: str, base: int, pages: int) -> Any:
        size = self._memory.page_bytes
        return self._agent.prep_xfer_dlist(agent, np.array([[base, size, 0, size, pages]], np.uint64), "DRAM")

    def connect(self, source: str, address: bytes) -> None:
        if known := self._sources.get(source):
            known.forgotten = False
            return
        try:
            at = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not an address of NIXL: {error}") from error
        if at.page_bytes != self._memory.page_bytes:
            raise TransportError(f"a page there has {at.page_bytes} bytes, here {self._memory.page_bytes}")
        try:
            self._agent.add_remote_agent(at.metadata)
            self._agent.make_connection(at.agent)  # both sides have to do something for it: not when a read waits
            prepared = self._prepare(at.agent, at.base, at.pages)
        except Exception as error:
            raise TransportError(f"NIXL cannot reach it: {error}") from error
        self._sources[source] = _Source(at.agent, at.pages, prepared)
        self.expect()

    def read(self, transfer: str, source: str, pairs: Sequence[tuple[int, int]]) -> None:
        known = self._sources.get(source)
        if known is None or known.forgotten:
            self._refused.append(Outcome(transfer, f"the memory of {source} is not known"))
        elif why := check_pairs(pairs, known.pages, self._memory.pages):
            self._refused.append(Outcome(transfer, why))
        else:
            known.reads += 1
            self._readings.append(_Reading(transfer, known, pairs))

    def poll(self) -> list[Outcome]:
        outcomes, self._refused = self._refused, []
        if self._expected is not None:
            self._agent.get_new_notifs()  # none is ever sent: what matters is the progress
        until = time.perf_counter() + BUSY_S
        while self._readings:
            for reading in list(self._readings):
                why = self._advance(reading)
                if why is not None:
                    self._readings.remove(reading)
                    outcomes.append(Outcome(reading.transfer, why))
                    reading.source.reads -= 1
            if time.perf_counter() >= until:
                break
        for name, source in list(self._sources.items()):
            if source.forgotten and not source.reads:
                self._remove(name, source)
        return outcomes

    def _advance(self, reading: _Reading) -> str | None:
        """How ``reading`` has ended: empty if well; None if it has not."""
        try:
            if reading.handle is None:
                if reading.begun == len(reading.pairs):
                    return ""
                if reading.source.forgotten:
                    return "its source was forgotten"
                state = self._begin(reading)
            else:
                state = self._agent.check_xfer_state(reading.handle)
        except Exception as error:
            self._release(reading)
            return f"NIXL: {error}"
        if state == "PROC":
            return None
        self._release(reading)
        return "NIXL: the transfer failed" if state != "DONE" else "" if reading.begun == len(reading.pairs) else None

    def _begin(self, reading: _Reading) -> str:
        part = reading.pairs[reading.begun :][: max(1, PART_BYTES // self._memory.page_bytes)]
        theirs, ours = np.array(part, np.int32).T.copy()
        reading.begun += len(part)
        reading.handle = self._agent.make_prepped_xfer("READ", self._prepared, ours, reading.source.prepared, theirs)
        return str(self._agent.transfer(reading.handle))

    def _release(self, reading: _Reading) -> None:
        handle, reading.handle = reading.handle, None
        if handle is not None:
            with suppress(Exception):  # of a peer that died; the agent keeps what it could not release
                self._agent.release_xfer_handle(handle)

    def pause(self) -> float | None:
        if self._refused:
            return 0.0
        if self._readings or any(source.forgotten for source in self._sources.values()):
            return BUSY_S
        if self._expected is None:
            return None
        return ATTENTIVE_S if time.monotonic() < self._expected else IDLE_S

    def expect(self) -> None:
        self._expected = time.monotonic() + EXPECT_S

    def forget(self, source: str) -> None:
        if known := self._sources.get(source):
            known.forgotten = True

    def _remove(self, name: str, source: _Source) -> None:
        del self._sources[name]
        with suppress(Exception):  # of a peer that is dead there may be nothing left to remove
            self._agent.release_dlist_handle(source.prepared)
            self._agent.remove_remote_agent(source.agent)

    def close(self) -> None:
        if self._agent is None:
            return
        for reading in self._readings:
            self._release(reading)
        for name, source in list(self._sources.items()):
            self._remove(name, source)
        with suppress(Exception):
            self._agent.release_dlist_handle(self._prepared)
            self._agent.deregister_memory(self._registered)
        self._readings.clear()
        # What holds the agent: with it go its endpoints, over which alone anything could still come.
        self._agent = self._prepared = self._registered = None
