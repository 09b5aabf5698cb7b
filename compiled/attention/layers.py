"""The attention of a whole model: one backend object for all layers that attend alike.

Owns which layer belongs to which object. Layers may differ in their window, their sizes and all else that an
`AttentionSpec` says; a step's page tables are the same for all of them, and checked once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from compiled.attention.base import Attention, AttentionSpec
from compiled.attention.tables import make_plan

Views = Sequence[tuple[Tensor, Tensor]]


class ModelAttention:
    """Like `Attention`, over layers of any kinds. ``views[i]`` are the pages of layer i."""

    def __init__(
        self, specs: Sequence[AttentionSpec], views: Views, make: Callable[[AttentionSpec, Views], Attention]
    ) -> None:
        members: dict[AttentionSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            members.setdefault(spec, []).append(layer)
        self._groups = [make(spec, [views[layer] for layer in layers]) for spec, layers in members.items()]
        places = {
            layer: (group, number)
            for group, layers in enumerate(members.values())
            for number, layer in enumerate(layers)
        }
        self._places = [places[layer] for layer in range(len(specs))]

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor) -> None:
        """See `Attention.plan`."""
        first = self._groups[0]
        tables = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
        plan = make_plan(*tables, pages=first.pages, page_size=first.page_size)
        for group in self._groups:
            group.take(plan)

    def fixed(self, rows: int, row_pages: int | None = None) -> "ModelAttention":
        """The same layers for a captured graph of ``rows`` rows; see `Attention.fixed`."""
        twin = copy.copy(self)
        twin._groups = [group.fixed(rows, row_pages) for group in self._groups]
        return twin

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Attention.capturing`."""
        with ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(group.capturing())
            yield

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        layer: int,
        sinks_H: Tensor | None = None,
        out_THE: Tensor | None = None,
    ) -> Tensor:
        """``out_THE`` of layer ``layer``, a new tensor if it is not given; see `Attention.run`."""
        group, number = self._places[layer]
        if out_THE is None:
            out_THE = self._groups[group].output(q_THD.shape[0])
        self._groups[group].run(q_THD, k_TKD, v_TKE, number, out_THE, sinks_H)
        return out_THE
