"""Pages between processes of one machine: each maps the memfd of the other and copies out of it.

A memfd has no name in any folder: the kernel frees it when the last process that maps it is gone, and `kill -9` leaves
nothing behind. It is found as ``/proc/PID/fd/N``, which only processes of the same user (and PID namespace) can open;
its inode tells it from whatever else a process of that number may have by then.
"""

import fcntl
import mmap
import os

import msgspec
import numpy as np

from compiled.step import KVMemory
from streamengine.transfer.copying import Copying, Pages
from streamengine.transfer.transport import TransportError


class _Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pid: int
    descriptor: int
    device: int
    inode: int
    pages: int
    page_bytes: int


class SharedMemory(Copying):
    """See `Transport`."""

    name = "shared_memory"
    version = "1"

    def register(self, memory: KVMemory) -> bytes:
        if memory.descriptor is None:
            raise TransportError("the KV cache is not in shared memory")
        self.use(memory)
        found = os.fstat(memory.descriptor)
        where = (os.getpid(), memory.descriptor, found.st_dev, found.st_ino)
        return msgspec.msgpack.encode(_Address(*where, memory.pages, memory.page_bytes))

    def map(self, address: bytes) -> Pages:
        try:
            at = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not an address of shared memory: {error}") from error
        path = f"/proc/{at.pid}/fd/{at.descriptor}"
        size = at.pages * at.page_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # should it be a pipe
            try:
                found = os.fstat(descriptor)
                if (found.st_dev, found.st_ino) != (at.device, at.inode) or found.st_size < size:
                    raise TransportError(f"{path} is not the memory that its engine told of")
                if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise TransportError(f"{path} could be cut off while it is read: it is not sealed")
                mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"cannot map {path}, of an engine of this user on this machine: {error}") from error
        return np.frombuffer(mapped, np.uint8).reshape(at.pages, at.page_bytes)
