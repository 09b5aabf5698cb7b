"""Pages between engines of one process, which know each other's memory by name."""

from dataclasses import dataclass, field

from compiled.step import KVMemory
from streamengine.transfer.copying import Copying, Pages, rows
from streamengine.transfer.transport import TransportError


@dataclass(eq=False)
class InProcess(Copying):
    """See `Transport`.

    Args:
        memories: of every engine that may be read, shared by their transports.
    """

    name = "in_process"
    version = "1"

    memories: dict[bytes, KVMemory] = field(default_factory=dict)
    _address: bytes = b""

    def register(self, memory: KVMemory) -> bytes:
        self.use(memory)
        self._address = str(len(self.memories)).encode()
        self.memories[self._address] = memory
        return self._address

    def map(self, address: bytes) -> Pages:
        memory = self.memories.get(address)
        if memory is None:
            raise TransportError(f"no engine of this process has memory {address.decode(errors='replace')}")
        return rows(memory)

    def close(self) -> None:
        super().close()
        self.memories.pop(self._address, None)
