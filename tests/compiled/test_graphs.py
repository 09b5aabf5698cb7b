"""Steps through graphs of the recording device: the bits are those of the program without graphs, whatever is padded,
captured early, late or not at all, and what would go wrong on a GPU raises."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled import build
from compiled.artifacts import Cache
from compiled.attention.base import AttentionSpec
from compiled.attention.cpu import CpuAttention
from compiled.attention.reference import ReferenceAttention
from compiled.device import Function
from compiled.gpu.buckets import Bucket, Buckets
from compiled.gpu.graphs import PATIENCE, Graphs, InputMoved
from compiled.gpu.recording import GraphError, RecordedGraph, Recording
from compiled.program import Program
from compiled.weights import cache_folder
from tests.compiled import stepping, tiny
from tests.compiled.stepping import step

BUCKETS = Buckets((2, 4, 8), (2, 4, 8, 16))
ALL = [Bucket(size, True) for size in BUCKETS.whole] + [Bucket(size, False) for size in BUCKETS.pieces]
STEPS = [
    step((0, 0, 5)),  # a chunk
    step((0, 5, 9), (1, 0, 3)),  # its rest beside another prompt
    step((0, 9, 10), (1, 3, 4)),  # both decode
    step((0, 10, 11), (1, 4, 5), (2, 0, 7)),  # a third one comes, in a mixed step
    step((0, 11, 12), (1, 5, 6), (2, 7, 8)),
    step((2, 8, 9)),  # it is alone
    *(step(*((row, 0, 3) for row in rows)) for rows in (range(3, 8), range(8, 12))),
    step(*((row, 3, 4) for row in range(3, 12))),  # more rows than any graph of the whole pass
    step((0, 12, 20), (1, 6, 15)),  # more tokens than any graph
    step((1, 15, 16)),
    step((0, 20, 21), (1, 16, 17), (2, 9, 10), (3, 4, 5), (4, 4, 5), (5, 4, 5)),
]


class Machine:
    """Graphs of the small model on a recording device. ``specs`` are its layers."""

    def __init__(self, specs: Sequence[AttentionSpec] = (stepping.SPEC,) * 3, device: Recording | None = None) -> None:
        self.weights: dict[str, Tensor] = {}
        self.specs = specs
        self.program = stepping.program(len(specs), self.weights)
        self.device = device or Recording()
        _, attention = stepping.attention_over(specs)
        self.graphs = Graphs(self.program, attention, self.device, BUCKETS, 32, stepping.ROW_PAGES)
        self.forward = stepping.through(self.graphs)

    def logits(self, *batch: Any) -> Tensor:
        return stepping.logits(self.forward, *batch)

    def plain(self, *batch: Any) -> Tensor:
        """What the program says on a cache of its own."""
        _, attention = stepping.attention_over(self.specs)
        return stepping.logits(stepping.plainly(self.program, attention), *batch)


@pytest.mark.parametrize(
    ("seqs", "tokens", "whole", "pieces"),
    [
        (64, 512, (1, 2, 4, 8, 16, 24, 40, 64), (1, 2, 4, 8, 16, 24, 40, 64, 96, 144, 216, 328, 496, 512)),
        (20, 40, (1, 2, 4, 8, 16, 20), (1, 2, 4, 8, 16, 24, 40)),
        (1, 1, (1,), (1,)),
        (2, 8192, (1, 2), (1, 2, 4, 8, 16, 24, 40, 64, 96, 144, 216, 328, 496, 744, 1024)),
    ],
)
def test_buckets_are_few_and_reach_the_largest_step_that_graphs_pay_for(
    seqs: int, tokens: int, whole: Sequence[int], pieces: Sequence[int]
) -> None:
    assert Buckets.of(seqs, tokens) == Buckets(tuple(whole), tuple(pieces))


def test_a_step_gets_the_smallest_bucket_that_holds_it() -> None:
    assert BUCKETS.fit(1, True) == BUCKETS.fit(2, True) == Bucket(2, True)
    assert BUCKETS.fit(5, False) == Bucket(8, False)
    assert BUCKETS.fit(9, True) is None
    assert BUCKETS.fit(16, False) == Bucket(16, False)


def test_padded_steps_of_every_kind_have_the_bits_of_the_program_without_graphs() -> None:
    machine = Machine()
    machine.graphs.warmup(ALL)
    assert torch.equal(machine.logits(*STEPS), machine.plain(*STEPS))
    told = machine.graphs.statistics()
    assert (told["graph_steps_whole"], told["graph_steps_pieces"], told["graph_steps_none"]) == (5, 6, 1)
    # Of the whole pass one each, of each pieces' bucket all but the last piece, which depends on the logit rows.
    assert told["graphs"] == 3 + 4 * 3
    assert told["graph_bytes"] == machine.device.pool_bytes() > 0


def test_layers_that_attend_differently_are_planned_apart_in_graphs_too() -> None:
    window = replace(stepping.SPEC, window=3)
    machine = Machine((stepping.SPEC, window, stepping.SPEC))
    machine.graphs.warmup(ALL)
    found = machine.logits(*STEPS)
    assert torch.equal(found, machine.plain(*STEPS))
    assert not torch.equal(found, Machine().plain(*STEPS))


def test_what_is_not_captured_runs_without_a_graph_until_the_device_has_time() -> None:
    machine = Machine()
    assert not machine.graphs.capture_next()
    first = machine.logits(*STEPS[:5])
    assert machine.graphs.statistics()["graph_steps_none"] == 5
    captured = 0
    while machine.graphs.capture_next():
        captured += 1
    told = machine.graphs.statistics()
    assert captured == told["graph_buckets"] == 4, "2 and 4 rows, 8 and 16 tokens: what was missed, and no more"
    assert torch.equal(torch.cat([first, machine.logits(*STEPS[5:])]), machine.plain(*STEPS))
    assert machine.graphs.statistics()["graph_steps_whole"] == 2


def test_what_is_missed_most_is_captured_first() -> None:
    machine = Machine()
    machine.logits(STEPS[0], STEPS[1], STEPS[2], STEPS[1])
    assert machine.graphs.capture_next()
    assert machine.graphs.place(7, 2, decoding=False).bucket == Bucket(8, False)
    assert machine.graphs.place(5, 1, decoding=False).bucket == Bucket(8, False)
    assert machine.graphs.place(2, 2, decoding=True).bucket is None


def test_a_size_that_a_busy_device_misses_for_long_is_captured_between_two_steps() -> None:
    machine = Machine()
    prompt, decoding = step((0, 0, 5)), [step((0, i, i + 1)) for i in range(5, 20)]
    got = [machine.logits(one) for one in (prompt, *(decoding[i % 15] for i in range(PATIENCE + 4)))]
    told = machine.graphs.statistics()
    assert told["graph_steps_none"] == PATIENCE + 1
    assert told["graph_steps_whole"] == 4
    assert torch.equal(torch.cat(got[:16]), machine.plain(prompt, *decoding))
    assert torch.equal(torch.cat(got[16:31]), torch.cat(got[1:16])), "the same tokens again, captured in between"


def test_decoding_rows_without_a_graph_of_their_own_take_one_of_pieces() -> None:
    machine = Machine()
    machine.graphs.warmup([Bucket(2, False)])
    assert torch.equal(machine.logits(*STEPS[:3]), machine.plain(*STEPS[:3]))
    assert machine.graphs.statistics()["graph_steps_pieces"] == 1


def test_the_first_buckets_are_the_largest_and_that_of_one_answer() -> None:
    machine = Machine()
    machine.graphs.warmup()
    found = [
        machine.graphs.place(tokens, tokens, decoding=whole).bucket
        for tokens, whole in ((1, True), (8, True), (16, False))
    ]
    assert found == [Bucket(2, True), Bucket(8, True), Bucket(16, False)]
    assert machine.graphs.statistics()["graph_buckets"] == 3


@pytest.mark.parametrize(("bucket", "name"), [(Bucket(8, False), "layers.0"), (Bucket(2, True), "the whole pass")])
def test_a_weight_that_moved_after_the_capture_is_found_at_the_first_replay(bucket: Bucket, name: str) -> None:
    machine = Machine()
    machine.graphs.warmup([bucket])
    registers = list(machine.program.registers)
    number = next(i for i, one in enumerate(registers) if one is machine.weights["qkv1"])
    registers[number] = registers[number].clone()
    machine.program.registers = tuple(registers)
    with pytest.raises(InputMoved, match=f"of the graph of {name} was .*0x"):
        machine.logits(STEPS[0] if bucket == Bucket(8, False) else step((0, 0, 1)))


def test_a_weight_that_grew_after_the_capture_is_found_at_any_replay() -> None:
    machine = Machine()
    machine.graphs.warmup([Bucket(8, False)])
    machine.logits(STEPS[0])
    machine.weights["qkv1"].resize_(100, 100)
    with pytest.raises(GraphError, match="moved or resized"):
        machine.logits(STEPS[0])


def test_logits_are_there_until_the_next_step_only() -> None:
    machine = Machine()
    machine.graphs.warmup(ALL)
    with torch.inference_mode():
        machine.logits(STEPS[0], STEPS[1])
        seen = machine.forward(STEPS[2])
        kept = seen.clone()
        assert not kept.isnan().any()
        machine.forward(STEPS[3])
        assert not torch.equal(seen, kept)


def test_a_bucket_needs_the_memory_of_one_pass_whatever_the_layers_and_smaller_ones_need_none() -> None:
    bytes_of = {}
    for layers in (3, 9):
        machine = Machine((stepping.SPEC,) * layers)
        machine.graphs.warmup([Bucket(16, False)])
        bytes_of[layers] = machine.device.pool_bytes()
    assert bytes_of[3] == bytes_of[9]
    largest = bytes_of[9]
    machine.graphs.warmup(ALL)
    logits = -(-8 * stepping.VOCABULARY * 4 // 64) * 64
    assert machine.device.pool_bytes() == largest + logits, "those of 8 rows, which graphs of pieces do not have"


def test_memory_that_was_free_at_a_capture_is_overwritten_by_its_replays_in_a_step_too() -> None:
    """The order of captures decides what overlies what, so the same replays in another order give wrong numbers."""
    machine = Machine()
    machine.graphs.warmup([Bucket(8, False)])
    pieces = machine.graphs._pieces[8]
    pieces.captured[0], pieces.captured[2] = pieces.captured[2], pieces.captured[0]
    pieces.checked = True
    assert not torch.equal(machine.logits(STEPS[0]), machine.plain(STEPS[0]))


class Full(Recording):
    """Has memory for so many captures."""

    def __init__(self, captures: int) -> None:
        super().__init__()
        self.left = captures

    def capture(self, function: Function, arguments: list[Any]) -> tuple[RecordedGraph, tuple[Any, ...]]:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it.")
        return super().capture(function, arguments)


def test_sizes_for_which_there_is_no_memory_run_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(device=Full(4))
    machine.graphs.warmup(ALL)
    assert [record.message for record in caplog.records] == [
        f"there is no memory for {what}: CUDA out of memory."
        for what in (
            "graphs of pieces for 8 tokens",
            "a graph of the whole pass for 4 tokens",
            "graphs of pieces for 4 tokens",
            "a graph of the whole pass for 2 tokens",
            "graphs of pieces for 2 tokens",
        )
    ]
    assert torch.equal(machine.logits(*STEPS), machine.plain(*STEPS))
    assert machine.graphs.statistics()["graph_buckets"] == 2
    assert not machine.graphs.capture_next(), "what was refused is not tried again"


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    class Watching(Recording):
        def capture(self, function: Function, arguments: list[Any]) -> tuple[RecordedGraph, tuple[Any, ...]]:
            assert not gc.isenabled()
            return super().capture(function, arguments)

    machine = Machine(device=Watching())
    machine.graphs.warmup()
    assert gc.isenabled()


def test_a_step_that_is_larger_than_was_said_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 40 tokens and 40 logit rows is larger"):
        Machine().graphs.place(40, 40, decoding=False)


@pytest.fixture(scope="module")
def compiled_model(tmp_path_factory: pytest.TempPathFactory) -> build.Built:
    folder = tiny.make(tmp_path_factory.mktemp("model"), "llama")
    cache = Cache(cache_folder() / "compiled", 1)
    cpu = torch.device("cpu")
    built = build.build_compiled(folder, "tiny", torch.float32, None, lambda *_: None, cache, build.FAST, cpu)
    if built.fresh is not None:
        build.keep(cache, "tiny", built.fresh, None)
    return built


@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention])
def test_a_compiled_model_has_the_same_bits_through_graphs(backend: Any, compiled_model: build.Built) -> None:
    program = compiled_model.run
    assert isinstance(program, Program)
    made = []
    for way in ("plain", "graphs"):
        _, attention = stepping.attention_over(compiled_model.layers, backend)
        if way == "plain":
            forward = stepping.plainly(program, attention)
        else:
            graphs = Graphs(program, attention, Recording(), BUCKETS, 32, stepping.ROW_PAGES)
            graphs.warmup(ALL)
            forward = stepping.through(graphs)
        made.append(stepping.logits(forward, *STEPS))
    assert torch.equal(*made)
