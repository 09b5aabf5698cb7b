"""Text comes out of ids whole, exact and in time, wherever the answer is cut into pushes."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from random import Random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from streamengine.text import Detokenizer

FFFD = "\ufffd"

Decode = Callable[[Sequence[int]], str]


def byte_level() -> Decode:
    """Ids 0..255 are bytes; from there on tokens of several bytes that begin and end inside characters."""
    alphabet = _gpt2_alphabet()
    pieces = [bytes([b]) for b in range(256)]
    pieces += [b"\x82\xe2", b"a\xf0\x9f", b"\x98\x80b", b" the", b"\xe2\x82", b"\xff\xfe", b"\n\n", "€€".encode()]
    vocab = {"".join(alphabet[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


BYTE_LEVEL_IDS = 256 + 8 + 1
EOS = 256 + 8


def _gpt2_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: visible ones for themselves."""
    hidden = iter(range(256, 512))
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def sentence_piece() -> tuple[Decode, dict[str, int]]:
    """Pieces with U+2581 for a space, and a token for each byte, decoded as Llama's first tokenizers do."""
    pieces = ["▁Hello", "▁world", "▁", "lo", ",", "▁a"] + [f"<0x{b:02X}>" for b in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), tokenizer.get_vocab()


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def run(detokenizer: Detokenizer, chunks: Iterable[Sequence[int]], end: int | None = None) -> list[tuple[int, str]]:
    entries: list[tuple[int, str]] = []
    for chunk in chunks:
        entries += detokenizer.push(chunk)
    return entries + detokenizer.finish(end)


def joined(entries: list[tuple[int, str]]) -> str:
    return "".join(text for _, text in entries)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, character by character: the stop that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


ids_of_any_kind = st.lists(st.integers(0, BYTE_LEVEL_IDS - 1), max_size=60)
euro_bytes = st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0x20, 256, 257, 260, 263]), max_size=60)


@given(st.one_of(ids_of_any_kind, euro_bytes), st.lists(st.integers(0, 60)))
def test_the_joined_stream_equals_the_one_shot_decode_for_any_ids_and_chunks(ids: list[int], cuts: list[int]) -> None:
    decode = byte_level()
    entries = run(Detokenizer(decode), split(ids, cuts))
    assert joined(entries) == decode(ids)
    assert [token for token, _ in entries] == ids


@given(st.one_of(ids_of_any_kind, euro_bytes), st.one_of(ids_of_any_kind, euro_bytes))
def test_a_prompt_of_any_ids_adds_nothing_to_the_answer(prompt: list[int], ids: list[int]) -> None:
    decode = byte_level()
    assert joined(run(Detokenizer(decode, prompt), [ids])) == decode(ids)


