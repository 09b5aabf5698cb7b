"""Executes steps: a transformers model, compiled in pieces, over paged KV memory.

Knows token ids, pages and tensors; nothing of requests, text or sockets. ``compiled.step`` is the
whole contract with the outside and needs only the standard library; importing this package
does not import torch.
"""
