"""Compiles each line of standard input, which is ``[limits, grammars]`` as JSON in the grammar engine's words, and
answers it by an empty line; or dies. A program of its own, to be run as a script: see `streamengine.guided.trial`.
"""

import json
import os
import resource
import sys
import time
from math import ceil

CPU_S = 4
MEMORY_BYTES = 2 * 2**30
"""Of the process's addresses; it begins with a tenth of that."""
NICE = 5
"""Running answers go first: two compute threads that wait for one core are several times slower."""


def main() -> None:
    # Whoever reads the limits above does not need the grammar engine, which takes a while to import.
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        limits, grammars = json.loads(line)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(time.process_time()) + CPU_S, hard))
        for grammar in grammars:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
            if not matcher.is_error():
                matcher.compute_bitmask()
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
