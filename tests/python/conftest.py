"""What the tests share: models, the oracle's fixtures, and how an answer is compared with them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "tests" / "fixtures" / "oracle"
SMOLLM2 = "smollm2"
# Enough for every test together; a stated budget, so that the bound on resident memory can be checked.
KV_BYTES = 384 << 20


def pytest_report_header() -> str:
    import oracle

    return oracle.USED


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct, fetched once into octavo's cache."""
    try:
        return octavo.resolve(SMOLLM2, progress=False)
    except octavo.ModelLoadError as error:
        if os.environ.get("OCTAVO_TEST_OFFLINE"):
            pytest.skip(f"OCTAVO_TEST_OFFLINE is set and SmolLM2 is not in the cache: {error}")
        raise


@pytest.fixture(scope="session")
def llm(smollm2: str) -> Iterator[octavo.LLM]:
    """A real model, shared by all tests that do not close it."""
    with octavo.LLM(smollm2, kv_cache_bytes=KV_BYTES, max_model_len=2048) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_path() -> str:
    """A model of a few kilobytes with random weights: what it says is nonsense, how it says it is not."""
    return str(ORACLE / "gguf" / "llama-q8_0.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: str) -> Iterator[octavo.LLM]:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as model:
        yield model


GREEDY = octavo.SamplingParams(temperature=0.0, ignore_eos=True)


def settled(llm: octavo.LLM, seconds: float = 10.0) -> Any:
    """The engine's counters once nothing runs or waits any more."""
    import time

    until = time.monotonic() + seconds
    while True:
        stats = llm.stats()
        if stats.running == stats.waiting == 0:
            return stats
        assert time.monotonic() < until, f"requests are still there after {seconds} s: {stats}"
        time.sleep(0.01)


def given_up(llm: octavo.LLM, prompt: Any, after: int, **options: Any) -> tuple[octavo.Result, list[int]]:
    """The result of a stream that is given up after its first `after` tokens, and the tokens that came before its end.

    A machine that lets this thread wait while the engine goes on may see the tiny model finish first: then it is tried
    again.
    """
    for _ in range(20):
        stream = llm.stream(prompt, ignore_eos=True, max_tokens=400, **options)
        tokens: list[int] = []
        while len(tokens) < after:
            tokens += next(stream).token_ids
        stream.cancel()
        tokens += [token for chunk in stream for token in chunk.token_ids]
        if stream.result.finish_reason != "length":
            return stream.result, tokens
    raise AssertionError("the model is always done before its stream is given up")


def fingerprint(result: octavo.Result) -> list[Any]:
    """Everything of an answer that must not depend on the weather."""
    return [
        (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, bits(choice.logprobs))
        for choice in result.choices
    ]


def bits(logprobs: list[octavo.TokenLogprobs] | None) -> Any:
    return None if logprobs is None else [(p.token_id, struct.pack("<f", p.logprob), p.rank, p.top) for p in logprobs]


# ---- the oracle --------------------------------------------------------------------------------------------------


def real_prompts() -> dict[str, Any]:
    prompts = json.loads((ORACLE / "real" / "smollm2-135m.json").read_text())["prompts"]
    return {prompt["id"]: prompt for prompt in prompts}


def load_safetensors(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (header_len,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_len])
    body = data[8 + header_len :]
    kinds = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4"}
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def assert_greedy(got: list[int], reference: dict[str, Any], margin: float) -> None:
    """Equal tokens; or a first difference where the reference's two best are closer than ``margin``."""
    for step, (token, wanted) in enumerate(zip(got, reference["tokens"], strict=False)):
        if token != wanted:
            found = reference["margin"][step]
            assert found < margin, f"token {step} is {token}, not {wanted}; the reference is sure by {found}"
            return
    assert len(got) >= len(reference["tokens"])


# ---- other processes ---------------------------------------------------------------------------------------------


def python(code: str, *arguments: str, timeout: float = 120, **keywords: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **keywords,
    )
