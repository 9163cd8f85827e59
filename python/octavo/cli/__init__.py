"""The ``octavo`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from octavo import __version__
from octavo._errors import OctavoError
from octavo.cli import chat, doctor, inspect, pull, run

_INTERRUPTED = 130  # what a shell calls a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Errors are one line, never a traceback."""
    parser = argparse.ArgumentParser(prog="octavo", description="Run language models on this machine.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (chat, run, pull, inspect, doctor):
        command.add(commands)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.command(chosen)
        sys.stdout.flush()
        return status
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at exit, so give it somewhere to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
