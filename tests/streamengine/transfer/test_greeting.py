"""Who is let in: two greetings speak with each other, and with somebody who has heard everything and has no key."""

import pytest

from streamengine.frames import LinkBroken
from streamengine.transfer.greeting import Greeting, Unfit
from streamengine.transfer.shared_memory import SharedMemory
from streamengine.transfer.values import Card, Challenge, Hello, Message, Proof, Release
from tests.transfers import card

KEY = "a secret of both"


def make(name: str, key: str | None = KEY, *, dialed: bool = False) -> Greeting:
    return Greeting(of(name), key, dialed=dialed)


def of(name: str) -> Card:
    return card(SharedMemory(), name)


def talk(d: Greeting, p: Greeting) -> list[Message]:
    """Until nobody has anything to say; what was said."""
    said: list[Message] = []
    waiting: list[tuple[Greeting, Greeting, Message]] = [(p, d, d.begin()), (d, p, p.begin())]
    while waiting:
        hearer, speaker, message = waiting.pop(0)
        said.append(message)
        answer = hearer.hear(message)
        if answer is not None:
            waiting.append((speaker, hearer, answer))
    return said


def test_two_that_have_the_key_know_each_other_afterwards_and_it_is_not_said() -> None:
    d, p = make("D", dialed=True), make("P")
    said = talk(d, p)
    assert (d.card, p.card) == (of("P"), of("D"))
    assert [type(message) for message in said] == [Challenge] * 2 + [Proof] * 2 + [Hello] * 2
    assert KEY not in repr(said)


def test_without_a_key_they_say_who_they_are_at_once() -> None:
    d, p = make("D", None, dialed=True), make("P", None)
    assert [type(message) for message in talk(d, p)] == [Hello, Hello]
    assert (d.card, p.card) == (of("P"), of("D"))


def test_no_card_is_shown_to_who_has_proved_nothing() -> None:
    p = make("P")
    assert isinstance(p.begin(), Challenge)
    assert isinstance(p.hear(Challenge(bytes(32))), Proof)
    with pytest.raises(Unfit, match="another than ours"):
        p.hear(Proof(bytes(32)))


def test_what_was_heard_on_another_connection_proves_nothing() -> None:
    heard = talk(make("D", dialed=True), make("P"))
    again = make("P")
    again.begin()
    again.hear(heard[0])
    with pytest.raises(Unfit, match="another than ours"):
        again.hear(next(message for message in heard if isinstance(message, Proof)))


def test_its_own_proof_sent_back_proves_nothing() -> None:
    p = make("P")
    asked = p.begin()
    proof = p.hear(asked)
    assert isinstance(proof, Proof)
    with pytest.raises(Unfit, match="another than ours"):
        p.hear(proof)


def test_a_hello_does_not_stand_for_a_proof() -> None:
    p = make("P")
    p.begin()
    p.hear(Challenge(bytes(32)))
    with pytest.raises(Unfit, match="it has no peer_key"):
        p.hear(Hello(of("D")))
    assert p.card is None


@pytest.mark.parametrize(
    "words",
    [(Proof(bytes(32)),), (Challenge(bytes(32)), Challenge(bytes(32))), (Release("t"),)],
    ids=["proof first", "two challenges", "something else"],
)
def test_what_has_no_place_ends_it(words: tuple[Message, ...]) -> None:
    p = make("P")
    p.begin()
    *before, last = words
    for message in before:
        p.hear(message)
    with pytest.raises(LinkBroken, match="has no place"):
        p.hear(last)
