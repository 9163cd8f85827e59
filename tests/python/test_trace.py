"""A few hundred requests like those of a public trace, through the real engine: `benches/trace.py`, shortened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT


@pytest.fixture(scope="module")
def trace() -> Any:
    spec = importlib.util.spec_from_file_location("octavo_bench_trace", ROOT / "benches" / "trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("seed", "cache"), [(1, "12MiB"), (2, "1MiB")])
def test_a_drawn_trace(trace: Any, tiny_path: str, seed: int, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Its checks are in it; the second cache is so small that sequences lose their blocks.
    options = ["--trace", "none", "--requests", "250", "--scale", "16", "--speed", "60"]
    trace.main([tiny_path, *options, "--seed", str(seed), "--kv-cache-bytes", cache])
    said = capsys.readouterr().out
    assert "every request ended exactly once" in said
    assert "the schedule is exactly that of the log" in said


def test_the_recorded_trace_if_it_is_there(trace: Any, tiny_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not trace.TRACE.exists():
        pytest.skip(f"{trace.TRACE.name} is not beside this repository")
    trace.main([tiny_path, "--requests", "250", "--scale", "16", "--speed", "60"])
    assert trace.TRACE.name in capsys.readouterr().out
