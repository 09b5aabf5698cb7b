"""One request whose prompt another engine computes: what is known of it, and what is said about it."""

from dataclasses import dataclass
from enum import Enum

from msgspec import structs

from compiled.step import Sampling
from streamengine.request import Delta, Finish, Request, Sequence
from streamengine.transfer.values import WIRE_VERSION, Card, Handle, Read


class Phase(Enum):
    COMPUTING = "the peer computes it"
    ROOM = "no pages to land in yet"
    SETTLING = "pages that a step may still write"
    POSTED = "being read"


@dataclass(slots=True, eq=False)
class Remote:
    """One request, from its `Prefill` on until it is elsewhere."""

    transfer: str
    peer: str
    card: Card
    sequence: Sequence
    sent: float
    deadline: float
    heard: float
    """By our clock, when we said the last thing about it that the peer is known to have read."""
    asked: float
    """When the last heartbeat with it was sent."""
    phase: Phase = Phase.COMPUTING
    handle: Handle | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    barrier: int = 0
    """Number of the last step that might write its pages."""


def prompt_of(request: Request, transfer: str) -> Request:
    """What the peer is asked for."""
    alone = request.n == 1 and not request.beam_width
    grammar = request.grammar if alone else None
    return structs.replace(
        request,
        id=0,
        max_tokens=1,
        n=1,
        beam_width=0,
        speculate=0,
        sampling=request.sampling if alone else Sampling(),
        # Where its tokens end the answer is for whoever has the others.
        grammar=None if grammar is None else structs.replace(grammar, close=False),
        transfer=transfer,
    )


def read_of(remote: Remote) -> Read:
    """The order to read the pages that it has room for."""
    assert remote.handle is not None
    sums = None
    if remote.handle.checksums is not None:
        by_page = dict(zip(remote.handle.pages, remote.handle.checksums, strict=True))
        sums = tuple(by_page[page] for page, _ in remote.pairs)
    return Read(remote.transfer, remote.peer, remote.card.incarnation, remote.pairs, sums)


def wrong_in(handle: Handle, remote: Remote, page_size: int) -> str:
    """What of ``handle`` cannot be; empty if nothing."""
    prompt, card = len(remote.sequence.request.prompt), remote.card
    for name, said, known in (
        ("version", handle.version, WIRE_VERSION),
        ("engine", handle.engine, card.engine),
        ("incarnation", handle.incarnation, card.incarnation),
        ("tokens", handle.tokens, prompt),
        ("pages", len(handle.pages), -(-prompt // page_size)),
        ("checksums", len(handle.checksums or handle.pages), len(handle.pages)),
    ):
        if said != known:
            return f"{name} {said!r}, not {known!r}"
    return ""


def ends(sequence: Sequence, finish: Finish) -> list[Delta]:
    """``finish`` for every answer of a request that is not in the scheduler."""
    request = sequence.request
    computed = len(request.prompt) if sequence.answered else 0
    return [Delta(request=request.id, index=index, computed=computed, finish=finish) for index in range(request.n)]
