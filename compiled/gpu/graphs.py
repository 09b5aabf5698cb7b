"""Steps as graphs that are replayed: what a GPU's host saves by not launching each kernel itself.

```
one token a row, rows ≤ largest bucket    one graph of the whole pass (`ModelAttention.fixed`)
tokens ≤ largest bucket                   a graph of each piece, attention launched between them
else, or not captured yet                 compiled pieces, no graph
```

Steps are padded to the next bucket. Memory: all graphs share the device's pool. The pieces of a bucket are captured in
the program's order, each register held until its last use, and replayed in that order only; so a register's memory may
be that of another which is dead by then, in all layers, and a bucket needs no more than one pass of the program.
Nothing is held from one bucket's capture to the next one's: they overlie each other, because one step at a time runs.
What is read between two replays, a step's logits too, is read before the next one in the device's order.

What depends on the number of logit rows (the last piece, with the head) runs without a graph where rows have several
tokens: it would need one for each pair of sizes.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled.attention.layers import ModelAttention
from compiled.attention.tables import Tables, pad
from compiled.device import Device, Graph
from compiled.gpu.buckets import Bucket, Buckets
from compiled.program import SMALLEST, Entry, Program
from compiled.recipe import Run
from compiled.step import PADDING_PAGE

log = logging.getLogger(__name__)

PATIENCE = 32
"""Steps that run without a graph before it is captured between two steps; a device with time to spare asks earlier."""


class InputMoved(RuntimeError):
    """A graph would be replayed on other memory than its inputs are in."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the inputs of the next step go, on the device: ``ids_T`` and ``positions_T``, zero in the padding, and
    ``rows_R``, which follow each other in ``inputs`` [2T + R], all int64."""

    bucket: Bucket | None
    inputs: Tensor
    ids_T: Tensor
    positions_T: Tensor
    rows_R: Tensor


@dataclass(slots=True)
class _Captured:
    """A graph, and what it was captured with (see `_look`)."""

    graph: Graph
    inputs: tuple[Any, ...]


@dataclass(slots=True)
class _Whole:
    """``logits_RV`` lie in the pool."""

    place: Place
    attention: ModelAttention
    captured: _Captured
    logits_RV: Tensor
    checked: bool = False


@dataclass(slots=True)
class _Pieces:
    """Graphs by the number of their entry. ``made`` are registers in the pool, and attention's results."""

    captured: dict[int, _Captured] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    checked: bool = False


