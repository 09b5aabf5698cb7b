"""A model whose letters are drawn at random, with a liking for those that close something; and what runs on it."""

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from compiled.step import Sampling
from tests.fakes import FakeRunner, byte_tokenizer_json, fake_kv, fake_model

CLOSERS = b'"]},'


def drawn(context: Sequence[int], sampling: Sampling) -> int:
    number = crc32(",".join(map(str, context)).encode(), sampling.seed & 0xFFFFFFFF)
    return CLOSERS[number // 256 % len(CLOSERS)] if number % 2 else number // 256 % 128


def runner_in(folder: Path, most: int = 2048) -> FakeRunner:
    """It has the vocabulary of bytes as ``tokenizer.json``, which a grammar needs."""
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return FakeRunner(kv=fake_kv(pages=2049, page_size=16), model=fake_model(most, str(folder)), answer=drawn)
