"""What stands between simulated engines: the connector's orders become reports to somebody, later."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from compiled.step import KVSpec
from streamengine.transfer.values import Card, Failed, Fingerprint, Forget, Landed, Order, Read, Received, Report, Send


@dataclass(eq=False)
class Wire:
    """The worker of one engine: keeps its orders for the network, and reports until the core looks at them."""

    orders: list[Order] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def post(self, orders: list[Order]) -> None:
        self.orders += orders

    def poll(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def drain(self) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def fileno(self) -> int:
        raise AssertionError("nobody sleeps in a virtual clock")

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Place:
    """One life of an engine, the ``number``-th of those that compute prompts, or of the others."""

    prefill: bool
    number: int
    life: int

    @property
    def peer(self) -> str:
        """What its peers call it. Whoever connects to one that computes prompts has a new name each time."""
        return f"prefill-{self.number}" if self.prefill else f"decode-{self.number}/{self.life}"

    def card(self, kv: KVSpec) -> Card:
        fingerprint = Fingerprint(
            model="planned",
            compute="",
            dtype="",
            page_size=kv.page_size,
            page_bytes=kv.page_bytes,
            layers=1,
            layout="",
            window=kv.window,
            transport="planned",
            transport_version="",
        )
        return Card(engine=self.peer, incarnation=f"{self.peer}/{self.life}", fingerprint=fingerprint)


class Delivery(NamedTuple):
    """``report`` reaches the engine at ``to``, if that life goes on; ``source`` must live until then."""

    at: float
    to: Place
    report: Report
    source: Place | None = None


class Network:
    """Every engine has one link each way, on which reads follow each other; messages only take the latency.

    Args:
        bytes_per_s: of a link.
        latency_s: of a message, and of a read besides its bytes.
        page_bytes: of one KV page.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, page_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._page_bytes = page_bytes
        self._out: dict[int, float] = {}
        self._in: dict[int, float] = {}
        self.names: dict[str, Place] = {}
        """Who is alive, by what peers call it."""

    def carry(self, sender: Place, orders: list[Order], now: float) -> Iterator[Delivery]:
        """What becomes of the ``orders`` of ``sender``, and when."""
        for order in orders:
            match order:
                case Send(peer, message):
                    if (to := self.names.get(peer)) is not None:
                        yield Delivery(now + self.latency_s, to, Received(sender.peer, message))
                case Read(transfer, peer, incarnation, pairs):
                    source = self.names.get(peer)
                    if source is None or f"{source.peer}/{source.life}" != incarnation:
                        yield Delivery(now + self.latency_s, sender, Failed(transfer, f"{peer} is gone"))
                        continue
                    begin = max(now, self._out.get(source.number, 0.0), self._in.get(sender.number, 0.0))
                    end = begin + len(pairs) * self._page_bytes / self._bytes_per_s
                    self._out[source.number] = self._in[sender.number] = end
                    landed = end + self.latency_s
                    yield Delivery(landed, sender, Landed(transfer, landed - now), source)
                case Forget(peer):
                    raise AssertionError(f"{peer} does not keep to the protocol")
