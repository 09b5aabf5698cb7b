"""What two engines, and the two halves of a connector in one engine, say to each other. Frozen values only.

::

    D: decode engine, has the client             P: prefill engine
    core ── orders ─▶ worker ══ control socket ══ worker ── reports ─▶ core
         ◀─ reports ─        ◀─ pages (Read) ───  its KV memory        ─ orders ─▶

A conversation, in order; each line is one `Message`::

    both     Hello(card)        first on every connection, behind what `greeting` says of keys
    D → P    Prefill            compute this prompt and hold its pages
    D → P    Heartbeat          every third of the lease while D still wants any of these, from the `Prefill` on
    P → D    Held               answers each Heartbeat: which of them P has still
    P → D    Prefilled(handle)  once for each Prefill; the pages are held from here on
    P → D    Refused            instead of Prefilled, or after it when a lease ran out
    P → D    Busy               to all, when many more or fewer prompts wait there than it said last
    D → P    Release            once for each Prefill, whatever became of it: P computes it no more and holds nothing

The pages themselves move by a transport, and D reads them (P never writes into D). Either side may die, hang, restart
or say something twice at any point: whoever does not know a transfer ignores what is said of it, and everything that
is held has a lease or a deadline.

The worker's half knows nothing of this but the greeting: it carries out `Order`s and tells `Report`s.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from compiled.step import Logprob
from streamengine.request import Request

WIRE_VERSION = 1
"""Of these messages. Part of the fingerprint: engines that differ in it do not speak."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Page = Annotated[int, Meta(ge=0)]
NONCE_BYTES = 32
Digest = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both sides for a page of one to be a page of the other.

    ``model`` is the model's content (see `identity`), never its path or name. ``dtype`` is of the KV cache, ``compute``
    of the model. ``layout`` spells out how the layers lie in a page: for each run of equal layers how many, K and V
    heads times head size. ``transport`` and ``transport_version`` are those of the transport.
    """

    version: int = WIRE_VERSION
    model: str
    compute: str
    dtype: str
    page_size: int
    page_bytes: int
    layers: int
    layout: str
    window: int | None = None
    transport: str
    transport_version: str

    def differences(self, theirs: "Fingerprint") -> str:
        """Field by field, both values; empty where pages may be exchanged."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(theirs, name)]
        return ", ".join(f"{name} here {getattr(self, name)!r}, there {getattr(theirs, name)!r}" for name in names)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Who an engine is. The core makes it but for ``address``, which the transport fills in (`Transport.register`):
    how its memory is reached, encoded in the transport's own terms and opaque to everybody else.

    ``engine`` outlives restarts, ``incarnation`` is new in each: a page number means something in one incarnation only.
    """

    engine: Name
    incarnation: Name
    fingerprint: Fingerprint
    address: bytes = b""


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """A computed prompt on P: everything that D needs to go on with it.

    ``pages`` is P's page table from position 0 on, for ``tokens`` tokens, the whole prompt; `PADDING_PAGE` stands where
    a window has left a page behind, and is not to be read. ``first`` is the token behind the prompt, drawn by P with
    the request's own sampling, and ``logprob`` what was asked for about it. The random numbers of an answer
    are a function of its seed and the position, so there is no other state of the sampler.

    ``queued_s`` and ``seconds`` are how long the prompt waited on P and how long it took from its `Prefill` to this.
    ``cached`` of its tokens P found in its prefix cache. ``checksums`` are the CRC-32 of each page, in tests and with
    ``debug``.
    """

    version: int = WIRE_VERSION
    transfer: Name
    engine: Name
    incarnation: Name
    pages: tuple[Page, ...]
    tokens: int
    first: int
    logprob: Logprob | None = None
    queued_s: float = 0.0
    seconds: float = 0.0
    cached: int = 0
    checksums: tuple[int, ...] | None = None


# messages: engine → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Both → both, first and once on every connection. Sent, received, compared and acted on by the workers."""

    card: Card


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Both → both, first, by an engine with a key: prove that you have it."""

    nonce: Digest


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Both → both, once: the answer, see `greeting`."""

    mac: Digest


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """D → P: compute ``request``, whose ``max_tokens`` and ``n`` are 1 and whose ``id`` means nothing to P.

    ``transfer`` is unique among all engines and restarts, and is opaque. Twice the same one is once. After each word
    about it P waits for the next one for ``lease_s``, then it gives the transfer up.
    """

    transfer: Name
    request: Request
    lease_s: Annotated[float, Meta(gt=0, le=3600)]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """D → P: these are still wanted. ``sent`` is by D's clock, and comes back in `Held`."""

    transfers: tuple[Name, ...]
    sent: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """D → P: the transfer is over, or no longer wanted in whatever state it is."""

    transfer: Name


