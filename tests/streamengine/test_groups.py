from streamengine.groups import BeamSearch, Branch, seed_of
from streamengine.request import Request
from tests.fakes import GREEDY

STOP = 9


def search(width: int = 1, length_penalty: float = 1.0, max_tokens: int = 10) -> BeamSearch:
    return BeamSearch(
        Request(
            id=1,
            prompt=(0,),
            max_tokens=max_tokens,
            sampling=GREEDY,
            stop_token_ids=(STOP,),
            beam_width=width,
            length_penalty=length_penalty,
        )
    )


def test_the_likeliest_beginnings_go_on_whichever_beam_they_belong_to():
    beams = [((1,), -1.0, [(3, -0.5), (4, -0.75)]), ((2,), -2.0, [(5, -0.25), (6, -3.0)])]
    assert search(width=2).advance(beams) == [Branch(0, 3, -1.5), Branch(0, 4, -1.75)]


def test_a_stop_token_gives_its_place_to_the_next_one():
    beams = [((), 0.0, [(STOP, -0.5), (1, -0.75), (2, -1.0), (3, -4.0)])]
    tested = search(width=2)
    assert [branch.token for branch in tested.advance(beams)] == [1, 2]
    assert [(answer.tokens, answer.score) for answer in tested.finished] == [((STOP,), -0.5)]


def test_a_stop_token_behind_the_best_is_no_answer():
    tested = search(width=1)
    assert [branch.token for branch in tested.advance([((), 0.0, [(1, -0.5), (STOP, -0.75)])])] == [1]
    assert tested.finished == []


def test_a_search_goes_on_while_length_could_make_up_for_a_total():
    """Two tokens are worth -0.5 / 4; ten could still be worth -2 / 100."""
    beams = [((1,), -0.25, [(STOP, -0.25), (2, -1.75)])]
    assert search(length_penalty=2.0).advance(beams) == [Branch(0, 2, -2.0)]
    assert search(length_penalty=2.0, max_tokens=3).advance(beams) == []
    assert search(length_penalty=0.0).advance(beams) == []


def test_seeds_are_64_bit_integers_that_wrap():
    assert [seed_of(2**63 - 1, index) for index in (0, 1, 2)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert seed_of(-5, 3) == -2
