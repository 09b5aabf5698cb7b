"""Tool calls: how a model writes them, and what becomes of them on the way out and back in.

`format` learns the way from a chat template, `parser` tells calls from text in an answer, and `conversation` reads
the calls and results of earlier turns. Which calls a grammar allows, `streamengine.guided.tools` says.
"""
