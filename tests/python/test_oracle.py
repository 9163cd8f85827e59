"""Answers against what public tools computed on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE, assert_greedy, load_safetensors, real_prompts

# What 8-bit activations may cost on models of random weights; float activations are held to the 1e-4 of the oracle.
LOGITS_ATOL = {"reference": 1e-4, "cpu": 0.35}
SURE_MARGIN = {"reference": 1e-4, "cpu": 0.5}

GGUF = ["llama-f16", "llama-q4_0", "llama-q8_0", "qwen2-q5_1", "qwen3-q8_0", "gemma3-q8_0"]
FOLDERS = ["llama-tied-rope3", "llama-untied-sharded", "qwen2", "qwen3", "gemma3"]
MODELS = [f"gguf/{name}" for name in GGUF] + [f"tiny/{name}/{dtype}" for name in FOLDERS for dtype in ("f32", "bf16")]


def oracle(model: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Path of the model, its prompts with what is expected, and the arrays these name."""
    kind, name, *dtype = model.split("/")
    if kind == "gguf":
        expected = json.loads((ORACLE / kind / f"{name}.json").read_text())["f32"]
        return (
            str(ORACLE / kind / f"{name}.gguf"),
            expected["prompts"],
            load_safetensors(ORACLE / kind / f"{name}.safetensors"),
        )
    expected = json.loads((ORACLE / kind / name / "expected.json").read_text())
    arrays = load_safetensors(ORACLE / kind / name / expected["arrays"])
    return str(ORACLE / kind / name / dtype[0]), expected[dtype[0]]["prompts"], arrays


@pytest.fixture(params=[(model, device) for model in MODELS for device in ("reference", "cpu")], ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[octavo.LLM, str, list[Any], dict[str, Any]]]:
    model, device = request.param
    path, prompts, arrays = oracle(model)
    with octavo.LLM(path, device=device, kv_cache_bytes="16MiB") as llm:
        yield llm, device, prompts, arrays


def test_tiny_models_match(case: tuple[octavo.LLM, str, list[Any], dict[str, Any]]) -> None:
    llm, device, prompts, arrays = case
    for prompt in prompts:
        logits = llm.logits(prompt["ids"])
        assert logits.dtype == np.float32
        assert logits.shape[0] == 1
        wanted = arrays[prompt["logits"]]
        assert np.abs(logits[0] - wanted).max() <= LOGITS_ATOL[device], prompt["id"]
        steps = len(prompt["greedy"]["tokens"])
        result = llm.generate(prompt["ids"], GREEDY, max_tokens=steps, prompt_logprobs=0)
        assert_greedy(result.token_ids, prompt["greedy"], SURE_MARGIN[device])
        if "prompt_logprobs" in prompt:
            found = result.prompt_logprobs
            assert found is not None
            assert found[0] is None
            assert [p.token_id for p in found[1:]] == prompt["ids"][1:]
            difference = np.abs(np.array([p.logprob for p in found[1:]]) - arrays[prompt["prompt_logprobs"]])
            assert difference.max() <= LOGITS_ATOL[device]


@pytest.mark.parametrize("name", real_prompts())
def test_smollm2_matches(llm: octavo.LLM, name: str) -> None:
    """What 8-bit activations may cost is what they cost the oracle's llama.cpp."""
    prompt = real_prompts()[name]
    if prompt["kind"] == "text":
        encoding = llm.tokenize(
            prompt["text"], special=prompt["parse_special"], add_special_tokens=prompt["add_special"]
        )
        assert encoding.ids == prompt["ids"]
    result = llm.generate(prompt["ids"], GREEDY, max_tokens=64, prompt_logprobs=0)
    assert_greedy(result.token_ids, prompt["greedy"], margin=0.5)
    assert result.prompt_logprobs is not None
    got = np.array([p.logprob for p in result.prompt_logprobs[1:]])
    wanted = np.array(prompt["prompt_logprobs"])
    assert np.abs(got - wanted).mean() <= 0.25
    assert abs(got.mean() - wanted.mean()) <= 0.2

    reference_path = prompt["greedy"]["tokens"]
    forced = llm.generate(prompt["ids"] + reference_path, GREEDY, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    assert forced is not None
    got = np.array([p.logprob for p in forced[len(prompt["ids"]) :]])
    wanted = np.array([step[0][1] for step in prompt["greedy"]["top10"]])
    assert np.abs(got - wanted).mean() <= 0.25
