"""Attention in plain PyTorch over gathered pages: the truth on every device, written to be read.

Owns nothing but the formula. Refuses to be fast: every row is gathered and computed alone, in float32.
"""

from typing import Self

import torch
from torch import Tensor

from compiled.attention.base import Attention, encode
from compiled.attention.tables import Plan


class ReferenceAttention(Attention):
    """softmax(capped scale * Q K^T + causal mask, within the window, beside the sinks) V, row by row."""

    name = "reference"

    def _again(self) -> Self:
        scales = None if self.dtype == self.cache_dtype else self.scales
        return type(self)(self.spec, self.layers, dtype=self.dtype, scales=scales)

    def _run(
        self,
        plan: Plan,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        layer: int,
        out_THE: Tensor,
        sinks_H: Tensor | None,
    ) -> None:
        keys, values = self.layers[layer]
        k_scale, v_scale = self.scales[layer]
        for row in range(plan.rows):
            tokens = slice(int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1]))
            pages, slots = self._slots(plan, row)
            written = slice(len(slots) - (tokens.stop - tokens.start), None)
            keys[pages[written], slots[written]] = encode(k_TKD[tokens], keys.dtype, k_scale)
            values[pages[written], slots[written]] = encode(v_TKE[tokens], values.dtype, v_scale)
        # A second loop: a row may share pages that another row of the same step has just written.
        for row in range(plan.rows):
            tokens = slice(int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1]))
            pages, slots = (of_row[self._unseen(plan, row, tokens) :] for of_row in self._slots(plan, row))
            k_NKD, v_NKE = keys[pages, slots].float() * k_scale, values[pages, slots].float() * v_scale
            out_THE[tokens] = self._attend(q_THD[tokens], k_NKD, v_NKE, sinks_H)
        out_THE[plan.tokens :] = 0

    def _slots(self, plan: Plan, row: int) -> tuple[Tensor, Tensor]:
        """Page and slot of each of the row's positions, on the cache's device."""
        positions = torch.arange(int(plan.kv_lens[row]))
        pages = plan.kv_indices[int(plan.kv_indptr[row]) :][positions // self.page_size]
        return pages.to(self.device, torch.int64), (positions % self.page_size).to(self.device)

    def _unseen(self, plan: Plan, row: int, tokens: slice) -> int:
        """How many of the row's first positions not even its first token sees."""
        first = int(plan.kv_lens[row]) - (tokens.stop - tokens.start)
        return 0 if self.spec.window is None else max(0, first + 1 - self.spec.window)

    def _attend(self, q_THD: Tensor, k_NKD: Tensor, v_NKE: Tensor, sinks_H: Tensor | None) -> Tensor:
        """One row: its T query tokens are the last T of its N positions, whose keys and values are float32."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        q_HTD = q_THD.float().transpose(0, 1)
        k_HND = k_NKD.transpose(0, 1).repeat_interleave(group, dim=0)
        v_HNE = v_NKE.transpose(0, 1).repeat_interleave(group, dim=0)
        scores_HTN = q_HTD @ k_HND.transpose(1, 2) * self.spec.scale
        if self.spec.soft_cap is not None:
            scores_HTN = (scores_HTN / self.spec.soft_cap).tanh() * self.spec.soft_cap
        tokens, positions = scores_HTN.shape[1:]
        every_TN = torch.ones(tokens, positions, dtype=torch.bool, device=self.device)
        unseen_TN = every_TN.triu(positions - tokens + 1)  # the future
        if self.spec.window is not None:
            unseen_TN |= every_TN.tril(positions - tokens - self.spec.window)
        scores_HTN = scores_HTN.masked_fill(unseen_TN, float("-inf"))
        if sinks_H is not None:  # one more position, which is dropped again
            sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, tokens, 1)
            scores_HTN = torch.cat([scores_HTN, sinks_HT1], dim=-1)
        weights_HTN = scores_HTN.softmax(dim=-1)[:, :, :positions]
        return (weights_HTN @ v_HNE).transpose(0, 1).to(self.dtype)
