"""Page tables: a step's rows as indptr, indices and last page length, checked once a step on the host.

Refuses anything that would read or write outside a row's own pages, with the numbers, and what a captured graph
could not replay.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled.step import PADDING_PAGE

Array = npt.NDArray[np.integer[Any]]
Tables = tuple[Tensor, Tensor, Tensor, Tensor]
"""qo_indptr, kv_indptr, kv_indices and kv_last_page_len."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's rows, checked. All tensors are int32 on the CPU, contiguous, and nobody else's.

    Row ``r`` has tokens ``qo_indptr[r] .. qo_indptr[r + 1] - 1`` of the step, which are the last of its
    ``kv_lens[r]`` positions, and pages ``kv_indices[kv_indptr[r] : kv_indptr[r + 1]]``.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    kv_lens: Tensor
    tokens: int

    @property
    def rows(self) -> int:
        """R."""
        return self.kv_lens.numel()


def make_plan(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, pages: int, page_size: int
) -> Plan:
    """Copy and check a step's page tables. ValueError names the tensor and the first bad entry."""
    tables = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_len": kv_last_page_len,
    }
    for name, table in tables.items():
        if table.dtype != torch.int32 or table.device.type != "cpu" or table.dim() != 1:
            raise ValueError(
                f"{name} must be a one-dimensional int32 tensor on the CPU, "
                f"not {table.dtype} {tuple(table.shape)} on {table.device}"
            )
    # numpy's calls cost a tenth of torch's, and this is done between the steps of a GPU.
    queries, begins, indices, last = (table.numpy().copy() for table in tables.values())
    rows = len(last)
    if rows < 1:
        raise ValueError("kv_last_page_len has no rows")
    qo_lens = _lengths("qo_indptr", queries, rows)
    page_counts = _lengths("kv_indptr", begins, rows)
    if begins[-1] != len(indices):
        raise ValueError(f"kv_indptr ends at {begins[-1]} but kv_indices has {len(indices)} entries")
    _refuse("kv_indices", indices, 0, pages - 1)
    _refuse("kv_last_page_len", last, 1, page_size)
    kv_lens = (page_counts - 1) * np.int32(page_size) + last
    if (longer := qo_lens > kv_lens).any():
        row = int(longer.argmax())
        raise ValueError(f"row {row} has {qo_lens[row]} query tokens but a kv length of {kv_lens[row]}")
    return Plan(
        qo_indptr=torch.from_numpy(queries),
        kv_indptr=torch.from_numpy(begins),
        kv_indices=torch.from_numpy(indices),
        kv_last_page_len=torch.from_numpy(last),
        kv_lens=torch.from_numpy(kv_lens),
        tokens=int(queries[-1]),
    )


def _lengths(name: str, indptr: Array, rows: int) -> Array:
    """Differences of an index pointer that must start at 0 and rise by at least one at every row."""
    if len(indptr) != rows + 1:
        raise ValueError(f"{name} has {len(indptr)} entries, not {rows + 1} for {rows} rows")
    if indptr[0] != 0:
        raise ValueError(f"{name}[0] is {indptr[0]}, not 0")
    lengths = indptr[1:] - indptr[:-1]
    if lengths.min() < 1:
        row = int((lengths < 1).argmax())
        raise ValueError(f"{name} does not rise at row {row}: {indptr[row]} then {indptr[row + 1]}")
    return lengths


def _refuse(name: str, values: Array, least: int, most: int) -> None:
    if values.min() < least or values.max() > most:
        index = int(((values < least) | (values > most)).argmax())
        raise ValueError(f"{name}[{index}] is {values[index]}, outside {least}..{most}")


def positions(plan: Plan, page_size: int) -> tuple[Array, Array]:
    """Page and slot of each of the step's tokens [T]."""
    qo_indptr, kv_indptr, kv_indices = (table.numpy() for table in (plan.qo_indptr, plan.kv_indptr, plan.kv_indices))
    if plan.tokens == plan.rows:  # each token is its row's last position
        return kv_indices[kv_indptr[1:] - 1], plan.kv_last_page_len.numpy() - 1
    lengths = qo_indptr[1:] - qo_indptr[:-1]
    before = plan.kv_lens.numpy() - lengths
    place = np.arange(plan.tokens) + np.repeat(before - qo_indptr[:-1], lengths)
    return kv_indices[np.repeat(kv_indptr[:-1], lengths) + place // page_size], place % page_size


def pad(tables: Tables, rows: int) -> Tables:
    """``tables`` with rows of one token and one position on `PADDING_PAGE` behind, ``rows`` in all.

    That is what a graph for so many rows runs for fewer: such rows write and read the padding page alone.
    """
    qo_indptr, kv_indptr, kv_indices, kv_last_page_len = (table.numpy() for table in tables)
    missing = rows - len(kv_last_page_len)
    if missing < 0:
        raise ValueError(f"{len(kv_last_page_len)} rows cannot be padded to {rows}")
    if not missing:
        return tables
    more = np.arange(1, missing + 1, dtype=np.int32)
    padded = (
        (qo_indptr, qo_indptr[-1] + more),
        (kv_indptr, kv_indptr[-1] + more),
        (kv_indices, np.full_like(more, PADDING_PAGE)),
        (kv_last_page_len, np.ones_like(more)),
    )
    return tuple(torch.from_numpy(np.concatenate(parts)) for parts in padded)


class Fixed:
    """What does not change between a graph's replays: the number of rows, and where a plan's tables lie."""

    def __init__(self, rows: int, indices: int) -> None:
        if min(rows, indices) < 1:
            raise ValueError(f"a graph has at least one row and one page, not {rows} rows and {indices} pages")
        self.rows, self.indices = rows, indices
        self.capturing = False
        self._ran: set[int] = set()
        self._held: Plan | None = None

    def check(self, plan: Plan) -> None:
        """Begin with ``plan``. ValueError if it does not fit."""
        if plan.rows != self.rows:
            raise ValueError(f"{plan.rows} rows are planned for a graph of {self.rows}")
        if plan.tokens != self.rows:
            raise ValueError(f"{plan.tokens} tokens are planned for a graph of {self.rows} rows of one token each")
        needed = plan.kv_indices.numel()
        if needed > self.indices:
            raise ValueError(
                f"kv_indices has {needed} entries, a graph of {self.rows} rows has room for {self.indices}"
            )
        self._ran.clear()

    def hold(self, plan: Plan) -> Plan:
        """``plan`` at the addresses of every plan before, for a backend that runs on the host's tables."""
        if self._held is None:
            self._held = Plan(
                qo_indptr=_zeros(self.rows + 1),
                kv_indptr=_zeros(self.rows + 1),
                kv_indices=_zeros(self.indices),
                kv_last_page_len=_zeros(self.rows),
                kv_lens=_zeros(self.rows),
                tokens=self.rows,
            )
        held = self._held
        for name in ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_lens"):
            getattr(held, name).copy_(getattr(plan, name))
        return replace(held, kv_indices=held.kv_indices[: plan.kv_indices.numel()].copy_(plan.kv_indices))

    def spend(self, layer: int) -> None:
        """One plan, one run of each layer, but while capturing."""
        if layer in self._ran and not self.capturing:
            raise ValueError(f"layer {layer} runs a second time on one plan: a graph needs a plan before each replay")
        self._ran.add(layer)


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)
