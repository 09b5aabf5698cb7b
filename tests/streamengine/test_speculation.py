from streamengine.speculation import Lookup, accepted


def test_what_followed_the_same_tokens_before_is_guessed():
    assert Lookup().draft(list(b"the cat sat. the c"), 3) == tuple(b"at ")


def test_the_longest_match_wins_then_the_latest():
    assert Lookup().draft(list(b"abcX bcY abc"), 1) == tuple(b"X")
    assert Lookup().draft(list(b"abX abY ab"), 1) == tuple(b"Y")


def test_a_loop_is_guessed_to_go_on():
    assert Lookup().draft(list(b"xyzxyz"), 7) == tuple(b"xyzxyzx")


def test_nothing_is_guessed_where_nothing_is_repeated():
    assert Lookup().draft(list(b"abcdef"), 4) == ()
    assert Lookup().draft([1], 4) == ()
    assert Lookup().draft(list(b"abcabc"), 0) == ()


def test_tokens_that_are_appended_are_looked_up_too():
    lookup, tokens = Lookup(), list(b"abcd")
    assert lookup.draft(tokens, 2) == ()
    tokens += b"ab"
    assert lookup.draft(tokens, 2) == tuple(b"cd")


def test_guesses_count_up_to_the_first_wrong_one():
    assert accepted((1, 2, 3), (1, 2, 3, 4)) == 3
    assert accepted((1, 2, 3), (1, 9, 3, 4)) == 1
    assert accepted((1,), (5, 6)) == 0
