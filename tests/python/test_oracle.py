"""Answers against what public tools computed, through the wheel: models, tokenizers, chat templates, the sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import octavo
import oracle


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("name", oracle.models())
def test_tiny_models(name: str, device: str, tmp_path: Path) -> None:
    model = oracle.TinyModel(name)
    oracle.check("tiny", model.fixture, model.dump(device), tmp_path, *model.options(device))


@pytest.mark.parametrize("name", sorted(path.stem for path in oracle.folder("real").glob("*.json")))
def test_real_models(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fixture = oracle.folder("real") / f"{name}.json"
    expected = oracle.read(fixture)
    if name == "smollm2-135m":
        got = oracle.dump_real(request.getfixturevalue("llm"), expected["prompts"])
    else:
        path = oracle.model_file(expected["bytes"])
        if path is None:
            pytest.skip(f"no file of {expected['bytes']} bytes, {expected['model']}, in $OCTAVO_TEST_MODELS")
        with octavo.LLM(path, kv_cache_bytes="256MiB", max_model_len=2048) as llm:
            got = oracle.dump_real(llm, expected["prompts"])
    oracle.check("real", fixture, got, tmp_path)


@pytest.mark.parametrize("name", oracle.tokenizers())
def test_tokenizers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fixture = oracle.folder("tokenizer") / f"{name}.json"
    expected = oracle.read(fixture)
    path = oracle.tokenizers()[name]
    if path is None and name.startswith("gguf/smollm2"):
        path = request.getfixturevalue("smollm2")
    if path is None:
        pytest.skip(f"{expected['file']} is not in $OCTAVO_TEST_MODELS")
    got = oracle.dump_tokenizer(octavo.Tokenizer(path), expected)
    oracle.check("tokenizer", fixture, got, tmp_path)
    # Where all references agree there is one right answer.
    expected["cases"] = [case for case in expected["cases"] if case.get("undisputed", True)]
    strict = tmp_path / "undisputed.json"
    strict.write_text(json.dumps(expected), encoding="utf-8")
    oracle.check("tokenizer", strict, got, tmp_path, "--strict")


def test_chat_templates(tiny: octavo.LLM, tmp_path: Path) -> None:
    oracle.check("chat", oracle.folder("chat"), oracle.dump_chat(tiny), tmp_path)


def test_the_sampler(tmp_path: Path) -> None:
    got = oracle.dump_sampler(draws=20_000, every=6)
    oracle.check("sampler", oracle.folder("sampler") / "sampler.json", got, tmp_path)


def test_a_wrong_answer_is_seen(tmp_path: Path) -> None:
    got: dict[str, Any] = oracle.dump_sampler(draws=1, every=1000)
    got["o005"]["probs"][3] += 1e-3
    with pytest.raises(AssertionError):
        oracle.check("sampler", oracle.folder("sampler") / "sampler.json", got, tmp_path)