@given(
    st.lists(st.sampled_from([97, 98, 99, 0xE2, 0x82, 0xAC, 257, 259]), max_size=40),
    st.lists(st.text("abc €", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 40)),
)
def test_the_text_ends_before_the_first_completed_stop(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    decode = byte_level()
    detokenizer = Detokenizer(decode, stop=tuple(stops))
    entries = run(detokenizer, split(ids, cuts))
    text, stop = cut_at_stop(decode(ids), stops)
    assert (joined(entries), detokenizer.stop_sequence) == (text, stop)
    given_ids = [token for token, _ in entries]
    assert given_ids == ids[: len(given_ids)]
    if stop is None:
        assert given_ids == ids
    else:
        # The last one given completed the stop: without it there was none.
        assert cut_at_stop(decode(given_ids[:-1]).rstrip(FFFD), stops)[1] is None


@given(st.one_of(ids_of_any_kind, euro_bytes), st.lists(st.text("ab €", min_size=1, max_size=4), max_size=3))
def test_every_chunking_gives_the_same_entries(ids: list[int], stops: list[str]) -> None:
    decode = byte_level()
    one_by_one = run(Detokenizer(decode, stop=stops), [[token] for token in ids])
    assert run(Detokenizer(decode, stop=stops), [ids]) == one_by_one


@given(st.lists(st.sampled_from(range(6 + 256 + 1)), max_size=40))
def test_byte_tokens_in_any_order_are_survived_and_bounded(ids: list[int]) -> None:
    decode, _ = sentence_piece()
    entries = run(Detokenizer(decode), [[token] for token in ids])
    assert [token for token, _ in entries] == ids
    assert len(joined(entries)) <= 7 * len(ids)


@given(st.text("aé€😀 ,", max_size=20), st.lists(st.integers(0, 80)))
def test_byte_tokens_of_real_text_come_out_exactly(text: str, cuts: list[int]) -> None:
    decode, vocab = sentence_piece()
    prompt = [vocab["▁Hello"]]
    ids = [vocab[f"<0x{b:02X}>"] for b in text.encode()]
    assert joined(run(Detokenizer(decode, prompt), split(ids, cuts))) == text


def test_ten_thousand_random_answers_stream_to_their_one_shot_decode_with_every_chunking() -> None:
    decode, random = byte_level(), Random(0)
    pools: list[Sequence[int]] = [range(BYTE_LEVEL_IDS), [0xE2, 0x82, 0xAC, 32, 256, 257, 260, 263]]
    for number in range(10_000):
        ids = random.choices(pools[number % 2], k=random.randrange(25))
        whole = decode(ids)
        # Every chunking of a few ids; of many the two extremes and one between.
        cuts = range(2 ** (len(ids) - 1)) if 0 < len(ids) <= 5 else (0, -1, random.getrandbits(24))
        for mask in cuts:
            chunks = split(ids, [i for i in range(1, len(ids)) if mask >> (i - 1) & 1])
            assert joined(run(Detokenizer(decode), chunks)) == whole, (ids, chunks)


@given(
    st.lists(st.sampled_from(bytes_of("aab€")), max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_stop_counts_from_the_token_min_tokens_on(
    ids: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    decode = byte_level()
    detokenizer = Detokenizer(decode, stop=stops, min_tokens=min_tokens, include_stop=include)
    entries = run(detokenizer, [ids])
    # The rule, token by token: the first completed stop among those that enough tokens are there for.
    for count in range(len(ids) + 1):
        before, text = decode(ids[: count - 1] if count else []), decode(ids[:count])
        before, text = (before.rstrip(FFFD), text.rstrip(FFFD)) if count < len(ids) else (before.rstrip(FFFD), text)
        ends = range(len(before) + 1, len(text) + 1) if count >= max(min_tokens, 1) else range(0)
        hits = [(end, -len(stop)) for end in ends for stop in stops if text[:end].endswith(stop)]
        if hits:
            end, size = min(hits)
            assert joined(entries) == text[: end if include else end + size]
            assert len(entries) == count
            return
    assert (joined(entries), detokenizer.stop_sequence) == (decode(ids), None)


def test_a_stop_before_min_tokens_is_text_and_one_that_began_before_and_ends_after_is_a_stop() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("ab",), min_tokens=4)
    assert joined(detokenizer.push(bytes_of("abxabyy"))) == "abx"
    assert detokenizer.stop_sequence == "ab"
    straddling = Detokenizer(byte_level(), stop=("abc",), min_tokens=3)
    assert joined(straddling.push(bytes_of("abc"))) == ""
    overlapping = Detokenizer(byte_level(), stop=("aa",), min_tokens=3)
    assert joined(overlapping.push(bytes_of("aaa"))) == "a"


def test_the_stop_itself_is_part_of_the_text_where_that_is_asked_for() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("<end>",), include_stop=True)
    assert joined(detokenizer.push(bytes_of("a<end>b"))) == "a<end>"
    assert detokenizer.stop_sequence == "<end>"


def test_a_character_split_over_tokens_is_shown_only_whole() -> None:
    detokenizer = Detokenizer(byte_level())
    shown = [joined(detokenizer.push([byte])) for byte in bytes_of("a😀b")]
    assert shown == ["a", "", "", "", "😀", "b"]


def test_a_character_that_never_ends_is_one_replacement_character_at_the_end() -> None:
    detokenizer = Detokenizer(byte_level())
    assert joined(detokenizer.push(bytes_of("a😀")[:-1])) == "a"
    assert joined(detokenizer.finish()) == FFFD


def test_the_first_token_keeps_the_space_that_parts_it_from_the_prompt() -> None:
    decode, vocab = sentence_piece()
    prompt = [vocab["<s>"], vocab["▁Hello"]]
    assert joined(run(Detokenizer(decode, prompt), [[vocab["▁world"]]])) == " world"
    assert joined(run(Detokenizer(decode, [vocab["<s>"]]), [[vocab["▁world"]]])) == "world"


def test_a_special_token_in_the_answer_does_not_cost_the_next_one_its_space() -> None:
    decode, vocab = sentence_piece()
    ids = [vocab["▁Hello"], *[vocab["<s>"]] * 40, vocab["▁world"]]
    assert joined(run(Detokenizer(decode), [ids])) == "Hello world"


def test_a_prompt_that_ends_inside_a_character_does_not_spill_into_the_answer() -> None:
    euro = bytes_of("€")
    detokenizer = Detokenizer(byte_level(), bytes_of("price ") + euro[:2])
    assert joined(run(detokenizer, [[euro[2]], bytes_of(" ok")])) == FFFD + " ok"
    assert joined(run(Detokenizer(byte_level(), euro[:2]), [bytes_of("ok")])) == "ok"


def test_a_character_shown_stays_when_the_decoder_changes_its_mind_about_the_run() -> None:
    decode, vocab = sentence_piece()
    euro = [vocab[f"<0x{b:02X}>"] for b in "€".encode()]
    ids = [*euro, vocab["<0xFF>"], vocab["▁a"]]
    assert decode(ids) == FFFD * 4 + " a"
    assert joined(run(Detokenizer(decode), [ids])) == "€" + FFFD + " a"


def test_a_stop_string_split_over_tokens_is_never_shown() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("abcd",))
    shown = [joined(detokenizer.push([byte])) for byte in b"xababcde"]
    assert shown == ["x", "", "", "", "ab", "", "", ""]
    assert detokenizer.stop_sequence == "abcd"
    assert detokenizer.finish() == []


def test_a_stop_string_in_the_middle_of_a_token_is_found() -> None:
    decode = byte_level()
    detokenizer = Detokenizer(decode, stop=("h",))
    assert detokenizer.push([97, 259, 98]) == [(97, "a"), (259, " t")]
    assert detokenizer.stop_sequence == "h"
    assert detokenizer.push([99]) == []


def test_the_stop_that_the_text_reaches_first_wins_not_the_first_of_the_list() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("zz", "b", "ab"))
    assert joined(detokenizer.push(bytes_of("xxabzz"))) == "xx"
    assert detokenizer.stop_sequence == "ab"


