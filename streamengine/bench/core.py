"""Entry of a core's process that has no model: ``python -m streamengine.bench.core FD``."""

from streamengine import child
from streamengine.bench.ticking import build

if __name__ == "__main__":
    child.main(build)
