"""For tests of programs that use the SDK: a server in memory, connections that break, and a session without sockets.

Nothing here needs pytest, and all of it runs on asyncio and trio.
"""

from streamengine_sdk.testing.faults import FaultyTransport
from streamengine_sdk.testing.memory import MemoryPeer, MemoryTransport
from streamengine_sdk.testing.server import FakeServer

__all__ = ["FakeServer", "FaultyTransport", "MemoryPeer", "MemoryTransport"]
