"""What is drawn without waiting for the device is what the CPU's sampler draws."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled.draw import keep
from compiled.gpu.sampler import DeviceSampler, Unseen, _nucleus, stage
from compiled.gpu.staging import Parcel
from compiled.sampler import sample
from compiled.sampling_batch import prepare
from compiled.step import Row, Sampling
from tests.compiled.test_sampler import a_step, rows_of

CPU = torch.device("cpu")
SAMPLER = DeviceSampler(CPU)


def on_device(
    logits: torch.Tensor,
    rows: Sequence[Row],
    positions: Sequence[int],
    masks: np.ndarray | None = None,
    bits: torch.Tensor | None = None,
    unseen: Sequence[Unseen] = (),
    before: Sequence[int] = (),
) -> tuple[list[int], int]:
    parcel = Parcel()
    groups = stage(prepare(rows, np.array(positions), masks), logits.shape[1], parcel, unseen)
    arrays = [torch.from_numpy(array.copy()) for array in parcel.arrays]
    *tokens, broken = SAMPLER.sample(logits, groups, arrays, bits, torch.tensor(before, dtype=torch.int64)).tolist()
    return tokens, broken


def on_cpu(logits: torch.Tensor, rows: Sequence[Row], positions: Sequence[int], **more: Any) -> tuple[list[int], int]:
    tokens, broken = sample(logits, prepare(rows, np.array(positions), more.get("masks")), more.get("grammar"))
    return tokens.tolist(), broken


@given(a_step())
def test_every_row_gives_the_same_token_as_on_the_cpu(step: tuple[torch.Tensor, list[Row], list[int]]) -> None:
    logits, rows, positions = step
    before = logits.clone()
    assert on_device(logits, rows, positions)[0] == on_cpu(logits, rows, positions)[0]
    assert torch.equal(logits, before), "the raw logits are still needed"


@dataclasses.dataclass
class Grammar:
    """Bits that are there at once."""

    allowed: torch.Tensor
    words: int

    def wait(self) -> memoryview:
        padded = torch.nn.functional.pad(self.allowed, (0, 32 * self.words - self.allowed.shape[1]))
        return memoryview(bytearray(np.packbits(padded.numpy(), axis=1, bitorder="little").tobytes()))


@given(a_step(), st.data())
def test_rows_with_a_grammar_keep_to_it(step: tuple[torch.Tensor, list[Row], list[int]], data: st.DataObject) -> None:
    logits, rows, positions = step
    vocabulary = logits.shape[1]
    owned = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    allowed = torch.rand(max(sum(owned), 1), vocabulary, generator=source) < 0.3
    allowed[:, data.draw(st.integers(0, vocabulary - 1))] = True
    masks = np.where(owned, np.cumsum(owned) - 1, -1)
    grammar = Grammar(allowed, -(-vocabulary // 32))
    bits = torch.frombuffer(grammar.wait(), dtype=torch.uint8).view(len(allowed), -1)
    got, _ = on_device(logits, rows, positions, masks, bits)
    assert got == on_cpu(logits, rows, positions, masks=masks, grammar=grammar)[0]
    assert all(mask < 0 or bool(allowed[mask, token]) for mask, token in zip(masks, got, strict=True))


@given(a_step(), st.data())
def test_a_last_token_in_flight_counts_as_if_it_were_known(
    step: tuple[torch.Tensor, list[Row], list[int]], data: st.DataObject
) -> None:
    """The last token of some rows is a placeholder, and comes with the tokens of the step before."""
    logits, rows, positions = step
    rows = [
        dataclasses.replace(row, history=(*row.history[:-1], row.history[-1] % logits.shape[1]),
                            prompt_length=min(row.prompt_length, len(row.history) - 1))
        for row in rows
    ]  # fmt: skip
    flying = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    before, cut, unseen = [7 % logits.shape[1]], [], []
    for i, row in enumerate(rows):
        if flying[i]:
            cut.append(dataclasses.replace(row, history=row.history[:-1], pending=True))
            unseen.append(Unseen(cut[i], positions[i], i, len(before)))
            before.append(row.history[-1])
        else:
            cut.append(row)
    got, _ = on_device(logits, cut, positions, unseen=unseen, before=before)
    # A penalty is summed in another order, which may swap two ids that are as good as equal.
    want, _ = on_cpu(logits, rows, positions)
    assert got == want


@pytest.mark.parametrize(
    ("options", "history", "token"),
    [
        ({"bad_words": ((3, 2, 1), (9, 2, 1))}, (7, 3, 2), 2),
        ({"bad_words": ((3, 2, 1), (9, 2, 1))}, (7, 3, 4), 1),
        ({"bad_words": ((3, 2, 1),)}, (7, 8, 2), 1),
        ({"bad_words": ((2, 1), (2, 2))}, (7, 8, 2), 3),
        ({"repetition_penalty": 1.5}, (1, 8, 1), 2),
        ({"repetition_penalty": 1.2}, (1, 8, 1), 1),
        ({"repetition_penalty": 1.5}, (7, 8, 1), 2),
        ({"presence_penalty": 0.8}, (7, 1, 1), 1),
        ({"presence_penalty": 0.8}, (1, 8, 1), 1),
        ({"presence_penalty": 1.2}, (1, 8, 1), 2),
        ({"frequency_penalty": 0.6}, (7, 1, 1), 2),
        ({"frequency_penalty": 0.6}, (1, 8, 1), 1),
    ],
    ids=str,
)
def test_what_a_token_in_flight_bars_and_penalises(
    options: dict[str, Any], history: tuple[int, ...], token: int
) -> None:
    """Of a prompt of one token; the highest logits are those of 1, 2 and 3, in this order."""
    logits = torch.tensor([[0.0, 4.0, 3.0, 2.0, *[0.0] * 6]])
    row = Row(0, (0,), 2, (), Sampling(**options), pending=True, history=history[:-1], prompt_length=1)
    got = on_device(logits, [row], [3], unseen=[Unseen(row, 3, 0, 1)], before=[5, history[-1]])
    known = dataclasses.replace(row, history=history)
    assert got[0] == on_cpu(logits, [known], [3])[0] == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_usable_logit_are_counted_and_hurt_nobody(temperature: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    whole = on_cpu(logits, rows := rows_of(*[Sampling(temperature=temperature, seed=i) for i in range(4)]), [3] * 4)[0]
    logits[1], logits[3] = torch.nan, -torch.inf
    logits[2, 5] = torch.nan
    assert on_device(logits, rows, [3] * 4) == on_cpu(logits, rows, [3] * 4)
    tokens, broken = on_device(logits, rows, [3] * 4)
    assert broken == 2
    assert tokens[0] == whole[0]


def test_a_large_vocabulary_gives_the_same_tokens() -> None:
    logits = torch.randn(40, 49_152, generator=torch.Generator().manual_seed(0)) * 2
    options: list[dict[str, Any]] = [
        {}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}, {"typical_p": 0.5}, {"top_p": 0.999, "top_k": 9000},
    ]  # fmt: skip
    rows = rows_of(*(Sampling(temperature=0.2 + i / 8, seed=i, **options[i % 6]) for i in range(40)))
    assert on_device(logits, rows, range(40))[0] == on_cpu(logits, rows, range(40))[0]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_top_p_alone_keeps_what_sorting_keeps(scale: float) -> None:
    """Flat and steep distributions, with equal masses and with masses of no consequence among them."""
    source = torch.Generator().manual_seed(int(scale * 100))
    logits = torch.randn(64, 5_000, generator=source) * scale
    logits[1::4] = logits[1::4].round()
    logits[2::4, ::3] = -torch.inf
    top_p = torch.linspace(1e-9, 1, 64, dtype=torch.float64)
    top_p[40:] = 1 - torch.logspace(-1, -9, 24, dtype=torch.float64)
    probs = logits.softmax(dim=-1)
    for whole in (True, False):
        whole_N = torch.full((64,), whole)
        mass = probs if whole else torch.where(probs >= probs.amax(dim=-1, keepdim=True) * 0.01, probs, 0)
        ordered, ids = mass.sort(dim=-1, descending=True, stable=True)
        kept = keep(ordered, torch.zeros(64), top_p, None, whole_N)
        expected = torch.zeros_like(mass).scatter_(1, ids, ordered * kept)
        assert torch.equal(mass * _nucleus(mass, top_p, whole_N), expected)
