"""What the README shows works as it stands, and the Python benches too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readmes_python_runs(smollm2: str, tmp_path: Path) -> None:
    assert smollm2  # it is in the cache, so nothing is fetched here
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    told = [run(sys.executable, "-c", block, folder=tmp_path) for block in blocks]
    assert "first token after" in told[0]
    assert re.match(r"-\d\.\d+ True\n-\d+\.\d+ False\n", told[1])
    assert re.search(r"{'name': .+, 'age': \d+}\n (yes|no)\n", told[2])
    assert re.search(
        r"^\d+ resumed Rent\(.*\[.*resumed.*\]\n\d+ of \d+ tokens are cached", told[3], re.MULTILINE | re.DOTALL
    )
    for said in ("'finished'", "equal to a run alone, bit for bit", "exactly those of the log"):
        assert said in told[4]


def test_the_online_bench_runs(smollm2: str) -> None:
    told = run(sys.executable, str(ROOT / "benches" / "online.py"), smollm2, "--tiny")
    assert len(re.findall(r"p50 .+ p95 .+ p99 .+ ms$", told, re.MULTILINE)) == 3
    # Sixteen callers with one prefix of 64: it is computed once, and 16 tokens of each.
    assert "320 tokens computed of 1280" in told


def test_the_bench_runs(smollm2: str) -> None:
    told = run(sys.executable, str(ROOT / "benches" / "offline.py"), smollm2, "--tiny")
    assert len(re.findall(r"^.+\d tok/s$", told, re.MULTILINE)) == 8


def test_the_bench_of_peers_runs(smollm2: str) -> None:
    assert smollm2  # it is in the cache, so nothing is fetched here
    bench = str(ROOT / "benches" / "peers.py")
    told = run(
        *(sys.executable, bench, "--quick", "--models", "smollm2"),
        *("--only", "octavo,mistralrs", "--python", "mistralrs=/nowhere/python"),
    )
    # Every row has octavo's figure; a peer that is not there has none, and the reason is told.
    assert len(re.findall(r", (?:s|ms|tok/s) +[\d.]+(?:\[\d+\])? +—", told)) == 11, told
    assert told.endswith("\nmistralrs: /nowhere/python: no such interpreter\n"), told
