import pytest

from streamengine.request import LIFECYCLE, Event, Request, Sequence, State
from tests.fakes import GREEDY


def test_a_sequence_knows_the_tokens_in_flight_and_needs_no_kv_for_the_last_one():
    request = Request(id=1, prompt=(1, 2, 3), max_tokens=4, sampling=GREEDY)
    sequence = Sequence(request, arrival=0.0, tokens=[1, 2, 3, 9], pending=1)
    assert (sequence.known, sequence.answered, sequence.reach) == (5, 1, 6)


def test_the_lifecycle_has_an_entry_for_every_state_and_ends_in_finished():
    assert set(LIFECYCLE) == set(State)
    assert LIFECYCLE[State.FINISHED] == {}
    sequence = Sequence(Request(id=1, prompt=(1,), max_tokens=1, sampling=GREEDY), arrival=0.0, tokens=[1])
    sequence.apply(Event.FINISH)
    with pytest.raises(KeyError):
        sequence.apply(Event.ADMIT)