class Graphs:
    """Runs a program's steps, through graphs where they are captured. Not thread-safe; in `torch.inference_mode`.

    Args:
        attention: planned here, before each step.
        max_num_batched_tokens: of any step.
        row_pages: of the longest row.

    ``buckets`` may be replaced: sizes that are no longer among them are not used.
    """

    def __init__(
        self,
        program: Program,
        attention: ModelAttention,
        device: Device,
        buckets: Buckets,
        max_num_batched_tokens: int,
        row_pages: int,
    ) -> None:
        self.forward = program
        self.attention = attention
        self._device = device
        self.buckets = buckets
        self._row_pages = row_pages
        most = max(max_num_batched_tokens, buckets.pieces[-1], buckets.whole[-1])
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device.torch)
        self._outs: dict[tuple[Any, ...], list[Tensor]] = {}
        self._whole: dict[int, _Whole] = {}
        self._pieces: dict[int, _Pieces] = {}
        self._missed: Counter[Bucket] = Counter()
        self._refused: set[Bucket] = set()
        self._seconds = 0.0
        self._steps = {"whole": 0, "pieces": 0, "none": 0}
        self._bare = _reached(program)

    def move(self, attention: ModelAttention, row_pages: int) -> None:
        """Use another KV cache from now on. Graphs of pieces stay, having no attention in them; those of whole passes
        have the old cache's addresses and go."""
        self.attention, self._row_pages = attention, row_pages
        self._whole.clear()
        self._missed.clear()
        self._steps = dict.fromkeys(self._steps, 0)

    def warmup(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Capture ``buckets`` (None: the few to start with), largest first."""
        for bucket in sorted(set(self.buckets.first() if buckets is None else buckets), reverse=True):
            self._capture(bucket)

    def capture_next(self) -> bool:
        """Capture what the most steps have missed, now that the device has nothing to do; False: nothing is missed."""
        if not self._missed:
            return False
        ((bucket, _),) = self._missed.most_common(1)
        self._capture(bucket)
        return True

    def place(self, tokens: int, rows: int, *, decoding: bool) -> Place:
        """Where to put the inputs of a step of so many tokens and logit rows; the last step's are no longer there.
        ``decoding``: each row has one token, and its logits are wanted, in order."""
        bucket = self.buckets.fit(tokens, decoding)
        if bucket is not None and not self._has(bucket):
            self._miss(bucket)
        if decoding and (bucket is None or not self._has(bucket)):
            bucket = self.buckets.fit(tokens, False)
        if bucket is None or not self._has(bucket):
            return self._at(None, max(tokens, SMALLEST), max(rows, SMALLEST))
        return (
            self._whole[bucket.tokens].place if bucket.whole else self._at(bucket, bucket.tokens, max(rows, SMALLEST))
        )

    def run(self, place: Place, tables: Tables) -> Tensor:
        """Logits ``[R, V]`` of the inputs that are at ``place``, there until the next step. ``tables`` cover the real
        tokens; see `Attention.plan`."""
        bucket = place.bucket
        if bucket is None:
            self._steps["none"] += 1
            self.attention.plan(*tables)
            return self.forward(place.ids_T, place.positions_T, place.rows_R, self.attention)
        if bucket.whole:
            self._steps["whole"] += 1
            return self._replay_whole(self._whole[bucket.tokens], tables)
        self._steps["pieces"] += 1
        self.attention.plan(*tables)
        return self._replay_pieces(self._pieces[bucket.tokens], place)

    def statistics(self) -> dict[str, float]:
        """For the ledger: how many graphs there are, what they cost, and how many steps ran through them."""
        return {
            "graphs": len(self._whole) + sum(len(pieces.captured) for pieces in self._pieces.values()),
            "graph_buckets": len(self._whole) + len(self._pieces),
            "graph_bytes": self._device.pool_bytes(),
            "graph_seconds": self._seconds,
            "graph_buckets_missed": len(self._missed),
            **{f"graph_steps_{way}": steps for way, steps in self._steps.items()},
        }

    def _has(self, bucket: Bucket) -> bool:
        return bucket.tokens in (self._whole if bucket.whole else self._pieces)

    def _miss(self, bucket: Bucket) -> None:
        if bucket in self._refused:
            return
        self._missed[bucket] += 1
        if self._missed[bucket] > PATIENCE:
            self._capture(bucket)

    def _at(self, bucket: Bucket | None, tokens: int, rows: int) -> Place:
        inputs = self._inputs[: 2 * tokens + rows]
        if len(inputs) < 2 * tokens + rows:
            raise ValueError(f"a step of {tokens} tokens and {rows} logit rows is larger than was said")
        return Place(bucket, inputs, *inputs.split([tokens, tokens, rows]))

    def _replay_whole(self, whole: _Whole, tables: Tables) -> Tensor:
        whole.attention.plan(*pad(tables, len(whole.place.ids_T)))
        if not whole.checked:
            _compare("the whole pass", whole.captured, self._all_inputs(whole.place))
            whole.checked = True
        whole.captured.graph.replay()
        return whole.logits_RV

    def _replay_pieces(self, pieces: _Pieces, place: Place) -> Tensor:
        registers = self.forward.begin(place.ids_T, place.positions_T, place.rows_R)
        for register, value in pieces.made.items():
            registers[register] = value
        for number, entry in enumerate(self.forward.entries):
            captured = pieces.captured.get(number)
            if captured is not None and pieces.checked:
                captured.graph.replay()
                continue
            arguments = [registers[i] for i in entry.arguments]
            if captured is not None:
                assert isinstance(entry.call, Run)
                _compare(entry.call.name, captured, arguments)
                captured.graph.replay()
            elif entry.function is None:
                query, key, value, *sinks = arguments
                (register,) = entry.results
                sink = sinks[0] if sinks else None
                registers[register] = self.attention.attend(query, key, value, entry.layer, sink, registers[register])
            else:
                for register, value in zip(entry.results, entry.function(arguments), strict=True):
                    registers[register] = value
        pieces.checked = True
        return registers[self.forward.output]

    def _capture(self, bucket: Bucket) -> None:
        self._missed.pop(bucket, None)
        if self._has(bucket) or bucket in self._refused:
            return
        started = time.perf_counter()
        try:
            with torch.inference_mode(), _no_collection():
                place = self._at(bucket, bucket.tokens, bucket.tokens if bucket.whole else SMALLEST)
                place.inputs.zero_()
                if bucket.whole:
                    self._whole[bucket.tokens] = self._capture_whole(place)
                else:
                    self._pieces[bucket.tokens] = self._capture_pieces(place)
        except torch.OutOfMemoryError as error:
            self._refused.add(bucket)
            log.warning("there is no memory for %s: %s", bucket, str(error).partition("\n")[0])
        self._seconds += time.perf_counter() - started

    def _capture_whole(self, place: Place) -> _Whole:
        rows = len(place.ids_T)
        attention = self.attention.fixed(rows, self._row_pages)

        def run(arguments: list[Any]) -> tuple[Tensor]:
            ids_T, positions_T, rows_R = arguments
            return (self.forward(ids_T, positions_T, rows_R, attention),)

        inputs = tuple(map(_look, self._all_inputs(place)))
        attention.plan(*_idle(rows))
        with attention.capturing():
            run([place.ids_T, place.positions_T, place.rows_R])  # once for real: kernels are loaded, and tuned
            graph, (logits_RV,) = self._device.capture(run, [place.ids_T, place.positions_T, place.rows_R])
        return _Whole(place, attention, _Captured(graph, inputs), self._device.alias(logits_RV))

    def _capture_pieces(self, place: Place) -> _Pieces:
        self.attention.plan(*_idle(len(place.ids_T)))
        self.forward(place.ids_T, place.positions_T, place.rows_R, self.attention)  # once for real, as above
        pieces, held = _Pieces(), self._all_inputs(place)
        for number, entry in enumerate(self.forward.entries):
            arguments = [held[register] for register in entry.arguments]
            for register in entry.dead:
                held[register] = None
            if number in self._bare:
                continue
            if entry.function is None:
                (register,) = entry.results
                held[register] = pieces.made[register] = self._out(arguments, held)
            else:
                pieces.captured[number] = self._capture_piece(entry, arguments, held, pieces.made)
        return pieces

    def _capture_piece(self, entry: Entry, arguments: list[Any], held: list[Any], made: dict[int, Any]) -> _Captured:
        """Its results are ``held``, and ``made`` without being held."""
        assert entry.function is not None
        inputs = tuple(map(_look, arguments))
        graph, results = self._device.capture(entry.function, arguments)
        for register, value in zip(entry.results, results, strict=True):
            held[register] = value
            made[register] = self._device.alias(value) if isinstance(value, Tensor) else value
        return _Captured(graph, inputs)

    def _out(self, arguments: Sequence[Any], held: Sequence[Any]) -> Tensor:
        """Memory for an attention's result in which no other register lies: the same one for all layers and buckets,
        unless a result is read after the next attention."""
        query, _, value, *_ = arguments
        shape = self.buckets.pieces[-1], query.shape[1], value.shape[2]
        taken = {_memory(one) for one in (*arguments, *held) if isinstance(one, Tensor)}
        outs = self._outs.setdefault((shape, query.dtype), [])
        out = next((out for out in outs if _memory(out) not in taken), None)
        if out is None:
            out = torch.zeros(shape, dtype=query.dtype, device=self._device.torch)
            outs.append(out)
        return out[: len(query)]

    def _all_inputs(self, place: Place) -> list[Any]:
        return self.forward.begin(place.ids_T, place.positions_T, place.rows_R)


def _reached(program: Program) -> set[int]:
    """The entries whose results depend on the logit rows."""
    registers = {register for register, name in program.fed if name in ("rows", "R")}
    reached = set()
    for number, entry in enumerate(program.entries):
        if not registers.isdisjoint(entry.arguments):
            reached.add(number)
            registers.update(entry.results)
    return reached


def _idle(rows: int) -> Tables:
    """Rows of one token and one position on the padding page."""
    counts = torch.arange(rows + 1, dtype=torch.int32)
    return counts, counts, torch.full((rows,), PADDING_PAGE, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)


def _look(value: Any) -> Any:
    """What a graph has baked in: of a tensor where and how it lies, of anything else the value."""
    if not isinstance(value, Tensor):
        return value
    return hex(value.data_ptr()), value.dtype, tuple(value.shape), value.stride()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compare(name: str, captured: _Captured, arguments: Sequence[Any]) -> None:
    """Raises InputMoved where a replay would read or write something else than the arguments."""
    for number, (then, now) in enumerate(zip(captured.inputs, map(_look, arguments), strict=True)):
        if then != now:
            raise InputMoved(f"input {number} of the graph of {name} was {then} when it was captured and is {now}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection in the middle of a capture would free memory of the device there, and takes longer than it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
