import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine.errors import InvalidRequest
from streamengine.request import LIFECYCLE, Event, Request, SamplingParams, Sequence, State
from tests.fakes import GREEDY

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_k", 5.0),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", NAN),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", "text"),
        ("stop", None),
        ("stop", (1,)),
        ("stop", ("",)),
        ("stop", ("x" * 1001,)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", tuple(range(65))),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message or field == "stop"


def test_the_message_holds_the_number_and_the_limits():
    with pytest.raises(InvalidRequest, match=r"top_p must be above 0 to 1, not 1\.5"):
        SamplingParams(top_p=1.5)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-320, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).resolve(seed=7).temperature == 0.0


def test_top_k_minus_one_is_off():
    assert SamplingParams(top_k=-1).resolve(seed=7).top_k == 0


@given(st.none() | st.integers(-(2**63), 2**63 - 1))
def test_the_seed_that_was_asked_for_wins_over_the_drawn_one(seed):
    assert SamplingParams(seed=seed).resolve(seed=7).seed == (7 if seed is None else seed)


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
