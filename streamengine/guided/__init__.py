"""Constrained answers: from what a client asks for to the tokens that its grammar leaves.

`schema` and `grammar` run in the front, where a request is checked; `matcher`, `compiler` and `constraint` run
in the core, where tokens are chosen.
"""
