"""What a user may say of an answer, and which field is at fault where it cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine.errors import InvalidRequest, UnsupportedFeature
from streamengine.sampling import SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        pytest.param("max_tokens", 10**5000, id="more digits than Python prints"),
        ("temperature", object()),
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
        ("stop", ("\udc00",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", tuple(range(65))),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("typical_p", 0.0),
        ("typical_p", NAN),
        ("repetition_penalty", 0),
        ("repetition_penalty", INFINITY),
        ("presence_penalty", 2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", -INFINITY),
        ("frequency_penalty", True),
        ("logit_bias", [5]),
        ("logit_bias", {5: NAN}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: "much"}),
        ("logit_bias", {-1: 0}),
        ("logit_bias", {"-1": 0}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {5.0: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {5: 1, "5": 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("bad_words", "text"),
        ("bad_words", ("",)),
        ("bad_words", ("\udc00",)),
        ("bad_words", ((),)),
        ("bad_words", (5,)),
        ("bad_words", ((True,),)),
        ("bad_words", ((-1,),)),
        ("bad_words", ("x" * 129,)),
        ("bad_words", ((1,) * 129,)),
        ("bad_words", ("x",) * 129),
        ("allowed_token_ids", (1.0,)),
        ("allowed_token_ids", (1,) * 8193),
        ("include_stop_str_in_output", "yes"),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("best_of", 0),
        ("beam_width", -1),
        ("length_penalty", NAN),
        ("speculate", 17),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert len(caught.value.message) <= 300


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


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequest, match="min_tokens 6 is above max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_best_of_below_n_and_n_above_the_beams_are_refused():
    with pytest.raises(InvalidRequest, match="best_of 2 is below n 3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(InvalidRequest, match="n 3 is above beam_width 2"):
        SamplingParams(n=3, beam_width=2)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ("no",)},
        {"allowed_token_ids": (1,)},
        {"stop": ("end",)},
        {"min_tokens": 2},
        {"logprobs": 1},
        {"best_of": 2},
        {"speculate": 3},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_a_beam_search_cannot_do_is_refused_by_name(field):
    SamplingParams(beam_width=2, n=2, temperature=0, stop_token_ids=(1,), prompt_logprobs=1)
    with pytest.raises(UnsupportedFeature, match="cannot be combined with beam_width") as caught:
        SamplingParams(beam_width=2, **field)
    assert caught.value.param == next(iter(field))


def test_a_length_penalty_without_beams_is_refused():
    with pytest.raises(UnsupportedFeature, match="length_penalty needs beam_width"):
        SamplingParams(length_penalty=2.0)


def test_biases_come_to_the_sampler_by_id_in_order_however_their_keys_were_written():
    sampling = SamplingParams(logit_bias={"7": 1, 3: -2.5}).resolve(seed=0)
    assert sampling.logit_bias == ((3, -2.5), (7, 1.0))


def test_stop_tokens_are_barred_only_where_a_minimum_was_asked_for():
    assert SamplingParams(min_tokens=3).resolve(0, barred=(256,)).barred_token_ids == (256,)
    assert SamplingParams().resolve(0, barred=(256,)).barred_token_ids == ()
    assert not SamplingParams(min_tokens=3).resolve(0).needs_history


def test_choosing_the_best_needs_log_probabilities_and_beams_draw_nothing():
    assert SamplingParams(best_of=3).resolve(0).logprobs == 0
    assert SamplingParams(best_of=3, logprobs=2).resolve(0).logprobs == 2
    assert SamplingParams(best_of=3, n=3).resolve(0).logprobs is None
    assert SamplingParams(beam_width=3).resolve(0).temperature == 0.0
