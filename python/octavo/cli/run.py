"""``octavo run``: let a model continue a text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli import _options
from octavo.cli._show import show_summary

if TYPE_CHECKING:
    from octavo import LLM, Result


def add(commands: Any) -> None:
    parser = commands.add_parser("run", help="let a model continue a text", description=__doc__)
    parser.add_argument("model", help=_options.MODEL_HELP)
    parser.add_argument("prompt", nargs="?", help="the text, taken as it is; without one it is read from stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object with tokens, usage and anatomy")
    parser.add_argument("--anatomy", action="store_true", help="show where the time and memory went")
    _options.add_sampling(parser)
    _options.add_engine(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    with _options.load(arguments) as llm:
        params = _options.sampling(arguments)
        if arguments.json:
            print(json.dumps(_as_json(llm.generate(prompt, params)), ensure_ascii=False))
            return 0
        result = _streamed(llm, prompt, params)
        show_summary(result, llm.facts)
        if arguments.anatomy:
            print(result.anatomy, file=sys.stderr)
    return 0


def _streamed(llm: LLM, prompt: str, params: Any) -> Result:
    with llm.stream(prompt, params) as stream:
        try:
            for chunk in stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        finally:
            print(flush=True)
        return stream.result


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_tokens": result.usage.cached_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
        "anatomy": result.anatomy.to_dict(),
    }
