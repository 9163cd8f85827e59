"""``octavo pull``: fetch a model and print where it is."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli import _options


def add(commands: Any) -> None:
    parser = commands.add_parser("pull", help="fetch a model and print where it is", description=__doc__)
    parser.add_argument("model", help=_options.MODEL_HELP)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo import resolve

    print(resolve(arguments.model))
    return 0
