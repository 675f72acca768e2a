"""``python -m pipeplan``: the command line, as torchrun starts it."""

import time

BEGAN = time.monotonic()
"""About when the process began: what is imported from here on counts against time limits."""


def main() -> None:
    """Entry point of the ``pipeplan`` command."""
    from pipeplan.cli.main import main

    main(BEGAN)


if __name__ == "__main__":
    main()
