"""Prefill apart from decode: the KV pages of a prompt that another engine computed. No torch; buffers only."""
