"""``octavo replay``: play a recording of ``LLM.record`` again and compare schedule and tokens."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli import _options


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "replay", help="play a recording again and compare schedule and tokens", description=__doc__
    )
    parser.add_argument("file", help="the log that LLM.record wrote")
    parser.add_argument("--model", help=f"{_options.MODEL_HELP} (default: where it was when the log was made)")
    parser.add_argument("--schedule-only", action="store_true", help="take the log's own tokens; needs no model")
    parser.add_argument("--threads", type=int, metavar="N", help="worker threads (default: as many as then)")
    parser.add_argument("--check", action="store_true", help="also prove the scheduler's invariants after every entry")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo import replay

    found = replay(
        arguments.file,
        model=arguments.model,
        schedule_only=arguments.schedule_only,
        threads=arguments.threads,
        check=arguments.check,
    )
    print(found)
    return 0 if found else 1
