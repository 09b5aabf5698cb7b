"""Pages between engines whose cores are threads of one process: each copies out of the memory that the other has
registered here.

An address says in which process it means something: numbers of processes come again, and a fork has copies of what is
registered, so a process has a name of its own beside its number.
"""

import itertools
import os
import secrets

import msgspec

from compiled.step import KVMemory
from streamengine.transfer.copying import Copying, Pages, rows
from streamengine.transfer.transport import TransportError

_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()
_memories: dict[int, KVMemory] = {}
"""Of every engine of this process that may be read. Each entry is one thread's, from `register` to `close`."""


class _Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pid: int
    process: str
    number: int


class InProcess(Copying):
    """See `Transport`."""

    name = "in_process"
    version = "1"

    _number: int | None = None

    def register(self, memory: KVMemory) -> bytes:
        self.use(memory)
        self._number = next(_numbers)
        _memories[self._number] = memory
        return msgspec.msgpack.encode(_Address(os.getpid(), _PROCESS, self._number))

    def map(self, address: bytes) -> Pages:
        try:
            at = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not an address within a process: {error}") from error
        if (at.pid, at.process) != (os.getpid(), _PROCESS):
            raise TransportError(f"it is in process {at.pid}, not in ours, {os.getpid()}, as in_process needs it")
        memory = _memories.get(at.number)
        if memory is None:
            raise TransportError("its memory is not registered any more")
        return rows(memory)

    def close(self) -> None:
        super().close()
        if self._number is not None:
            _memories.pop(self._number, None)
