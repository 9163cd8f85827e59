"""Answers against what public tools computed on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE, assert_greedy, load_safetensors, real_prompts

# Float activations are held to the 1e-4 of the oracle. 8-bit activations are noise, whose largest value is a matter of
# luck: it may be this many times what the oracle saw of llama.cpp on the same file.
FLOAT_ATOL = 1e-4
NOISE = 1.5
SURE_MARGIN = 0.5

Case = tuple[octavo.LLM, list[Any], dict[str, Any], float]

GGUF = ["llama-f16", "llama-q4_0", "llama-q8_0", "qwen2-q5_1", "qwen3-q8_0", "gemma3-q8_0"]
FOLDERS = ["llama-tied-rope3", "llama-untied-sharded", "qwen2", "qwen3", "gemma3"]
MODELS = [f"gguf/{name}" for name in GGUF] + [f"tiny/{name}/{dtype}" for name in FOLDERS for dtype in ("f32", "bf16")]


def oracle(model: str) -> tuple[str, list[Any], dict[str, Any], float]:
    """Path of the model, its prompts with what is expected, the arrays these name, and how far its logits may be off
    on the CPU."""
    kind, name, *dtype = model.split("/")
    if kind == "gguf":
        expected = json.loads((ORACLE / kind / f"{name}.json").read_text())
        path = str(ORACLE / kind / f"{name}.gguf")
        arrays = load_safetensors(ORACLE / kind / f"{name}.safetensors")
        of_llama_cpp = max(expected["llama_cpp"]["last_logits_max_abs"].values())
        is_dense = set(expected["tensor_types"]) <= {"F16", "F32"}
        return path, expected["f32"]["prompts"], arrays, FLOAT_ATOL if is_dense else NOISE * of_llama_cpp
    expected = json.loads((ORACLE / kind / name / "expected.json").read_text())
    arrays = load_safetensors(ORACLE / kind / name / expected["arrays"])
    return str(ORACLE / kind / name / dtype[0]), expected[dtype[0]]["prompts"], arrays, FLOAT_ATOL


@pytest.fixture(params=[(model, device) for model in MODELS for device in ("reference", "cpu")], ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    model, device = request.param
    path, prompts, arrays, cpu_atol = oracle(model)
    atol = cpu_atol if device == "cpu" else FLOAT_ATOL
    with octavo.LLM(path, device=device, kv_cache_bytes="16MiB") as llm:
        yield llm, prompts, arrays, atol


def test_tiny_models_match(case: Case) -> None:
    llm, prompts, arrays, atol = case
    for prompt in prompts:
        logits = llm.logits(prompt["ids"])
        assert logits.dtype == np.float32
        assert logits.shape[0] == 1
        wanted = arrays[prompt["logits"]]
        assert np.abs(logits[0] - wanted).max() <= atol, prompt["id"]
        steps = len(prompt["greedy"]["tokens"])
        result = llm.generate(prompt["ids"], GREEDY, max_tokens=steps, prompt_logprobs=0)
        assert_greedy(result.token_ids, prompt["greedy"], FLOAT_ATOL if atol == FLOAT_ATOL else SURE_MARGIN)
        if "prompt_logprobs" in prompt:
            found = result.prompt_logprobs
            assert found is not None
            assert found[0] is None
            assert [p.token_id for p in found[1:]] == prompt["ids"][1:]
            difference = np.abs(np.array([p.logprob for p in found[1:]]) - arrays[prompt["prompt_logprobs"]])
            assert difference.max() <= atol


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
