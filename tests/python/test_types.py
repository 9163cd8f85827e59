"""What weights are run as: ``dtype``, and types that are converted at load."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE, fingerprint, real_prompts
from octavo import _octavo

PROMPT = list(range(5, 40))
Q4_0, IQ4_NL = 2, 20


@pytest.fixture
def unusual(tmp_path: Path) -> Path:
    """A model of a type without kernels. Its blocks look like those of Q4_0, so only the types in the header differ."""
    data = bytearray((ORACLE / "gguf" / "llama-q4_0.gguf").read_bytes())
    at = 0
    changed = 0
    while (at := data.find(b".weight", at + 1)) >= 0:
        # After the name: axes, then as many sizes, then the type.
        axes, _, _, kind = struct.unpack_from("<IQQI", data, at + len(b".weight"))
        if (axes, kind) == (2, Q4_0):
            struct.pack_into("<I", data, at + len(b".weight") + 20, IQ4_NL)
            changed += 1
    assert changed > 10
    path = tmp_path / "unusual.gguf"
    path.write_bytes(data)
    return path


def test_conversion_is_told_once_per_load(unusual: Path) -> None:
    with pytest.warns(UserWarning, match=r"unusual\.gguf: .*IQ4_NL as Q8_0: \d+ matrices, .* in the file") as told:
        llm = octavo.LLM(unusual, kv_cache_bytes="4MiB")
    assert len(told) == 1
    assert told[0].filename == __file__
    with llm:
        assert "IQ4_NL as Q8_0" in llm.facts.memory
        assert len(llm.facts.notices) == 1
        assert np.isfinite(llm.logits(PROMPT)).all()
    types = {name: run_as for name, _, _, run_as in _octavo.inspect(str(unusual)).tensor_types}
    assert (types["IQ4_NL"], types["F16"]) == ("Q8_0", "F16")


def test_what_was_asked_for_needs_no_warning(unusual: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with octavo.LLM(unusual, dtype="f16", kv_cache_bytes="4MiB") as llm:
            assert "IQ4_NL as F16" in llm.facts.memory
            assert llm.facts.notices == []


def test_a_type_that_nobody_reads_is_shown_and_refused(unusual: Path) -> None:
    data = unusual.read_bytes().replace(struct.pack("<QI", 64, IQ4_NL), struct.pack("<QI", 64, 9))
    unusual.write_bytes(data)
    types = {name: run_as for name, _, _, run_as in _octavo.inspect(str(unusual)).tensor_types}
    assert types["Q8_1"] is None
    with pytest.raises(octavo.ModelLoadError, match=r"tensor type `Q8_1` of .* is not supported; supported: F32, F16"):
        octavo.LLM(unusual, kv_cache_bytes="4MiB")


@pytest.mark.parametrize("model", ["tiny/qwen3/f32", "gguf/llama-q4_0.gguf"])
def test_dtype(model: str) -> None:
    path = str(ORACLE / model)
    with octavo.LLM(path, device="reference", kv_cache_bytes="4MiB") as llm:
        wanted = llm.logits(PROMPT)
    found = {}
    for dtype in ("auto", "f32", "bf16", "f16", "q8_0"):
        with octavo.LLM(path, dtype=dtype, kv_cache_bytes="4MiB") as llm:
            found[dtype] = (llm.facts.weights_bytes, float(np.abs(llm.logits(PROMPT) - wanted).max()))
    sizes = {dtype: size for dtype, (size, _) in found.items()}
    assert sizes["f32"] == 2 * sizes["bf16"] == 2 * sizes["f16"]
    assert sizes["q8_0"] < sizes["f16"]
    # Decoded weights are exact, rounded ones less so, and bytes least.
    errors = {dtype: error for dtype, (_, error) in found.items()}
    assert errors["f32"] <= 1e-4
    assert errors["f16"] <= 0.02
    assert errors["bf16"] <= 0.2
    assert errors["q8_0"] <= 0.3


def test_mean_nll_is_within_one_percent(llm: octavo.LLM) -> None:
    prompts = list(real_prompts().values())
    results = llm.generate([prompt["ids"] for prompt in prompts], GREEDY, max_tokens=1, prompt_logprobs=0)
    nlls = [-np.mean([p.logprob for p in result.prompt_logprobs[1:]]) for result in results]
    wanted = [prompt["prompt_mean_nll"] for prompt in prompts]
    assert abs(np.mean(nlls) / np.mean(wanted) - 1) <= 0.01


def test_a_cache_of_integers_is_half_as_large_and_about_as_exact(smollm2: str) -> None:
    prompts = [prompt["ids"] for prompt in real_prompts().values() if prompt["n"] <= 400]
    logprobs, sizes = {}, {}
    for dtype in ("f32", "bf16", "int8"):
        with octavo.LLM(smollm2, kv_cache_dtype=dtype, kv_cache_bytes="64MiB") as llm:
            assert dtype in llm.facts.memory.split("KV cache")[1]
            logits = np.concatenate([llm.logits(ids, positions="all") for ids in prompts]).astype(np.float64)
            sizes[dtype] = llm.facts.block_bytes
        logits -= logits.max(axis=1, keepdims=True)
        logprobs[dtype] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    # Of 64 components in 4 bytes, or in one each and 4 for the scale.
    assert (sizes["int8"] * 256, sizes["bf16"] * 2) == (sizes["f32"] * 68, sizes["f32"])
    wanted = np.exp(logprobs["f32"])
    off = {dtype: float((wanted * (logprobs["f32"] - logprobs[dtype])).sum(axis=1).mean()) for dtype in sizes}
    # The mean divergence of bf16 is that of activations which are rounded to another byte.
    assert off["int8"] < 1.5 * off["bf16"], off


def test_a_cache_of_integers_is_the_same_everywhere() -> None:
    """Of a model whose keys have a bias, which the cache leaves out."""
    found = {}
    for device, dtype in (("cpu", "f32"), ("cpu", "int8"), ("reference", "int8")):
        how = {"device": device, "kv_cache_dtype": dtype, "kv_cache_bytes": "4MiB"}
        with octavo.LLM(ORACLE / "tiny/qwen2/bf16", **how) as llm:
            found[device, dtype] = llm.logits(PROMPT, positions="all")
    exact, cpu, reference = found.values()
    largest = np.abs(exact).max()
    # bf16 takes them a fortieth off: random models look at few positions sharply.
    assert 0.0 < np.abs(cpu - exact).max() < 0.08 * largest
    assert np.abs(cpu - reference).max() < 0.02 * largest


def test_answers_over_a_cache_of_integers_do_not_depend_on_the_batch(smollm2: str) -> None:
    prompts = [prompt["ids"] for prompt in real_prompts().values() if prompt["n"] <= 400][:6]
    params = octavo.SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2)
    alone = []
    for threads, tokens in ((1, 64), (2, 17)):
        how = {"threads": threads, "max_num_batched_tokens": tokens, "max_num_seqs": 8}
        with octavo.LLM(smollm2, kv_cache_dtype="int8", kv_cache_bytes="64MiB", **how) as llm:
            alone = alone or [fingerprint(llm.generate(prompt, params)) for prompt in prompts]
            together = llm.generate(prompts, params)
            assert [fingerprint(result) for result in together] == alone
