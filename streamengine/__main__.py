"""``python -m streamengine`` is the command line."""

from streamengine.cli import main

main()
