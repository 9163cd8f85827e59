"""How commands show things."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from octavo._sizes import format_bytes

if TYPE_CHECKING:
    from octavo._octavo import Facts, Result


def dim(text: str, stream: TextIO) -> str:
    """Grey on a terminal, unless ``NO_COLOR`` is set."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[2m{text}\x1b[0m" if coloured else text


def show_summary(result: Result, facts: Facts) -> None:
    """The one line after an answer. On stderr: what is piped on is the answer alone."""
    print(dim(f"[{summary(result, facts)}]", sys.stderr), file=sys.stderr)


def summary(result: Result, facts: Facts) -> str:
    """``37 tok prompt · 0.14 s to first token · 61 tok/s · avx512-vnni, 2 threads · 98 MB weights + 9 MB KV``"""
    usage, anatomy = result.usage, result.anatomy
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens} tok prompt{cached}"]
    if anatomy.ttft_s is not None:
        parts.append(f"{anatomy.ttft_s:.2f} s to first token")
    if anatomy.tpot_s:
        parts.append(f"{1 / anatomy.tpot_s:.0f} tok/s")
    parts.append(facts.device)
    parts.append(f"{format_bytes(facts.weights_bytes)} weights + {format_bytes(facts.kv_cache_bytes)} KV")
    return " · ".join(parts)


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)
