"""When the core's vocabulary for grammars is built, and what an answer's grammar may cost it."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from streamengine.errors import UnsupportedFeature
from streamengine.guided import guide as guides
from streamengine.guided.grammar import Grammar
from streamengine.guided.guide import Guide, load_vocabulary
from streamengine.guided.matcher import Vocabulary
from tests.fakes import fake_model

WORD = Grammar(kind="regex", text="[ab]{40}")


class Shelf:
    """Where a vocabulary is loaded from."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.asked = 0
        self.done = threading.Event()
        self._vocabulary = vocabulary

    def load(self) -> Vocabulary:
        self.asked += 1
        self.done.set()
        if self._vocabulary is None:
            raise UnsupportedFeature("no tokenizer.json")
        return self._vocabulary


def test_a_core_that_rests_builds_its_vocabulary_once(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    monkeypatch.setattr(guides, "REST_S", 0.0)
    shelf = Shelf(vocabulary)
    guide = Guide(shelf.load)
    for _ in range(2):
        with guide.resting():
            assert shelf.done.wait(20)
    guide.compile(WORD)
    guide.close()
    assert shelf.asked == 1


def test_a_core_that_is_busy_builds_it_with_the_first_grammar(vocabulary: Vocabulary) -> None:
    shelf = Shelf(vocabulary)
    guide = Guide(shelf.load)
    with guide.resting():
        pass
    assert shelf.asked == 0
    guide.compile(WORD)
    guide.close()
    assert shelf.asked == 1


def test_a_model_without_a_tokenizer_is_told_to_who_asks_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "REST_S", 0.0)
    shelf = Shelf(None)
    guide = Guide(shelf.load)
    with guide.resting():
        assert shelf.done.wait(20)
    for _ in range(2):
        with pytest.raises(UnsupportedFeature):
            guide.compile(WORD)
    guide.close()
    assert shelf.asked == 1


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder()])
def test_a_vocabulary_that_the_grammar_engine_cannot_read_is_told_to_who_asks_for_a_grammar(
    decoder: Any, tmp_path: Path
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if decoder is not None:
        words.decoder = decoder
    words.save(str(tmp_path / "tokenizer.json"))
    model = replace(fake_model(), folder=str(tmp_path), vocab_size=2, eos_token_ids=(1,))
    guide = Guide(partial(load_vocabulary, model))
    with pytest.raises(UnsupportedFeature, match="this model's vocabulary") as refused:
        guide.compile(WORD)
    assert refused.value.param == "response_format"
    guide.close()


def test_an_answer_whose_tokens_take_too_long_together_fails_and_its_grammar_with_it(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    clock = iter(range(1000))
    matcher = vocabulary.compile(WORD)
    other = matcher.copy()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.03)
    taken = 0
    while not matcher.error:
        assert matcher.advance(ord("a")) or matcher.error
        taken += 1
    assert 2 < taken < 20  # 0.03 s each: more than 0.005 s, and together more than 0.25 s
    assert "more than 0.005 s each" in other.error