def test_a_prefix_of_a_stop_that_does_not_come_is_given_back() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("<end>",))
    assert joined(detokenizer.push(bytes_of("a<en"))) == "a"
    assert joined(detokenizer.push(bytes_of("joy"))) == "<enjoy"
    assert joined(detokenizer.push(bytes_of("<e"))) == ""
    assert joined(detokenizer.finish()) == "<e"


def test_held_text_rides_on_a_token_at_every_kind_of_end() -> None:
    for end in (None, EOS):
        detokenizer = Detokenizer(byte_level(), stop=("<end>",))
        entries = detokenizer.push(bytes_of("a<e")) + detokenizer.finish(end)
        assert joined(entries) == "a<e"
        assert [token for token, _ in entries] == bytes_of("a<e") + ([] if end is None else [EOS])


def test_the_token_that_ended_the_answer_has_no_text() -> None:
    detokenizer = Detokenizer(byte_level())
    assert detokenizer.push([97]) + detokenizer.finish(end_token=98) == [(97, "a"), (98, "")]


def test_held_tokens_come_together_with_their_text_so_that_no_delta_is_empty() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("abcd",))
    assert [detokenizer.push([byte]) for byte in b"abcx"] == [
        [],
        [],
        [],
        [(97, ""), (98, ""), (99, ""), (120, "abcx")],
    ]


@pytest.mark.parametrize("ids", [[0xFF], [0x82], [256], [EOS], [10_000_000], [0xF0, 0x9F, 0x98], list(b"abcdefgh")])
def test_a_long_answer_costs_as_much_per_token_as_a_short_one(ids: list[int]) -> None:
    decoded = 0
    decode = byte_level()

    def counting(window: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(window)
        return decode(window)

    detokenizer = Detokenizer(counting, stop=("stop here", "never"))
    long = ids * (20_000 // len(ids))
    entries = run(detokenizer, [[token] for token in long])
    assert joined(entries) == decode(long)
    assert decoded <= 40 * len(long)


def test_sixteen_long_stops_that_almost_match_do_not_make_it_slow() -> None:
    stops = ["a" * (1000 - i) + "b" for i in range(16)]
    detokenizer = Detokenizer(byte_level(), stop=stops)
    begin = time.process_time()
    entries = run(detokenizer, [bytes_of("a" * 20_000)])
    assert joined(entries) == "a" * 20_000
    assert time.process_time() - begin < 5
