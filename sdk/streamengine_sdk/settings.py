"""How long a client waits, how it tries again, and whom it tells."""

from collections.abc import Callable
from dataclasses import dataclass

from streamengine_sdk.events import Trace

Tracer = Callable[[Trace], None]


def _seconds(owner: object) -> None:
    for name, value in vars(owner).items():
        if value is not None and not (isinstance(value, int | float) and 0 < value <= 1e9):
            raise ValueError(f"{type(owner).__name__.lower()} {name} must be above 0 to 1e9 seconds, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds; ``None`` is none. All but ``queue`` are kept by the client and raise `Timeout`.

    Args:
        connect: until the socket is open.
        queue: for the request to wait on the server before it is refused as `Overloaded`.
        first_token: from sending the request.
        between: from one token to the next, or from asking for it if that is later; heartbeats do not count.
        total: from sending the request to its end.

    The last three go on while a lost connection is being replaced.
    """

    connect: float | None = 5
    queue: float | None = None
    first_token: float | None = 60
    between: float | None = 30
    total: float | None = None

    def __post_init__(self) -> None:
        _seconds(self)


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """When to open the next connection after one was lost under open streams.

    Waits are drawn evenly from 0 to ``first`` · 2ᵏ seconds, at most ``longest``, where k counts the attempts since
    anything of an answer arrived: so a thousand clients of a restarted server do not come back at once.
    When nothing has arrived for ``give_up`` seconds the streams fail with `ConnectionLost`. An answer that was cut
    because its server shuts down waits ``cut`` seconds for another one to go on with it, and then ends as it was cut.
    """

    first: float = 0.25
    longest: float = 8
    give_up: float = 60
    cut: float = 5

    def __post_init__(self) -> None:
        _seconds(self)

    def delay(self, attempt: int, draw: float) -> float:
        """Seconds before attempt 0, 1, …, for a ``draw`` from [0, 1)."""
        return draw * min(self.longest, self.first * 2 ** min(attempt, 60))
