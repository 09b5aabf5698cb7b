"""``python -m streamengine`` is the command line, and the installed command is `main`."""

import sys


def main() -> None:
    try:
        from streamengine import cli
    except KeyboardInterrupt:  # importing takes a second
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
