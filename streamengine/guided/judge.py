"""Reads ``[schema, text]`` as JSON and writes whether the text is an instance. A program of its own, to be run as a
script: a client's schema may hold patterns that backtrack for ever, or references that branch without end.

It fetches nothing; what it cannot resolve, or not within its limits, is a crash.
"""

import json
import resource
import sys

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry

CPU_S = 1
MEMORY_BYTES = 2**30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    schema, text = json.load(sys.stdin)
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        document = json.loads(text)
    except ValueError:
        valid = False
    else:
        valid = validator(schema, registry=Registry()).is_valid(document)
    json.dump(valid, sys.stdout)


if __name__ == "__main__":
    main()
