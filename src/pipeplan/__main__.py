"""``python -m pipeplan``: the command line, as torchrun starts it."""

from pipeplan.cli.main import main

if __name__ == "__main__":
    main()
