"""``octavo lint-prompts``: which order of their parts lets most of a set of prompts be reused."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from octavo._errors import InvalidRequestError
from octavo._paths import checked_path
from octavo.cli import _options


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "lint-prompts",
        help="which order of their parts lets most of a set of prompts be reused",
        description=__doc__,
    )
    parser.add_argument(
        "file",
        help='prompts, a line each, as JSON: a text, {"parts": [...]} or {"messages": [...]}; - reads them from stdin',
    )
    parser.add_argument("--model", help="whose tokens to count and whose speed to take; " + _options.MODEL_HELP)
    parser.add_argument("--tokens-per-s", type=float, metavar="N", help="how fast prompts are read, for the time saved")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo import LLM, Tokenizer, lint_prompts

    prompts = _read(arguments.file)
    if arguments.model is None:
        print(lint_prompts(prompts, tokens_per_s=arguments.tokens_per_s))
    elif arguments.tokens_per_s is not None:
        print(lint_prompts(prompts, Tokenizer(arguments.model), tokens_per_s=arguments.tokens_per_s))
    else:
        with LLM(arguments.model) as llm:
            print(lint_prompts(prompts, llm))
    return 0


def _read(file: str) -> list[Any]:
    data = sys.stdin.buffer.read() if file == "-" else Path(checked_path("file", file)).read_bytes()
    try:
        # Windows' editors begin a file with a mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file}: this is no UTF-8 text, at byte {error.start}: {error.reason}") from None
    prompts = []
    # Not `splitlines`: JSON may have U+2028 and the like inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(json.loads(line))
        except RecursionError:
            raise InvalidRequestError(f"{file}, line {number}: a prompt is nested too deeply") from None
        except ValueError as error:
            raise InvalidRequestError(f"{file}, line {number}: a prompt is a line of JSON: {error}") from None
    return prompts
