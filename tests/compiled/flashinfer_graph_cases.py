"""FlashInfer's wrappers in and between captured graphs: run by test_flashinfer.py, over `tests.compiled.emulation`."""

import torch
from torch import Tensor

from compiled.attention.base import AttentionSpec
from compiled.gpu.buckets import Bucket, Buckets
from compiled.gpu.graphs import Graphs
from tests.compiled import stepping
from tests.compiled.backends import backend_of
from tests.compiled.stepping import step

SPEC, BF16 = AttentionSpec(4, 2, 64, 0.125), torch.bfloat16
BUCKETS = Buckets((2, 4), (2, 8, 16))
STEPS = [
    step((0, 0, 5)),
    step((0, 5, 6), (1, 0, 6)),
    step((0, 6, 7), (1, 6, 7)),
    step((0, 7, 8)),
    step((0, 8, 9), (1, 7, 8), (2, 0, 3)),
    step((0, 9, 10), (1, 8, 9), (2, 3, 4)),
]


def test_flashinfer_has_the_bits_of_eager_steps_in_graphs_of_every_kind() -> None:
    backend = backend_of("flashinfer")
    program = stepping.program(3, spec=SPEC, dtype=BF16)

    def logits(buckets: list[Bucket]) -> tuple[Tensor, dict[str, float]]:
        _, attention = stepping.attention_over((SPEC,) * 3, backend.make, BF16)
        graphs = Graphs(program, attention, backend.device, BUCKETS, 32, stepping.ROW_PAGES)
        graphs.warmup(buckets)
        return stepping.logits(stepping.through(graphs), *STEPS), graphs.statistics()

    plain, _ = logits([])
    assert not plain.isnan().any()
    pieces = [Bucket(size, False) for size in BUCKETS.pieces]
    for buckets, ways in (([*pieces, Bucket(2, True), Bucket(4, True)], (3, 3)), (pieces, (0, 6))):
        found, told = logits(buckets)
        assert (told["graph_steps_whole"], told["graph_steps_pieces"]) == ways
        assert torch.equal(found, plain)
