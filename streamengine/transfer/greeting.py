"""The first words on a connection: each side proves that it has the key, where there is one, then says who it is. Pure.

::

    both   Challenge(nonce)   only where there is a key
    both   Proof(mac)         to a Challenge
    both   Hello(card)        at once where there is no key, else to a Proof that is good

A proof is the HMAC of both nonces and of which side says so: it fits no other connection and cannot be sent back to
who made it. A card may open memory to whoever has it, so a stranger does not get one. What is said afterwards is
neither signed nor hidden: who can change packets on their way can still do harm.
"""

import hmac
import secrets

from streamengine.frames import LinkBroken
from streamengine.transfer.values import NONCE_BYTES, Card, Challenge, Hello, Message, Proof


class Unfit(LinkBroken):
    """It will never be otherwise with that peer, until somebody changes a setting."""


class Greeting:
    """One connection's.

    Args:
        card: of this engine.
        key: which both must have; None where there is none.
        dialed: we connected to the other.
    """

    def __init__(self, card: Card, key: str | None, *, dialed: bool) -> None:
        self._ours = card
        self._key = None if key is None else key.encode()
        self._dialed = dialed
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._their_nonce: bytes | None = None
        self._proved = key is None
        self.card: Card | None = None
        """The other's, once that is all."""

    def begin(self) -> Message:
        return Hello(self._ours) if self._key is None else Challenge(self._nonce)

    def hear(self, message: Message) -> Message | None:
        """What to say to ``message``.

        Raises:
            Unfit: one has a key and the other none, or another; or their pages are not alike.
            LinkBroken: it makes no sense here.
        """
        match message:
            case Hello(card) if self.card is None:
                if not self._proved:
                    raise Unfit("it has no peer_key, and here is one")
                if card.engine == self._ours.engine:
                    raise LinkBroken(f"it is engine {card.engine!r}, as we are")
                if differences := self._ours.fingerprint.differences(card.fingerprint):
                    raise Unfit(differences)
                self.card = card
                return None
            case Challenge(nonce) if self._their_nonce is None:
                if self._key is None:
                    raise Unfit("it wants a peer_key, and here is none")
                self._their_nonce = nonce
                return Proof(self._proof(self._key, self._dialed, nonce, self._nonce))
            case Proof(mac) if self._key is not None and self._their_nonce is not None and not self._proved:
                if not hmac.compare_digest(
                    mac, self._proof(self._key, not self._dialed, self._nonce, self._their_nonce)
                ):
                    raise Unfit("its peer_key is another than ours")
                self._proved = True
                return Hello(self._ours)
        raise LinkBroken(f"it said {type(message).__name__.lower()} where that has no place")

    @staticmethod
    def _proof(key: bytes, dialed: bool, asked: bytes, nonce: bytes) -> bytes:
        return hmac.digest(key, (b"dialed" if dialed else b"accepted") + asked + nonce, "sha256")
