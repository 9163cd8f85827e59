"""Answers against what public tools computed on the same weights."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, assert_greedy, load_safetensors, oracle_root, real_prompts

# Float activations are held to the 1e-4 of the oracle. 8-bit activations are noise, whose largest value is a matter of
# luck: it may be this many times what the oracle saw of llama.cpp on the same file.
FLOAT_ATOL = 1e-4
NOISE = 1.5
SURE_MARGIN = 0.5

GGUF = ["llama-f16", "llama-q4_0", "llama-q8_0", "qwen2-q5_1", "qwen3-q8_0", "qwen3moe-f16", "gemma3-q8_0"]
FOLDERS = [
    "gemma2",
    "gemma3",
    "granite",
    "llama-tied-rope3",
    "llama-untied-sharded",
    "mistral-swa",
    "mixtral",
    "olmo2",
    "phi3",
    "phi3-longrope",
    "qwen2",
    "qwen3",
    "qwen3-moe",
]
MODELS = [f"gguf/{name}" for name in GGUF] + [f"tiny/{name}/{dtype}" for name in FOLDERS for dtype in ("f32", "bf16")]


STEPS = 48
# longrope has frequencies of its own for sequences beyond this. transformers chooses by the sequence, octavo once, by
# the longest one that the engine was opened for.
LONGROPE_ORIGINAL = 128


def oracle(model: str) -> tuple[str, dict[str, Any], dict[str, Any], float]:
    """Path of the model, what is expected of it, the arrays that this names, and how far its logits may be off on the
    CPU."""
    kind, name, *dtype = model.split("/")
    root = oracle_root(f"{model}.gguf" if kind == "gguf" else model)
    if root is None:
        pytest.skip(f"{model} is in ../shared/oracle, which is not here")
    if kind == "gguf":
        expected = json.loads((root / kind / f"{name}.json").read_text())
        path = str(root / kind / f"{name}.gguf")
        arrays = load_safetensors(root / kind / f"{name}.safetensors")
        of_llama_cpp = max(expected["llama_cpp"]["last_logits_max_abs"].values())
        is_dense = set(expected["tensor_types"]) <= {"F16", "F32"}
        return path, expected["f32"], arrays, FLOAT_ATOL if is_dense else NOISE * of_llama_cpp
    expected = json.loads((root / kind / name / "expected.json").read_text())
    arrays = load_safetensors(root / kind / name / expected["arrays"])
    of_dtype = expected[dtype[0]]
    return str(root / model), of_dtype, arrays, max(FLOAT_ATOL, of_dtype.get("suggested_atol", 0.0))


def engines(model: str, prompts: list[Any]) -> list[tuple[int | None, list[Any]]]:
    """The prompts, by the longest sequence that their engine is opened for."""
    if "longrope" not in model:
        return [(None, prompts)]
    short = [prompt for prompt in prompts if prompt["n"] + STEPS <= LONGROPE_ORIGINAL]
    return [(LONGROPE_ORIGINAL, short), (None, [prompt for prompt in prompts if prompt not in short])]


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("model", MODELS)
def test_tiny_models_match(model: str, device: str) -> None:
    path, expected, arrays, cpu_atol = oracle(model)
    float_atol = max(FLOAT_ATOL, expected.get("suggested_atol", 0.0))
    atol = cpu_atol if device == "cpu" else float_atol
    for max_model_len, prompts in engines(model, expected["prompts"]):
        with octavo.LLM(path, device=device, kv_cache_bytes="16MiB", max_model_len=max_model_len) as llm:
            for prompt in prompts:
                check(llm, prompt, arrays, atol, FLOAT_ATOL if atol == float_atol else SURE_MARGIN)


def check(llm: octavo.LLM, prompt: dict[str, Any], arrays: dict[str, Any], atol: float, margin: float) -> None:
    logits = llm.logits(prompt["ids"])
    assert logits.dtype == np.float32
    assert logits.shape[0] == 1
    assert np.abs(logits[0] - arrays[prompt["logits"]]).max() <= atol, prompt["id"]
    assert len(prompt["greedy"]["tokens"]) == STEPS
    result = llm.generate(prompt["ids"], GREEDY, max_tokens=STEPS, prompt_logprobs=0)
    assert_greedy(result.token_ids, prompt["greedy"], margin)
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
