"""Attention over the paged KV cache: one contract in `base`, one module per backend."""
