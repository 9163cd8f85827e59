"""The ``octavo`` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo._errors import OctavoError
from octavo.cli import chat, doctor, inspect, lint_prompts, pull, replay, run

_INTERRUPTED = 130  # what a shell calls a program that Ctrl-C ended


class _CommandParser(argparse.ArgumentParser):
    """Takes an optional positional also after options: ``octavo run MODEL --json "text"``. By itself argparse gives it
    up at the first option (before Python 3.13). Describes itself in plain text, where docstrings have markup."""

    _inside = False

    def __init__(self, *, description: str | None = None, **keywords: Any) -> None:
        super().__init__(description=description and description.replace("``", ""), **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Errors are one line, never a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Closed by whoever started us: nothing to read, and nobody to write to.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (open for as long as we run)
    parser = argparse.ArgumentParser(prog="octavo", description="Run language models on this machine.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for command in (chat, run, pull, inspect, replay, lint_prompts, doctor):
        command.add(commands)
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's or the pipe's encoding does not have is written as \\u…, as Python does it on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = chosen.command(chosen)
        sys.stdout.flush()
        return status
    except OctavoError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UnicodeDecodeError as error:
        return _failed(f"the input is not {error.encoding} text: {error.reason} at byte {error.start}")
    except OSError as error:
        # Python would complain once more when it flushes at exit, so give it somewhere to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # the reader has seen enough
        return _failed(str(error))
    except MemoryError:
        return _failed("there is not enough memory")
    except Exception as error:
        return _failed(f"internal error, please report it: {type(error).__name__}: {error}")


def _failed(why: str) -> int:
    print(f"octavo: {' '.join(why.split())}", file=sys.stderr)
    return 1
