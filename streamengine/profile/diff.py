"""What became slower between two profiles, under which piece's name, and why.

Noise: on a machine that others use too, a mean moves by itself. So something counts as slower only if its median
*and* its fastest have grown by more than the threshold, and if that makes the step longer by `FLOOR` at least; a
mean that grew alone is told as bursts. Noise that lasts for a whole run is not seen from inside of it: hence both
profiles' ceilings, which were measured beside them, are compared too, and a threshold below what two runs of one
version differ by finds nothing but the machine.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamengine.errors import InvalidRequest
from streamengine.profile.record import Call, Piece, Profile, read

FLOOR = 0.005
"""What is slower by less than this share of a step is not worth an alarm."""
HOST = "host/other"


class Cost(msgspec.Struct, frozen=True):
    """One kind of call in a step: seconds in the median, at the fastest and in the mean; then for one call."""

    median_s: float = 0.0
    fastest_s: float = 0.0
    mean_s: float = 0.0
    calls: float = 0.0
    bytes: float | None = None
    flops: float | None = None


class Change(msgspec.Struct, frozen=True):
    """``name`` at ``tokens`` (None: whatever the bucket), before and after; ``why`` are sentences."""

    name: str
    tokens: int | None
    before: Cost
    after: Cost
    slower: bool
    why: tuple[str, ...]

    @property
    def growth_s(self) -> float:
        return self.after.median_s - self.before.median_s


class Difference(msgspec.Struct, frozen=True):
    """``step`` is the whole step; ``changes`` are its parts, the one that grew most first; ``notes`` say what else
    is not the same."""

    step: Change
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> bool:
        return self.step.slower or any(change.slower for change in self.changes)


def compare(before: Profile, after: Profile, threshold: float = 0.05) -> Difference:
    """``threshold`` is a share: 0.05 is 5 %.

    Raises:
        InvalidRequest: they are of different models, dtypes or scenarios.
    """
    for field in ("model", "dtype", "scenario", "eager"):
        one, other = getattr(before, field), getattr(after, field)
        if one != other:
            raise InvalidRequest(f"only like can be compared: {field} is {one} and {other}", param=field)
    floor = FLOOR * before.step_s.p50
    parts, others = _parts(before), _parts(after)
    changes = [
        _change(*key, parts.get(key, ()), others.get(key, ()), before, after, threshold, floor)
        for key in parts | others
    ]
    changes.append(_verdict(HOST, None, _host(before), _host(after), threshold, floor, ()))
    changes.sort(key=lambda change: -change.growth_s)
    whole = _verdict("the step", None, _whole(before), _whole(after), threshold, 0.0, ())
    return Difference(whole, tuple(changes), tuple(_notes(before, after, threshold)))


Key = tuple[str, int | None]


def _parts(profile: Profile) -> dict[Key, Sequence[Call]]:
    """Calls by what they are and their bucket: a piece by its name, whichever layers it stands between."""
    names = {piece.key: piece.name for piece in profile.pieces}
    parts: dict[Key, list[Call]] = {}
    for call in profile.calls:
        name = names.get(call.piece or "") or re.sub(r"[\w.]+\.\d+: ", "", call.name)
        parts.setdefault((name, call.tokens), []).append(call)
    return dict(parts)


def _cost(calls: Sequence[Call], steps: int) -> Cost:
    count = sum(call.calls for call in calls)
    if not count:
        return Cost()

    def per_step(field: str) -> float:
        each = ((getattr(call, field), call) for call in calls)
        return sum((call.mean_s if value is None else value) * call.calls for value, call in each) / steps

    def per_call(field: str) -> float | None:
        known = [getattr(call, field) for call in calls]
        return None if None in known else sum(known) / count

    return Cost(
        median_s=per_step("p50_s"),
        fastest_s=per_step("min_s"),
        mean_s=per_step("mean_s"),
        calls=count / steps,
        bytes=per_call("bytes"),
        flops=per_call("flops"),
    )


def _host(profile: Profile) -> Cost:
    """Of the steps only the mean is known, and the one in the timeline, which was the median."""
    mean = median = profile.host.seconds / profile.steps
    if (line := profile.timeline) is not None:
        median = max(0.0, line.seconds - sum(event.seconds for event in line.events))
    return Cost(median, min(median, mean), mean, 1.0)


def _whole(profile: Profile) -> Cost:
    return Cost(profile.step_s.p50, profile.step_s.min, profile.step_s.mean, 1.0)


def _change(
    name: str,
    tokens: int | None,
    calls: Sequence[Call],
    others: Sequence[Call],
    before: Profile,
    after: Profile,
    threshold: float,
    floor: float,
) -> Change:
    one, other = _cost(calls, before.steps), _cost(others, after.steps)
    why = [*_place(calls, others), *_made(_piece(before, calls), _piece(after, others))]
    return _verdict(name, tokens, one, other, threshold, floor, why)


def _verdict(
    name: str, tokens: int | None, one: Cost, other: Cost, threshold: float, floor: float, why: Sequence[str]
) -> Change:
    def grew(field: str) -> bool:
        was, now = getattr(one, field), getattr(other, field)
        return bool(now > was * (1 + threshold) and now - was > floor)

    slower = grew("median_s") and grew("fastest_s")
    reasons = [*_costs(one, other), *why]
    if grew("mean_s") and not slower:
        reasons.append(f"in bursts: the mean {_span(one.mean_s, other.mean_s)}, not all of it")
    return Change(name, tokens, one, other, slower, tuple(reasons))


def _costs(one: Cost, other: Cost) -> Iterator[str]:
    if not one.calls or not other.calls:
        yield "only in the second" if other.calls else "only in the first"
        return
    each, now = one.median_s / one.calls, other.median_s / other.calls
    yield f"{_span(each, now)} a call, the fastest {_span(one.fastest_s / one.calls, other.fastest_s / other.calls)}"
    if one.calls != other.calls:
        yield f"{one.calls:.4g} → {other.calls:.4g} calls a step"
    for what, was, became in (("MB", one.bytes, other.bytes), ("Mflop", one.flops, other.flops)):
        if was is not None and became is not None and was != became:
            yield f"{was / 1e6:.4g} → {became / 1e6:.4g} {what} a call"


def _place(calls: Sequence[Call], others: Sequence[Call]) -> Iterator[str]:
    """The one place among several that holds more than half of what was lost."""
    known = {call.name: call.p50_s or call.mean_s for call in calls}
    grown = {call.name: (call.p50_s or call.mean_s) - known[call.name] for call in others if call.name in known}
    lost = sum(seconds for seconds in grown.values() if seconds > 0)
    if len(grown) > 1 and grown[worst := max(grown, key=grown.__getitem__)] > lost / 2:
        yield f"most of it at {worst}: {_span(known[worst], known[worst] + grown[worst])}"


def _piece(profile: Profile, calls: Sequence[Call]) -> Piece | None:
    return next((piece for piece in profile.pieces for call in calls if piece.key == call.piece), None)


def _made(one: Piece | None, other: Piece | None) -> Iterator[str]:
    if one is None or other is None:
        return
    if one.key != other.key:
        yield "another graph"
    elif one.code != other.code and one.code and other.code:
        yield "other code for the same graph"
    was, now = one.compile, other.compile
    if was is not None and now is not None and (was.cache, now.cache) == ("hit", "miss"):
        factor = f", {now.factor}" if now.factor else ""
        yield f"cache hit → miss{factor}"


def _notes(before: Profile, after: Profile, threshold: float) -> Iterator[str]:
    for field in ("cpu", "device", "cores", "threads"):
        one, other = getattr(before.hardware, field), getattr(after.hardware, field)
        if one != other:
            yield f"not the same machine: {field} {one} → {other}"
    if before.ceilings is None or after.ceilings is None:
        return
    for field, what in (
        ("read_gbps", "read {:.3g} → {:.3g} GB/s"),
        ("product_gflops", "product {:.3g} → {:.3g} GFLOP/s"),
    ):
        one, other = getattr(before.ceilings, field), getattr(after.ceilings, field)
        if abs(other - one) > threshold * one:
            yield f"the machine itself was not as fast as before or after: {what.format(one, other)}"


def _span(one: float, other: float) -> str:
    """``one → other`` in the unit that suits the larger."""
    size, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if max(one, other) >= pair[0]), (1e-6, "µs"))
    return f"{one / size:.3g} → {other / size:.3g} {unit}"


def lines(difference: Difference) -> Iterator[str]:
    """For a terminal: the step, then each part that is slower, faster or otherwise changed."""
    for change in (difference.step, *difference.changes):
        was, now = change.before.median_s, change.after.median_s
        share = f"{100 * (now / was - 1):+.1f} %" if was else "new"
        bucket = f" @T≤{change.tokens}" if change.tokens else ""
        yield f"{'SLOWER' if change.slower else '':<7}{share:>9}  {_span(was, now):<20}  {change.name}{bucket}"
        if change is not difference.step and (change.slower or len(change.why) > 1):
            yield from (f"{'':18}{reason}" for reason in change.why)
    yield from (f"note: {note}" for note in difference.notes)


def command(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The profile that was.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The profile that is.")],
    threshold: Annotated[str, typer.Option(help="How much slower is too slow, as 5% or 0.05.")] = "5%",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what became slower from A to B, and why; 1 if anything did by more than the threshold."""
    difference = compare(read(before), read(after), share(threshold))
    typer.echo(msgspec.json.encode(difference).decode() if as_json else "\n".join(lines(difference)))
    if difference.slower:
        raise typer.Exit(1)


def share(text: str) -> float:
    """``5%`` or ``0.05``. Raises InvalidRequest for anything else, a bare ``5`` too."""
    try:
        value, most = (float(text[:-1]) / 100, 10.0) if text.endswith("%") else (float(text), 1.0)
    except ValueError:
        value, most = 0.0, 0.0
    if not 0 < value < most:
        raise InvalidRequest(f"threshold must be a share such as 5% or 0.05, not {text!r}", param="threshold")
    return value