class Held(msgspec.Struct, frozen=True, tag="held"):
    """P → D: of the `Heartbeat` of ``sent``, these P has, and holds until its lease from then on ends. What D has read
    by ``sent`` + lease was therefore not given away before it was read."""

    transfers: tuple[Name, ...]
    sent: float


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """P → D: done, and held."""

    handle: Handle


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """P → D: there is, or will be, no `Prefilled` of ``transfer``, or what there was is gone.

    ``code`` is one of `errors`; ``overloaded`` is the normal case of a P that has enough to do.
    """

    transfer: Name
    code: str
    message: str


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """P → D: so many prompts are on P that have no token yet, whosever they are."""

    waiting: Annotated[int, Meta(ge=0)]


Words = Hello | Challenge | Proof
"""Of a greeting."""

Message = Hello | Challenge | Proof | Prefill | Heartbeat | Release | Held | Prefilled | Refused | Busy
"""On the wire: length-prefixed frames as in `streamengine.link`, each a msgpack list of these."""

# orders: core → worker, in its own process, in order


class Send(msgspec.Struct, frozen=True):
    """Write ``message`` to ``peer``. Nothing happens where that is not connected: `Lost` was or will be reported."""

    peer: Name
    message: Message


class Read(msgspec.Struct, frozen=True):
    """Copy pages ``(on the peer, here)``. Exactly one `Landed` or `Failed` is reported for ``transfer``, however long
    that takes, and whatever else happens: until then the pages here may be written at any time, and the core gives
    them to nobody. A peer that is not connected, or not in ``incarnation``, is a `Failed`.

    ``checksums``: of the peer's pages, in the order of ``pairs``; a page that has another is a `Failed`.
    """

    transfer: Name
    peer: Name
    incarnation: Name
    pairs: tuple[tuple[Page, Page], ...]
    checksums: tuple[int, ...] | None = None


class Forget(msgspec.Struct, frozen=True):
    """Close the connection to ``peer``. One that was to be connected to is tried again after a while."""

    peer: Name


Order = Send | Read | Forget

# reports: worker → core


class Connected(msgspec.Struct, frozen=True):
    """Greetings were exchanged and the fingerprints are equal: ``peer`` can be sent to and, if it has pages, read from.

    ``peer`` is a name that this worker gave: of one that we connect to its address as configured, of one that
    connected to us a name that no other connection has had. ``dialed`` says which: remote prefills go to those.
    A connection that another one of the same engine takes the place of is reported as `Lost` before.
    """

    peer: Name
    card: Card
    dialed: bool = True


class Lost(msgspec.Struct, frozen=True):
    """``peer`` is not connected any more, or could not be connected to. Reads from it are still answered one by one.

    ``mismatch``: the fingerprints differ, and ``why`` says in what, with both values; or the keys do. ``dialed`` as in
    `Connected`. Told once for each connection, and for each series of failed attempts that end in the same way.
    """

    peer: Name
    why: str
    mismatch: bool = False
    dialed: bool = True


class Received(msgspec.Struct, frozen=True):
    """``peer`` sent ``message``, which is none of a greeting."""

    peer: Name
    message: Message


class Landed(msgspec.Struct, frozen=True):
    """Every page of ``transfer`` is in its place, and nothing writes there any more. It took ``seconds``."""

    transfer: Name
    seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    """``transfer`` ended otherwise, and nothing writes into its pages any more."""

    transfer: Name
    why: str


Report = Connected | Lost | Received | Landed | Failed
