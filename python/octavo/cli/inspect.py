"""``octavo inspect``: what is in a model file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo._sizes import format_bytes
from octavo.cli import _options
from octavo.cli._show import table

if TYPE_CHECKING:
    from octavo._octavo import Inspection


def add(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what is in a model file", description=__doc__)
    parser.add_argument("model", help=_options.MODEL_HELP)
    parser.add_argument("--template", action="store_true", help="print the chat template and nothing else")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo import _octavo, resolve

    path = resolve(arguments.model)
    found = _octavo.inspect(path)
    if arguments.template:
        print(found.chat_template or "")
    else:
        print(table([("path", path), *_rows(found)]))
    return 0


def _rows(found: Inspection) -> list[tuple[str, str]]:
    tensors = [
        (f"  {name}", f"{count} tensors, {format_bytes(size)}{_run_as(name, run_as)}")
        for name, count, size, run_as in sorted(found.tensor_types, key=lambda entry: -entry[2])
    ]
    pre = f", pre-tokenizer {found.pre_tokenizer}" if found.pre_tokenizer else ""
    template = (
        "none" if found.chat_template is None else f"{len(found.chat_template)} characters (--template prints it)"
    )
    return [
        ("name", found.name or "not given"),
        ("architecture", found.architecture),
        ("layers", f"{found.layers}"),
        ("width", f"{found.hidden_size}"),
        ("heads", f"{found.heads}, {found.kv_heads} for keys and values, {found.head_dim} wide"),
        ("vocabulary", f"{found.vocab}"),
        ("positions", f"{found.max_positions}"),
        ("file", format_bytes(found.file_bytes)),
        *tensors,
        ("tokenizer", f"{found.tokenizer}{pre}"),
        ("begin, end token", f"{_token(found.bos)}, {_token(found.eos)}"),
        ("chat template", template),
        ("KV cache", f"{format_bytes(found.kv_bytes_per_token)} per token"),
    ]


def _run_as(name: str, run_as: str | None) -> str:
    if run_as is None:
        return ", cannot be run"
    return "" if run_as == name else f", run as {run_as}"


def _token(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)
