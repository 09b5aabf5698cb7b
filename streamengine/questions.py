"""What the core is asked beside requests: its statistics, and a profile of its next steps."""

import os
from collections.abc import Callable
from typing import TypedDict, Unpack

import anyio

from compiled.timeline import MAX_STEPS, Measure
from streamengine.bell import Reply
from streamengine.checks import check_text, exact_integer, exact_number, shown
from streamengine.errors import Conflict, InvalidRequest, QueueTimeout, StreamEngineError, from_code
from streamengine.link import AskProfile, AskStatistics, EndProfile, Profiled, Statistics, ToCore
from streamengine.profile.record import Profile

LAST_STEP_S = 60.0
"""After a profile's time is over: how long the step may take that is running then."""


class How(TypedDict, total=False):
    """How a profile is taken."""

    timeout_s: float
    """Seconds in which the steps must come."""
    plain_steps: int
    """So many steps are timed unmeasured before, to tell what measuring costs."""
    ceilings: bool
    """Measure what the machine can do afterwards; every request waits about a second for that."""
    trace: str | os.PathLike[str] | None
    """Where the core writes a Chrome trace by torch's profiler, which makes the steps slower."""


DEFAULTS: How = {"timeout_s": 60.0, "plain_steps": 0, "ceilings": True, "trace": None}


class Questions:
    """Those of one engine, each answered once. ``post`` gives a message to its core."""

    def __init__(self, post: Callable[[ToCore], None]) -> None:
        self._post = post
        self._statistics: Reply[dict[str, float]] | None = None
        self._profile: Reply[Profile] | None = None
        self._profiles = 0

    async def statistics(self) -> dict[str, float]:
        """A snapshot of the core's counts; who asks while another waits gets the same."""
        if self._statistics is None:
            self._statistics = Reply()
            self._post(AskStatistics())
        return await self._statistics.wait()

    async def profile(self, steps: int, **how: Unpack[How]) -> Profile:
        """What the next ``steps`` steps cost, as many of them as come in time. What they compute stays the same.

        Raises:
            InvalidRequest: no steps, or more than `compiled.timeline.MAX_STEPS`; no time; a word that `How` has not.
            Conflict: another profile is being taken.
            QueueTimeout: there was no step.
            UnsupportedFeature: the runner is one that cannot be measured.
            EngineFailure: the core died, or the trace cannot be written.
        """
        for name in how.keys() - DEFAULTS.keys():
            raise InvalidRequest(f"a profile has no {name}", param=name)
        options = DEFAULTS | how
        trace = options["trace"]
        if trace is not None:
            trace = check_text(os.fspath(trace) if isinstance(trace, os.PathLike) else trace, "trace")
        timeout_s = exact_number("timeout_s", options["timeout_s"], 0, 1e6, above=True)
        measure = Measure(
            exact_integer("steps", steps, 1, MAX_STEPS),
            exact_integer("plain_steps", options["plain_steps"], 0, MAX_STEPS),
            trace,
        )
        if not isinstance(options["ceilings"], bool):
            raise InvalidRequest(f"ceilings must be true or false, not {shown(options['ceilings'])}", param="ceilings")
        if self._profile is not None:
            raise Conflict("a profile is being taken, and only one can be at a time")
        reply = self._profile = Reply()
        self._profiles += 1
        try:
            self._post(AskProfile(self._profiles, measure, options["ceilings"]))
            with anyio.move_on_after(timeout_s):
                return await reply.wait()
            self._post(EndProfile(self._profiles))
            with anyio.move_on_after(LAST_STEP_S):
                return await reply.wait()
            raise QueueTimeout(f"the core did not answer within {timeout_s + LAST_STEP_S:g} s")
        finally:
            if self._profile is reply:  # nobody waits for it any more
                self._profile = None
                self._post(EndProfile(self._profiles))

    def answer(self, message: Statistics | Profiled) -> None:
        """What the core says. A profile that nobody waits for any more is dropped."""
        if isinstance(message, Statistics):
            if self._statistics is not None:
                self._statistics.set(message.values)
                self._statistics = None
        elif self._profile is not None and message.number == self._profiles:
            error = from_code(message.code, message.message, param=message.param)
            self._profile.set(error if message.profile is None else message.profile)
            self._profile = None

    def fail(self, error: StreamEngineError) -> None:
        """The core is gone; whoever waits is told."""
        for reply in (self._statistics, self._profile):
            if reply is not None:
                reply.set(error)
        self._statistics = self._profile = None
