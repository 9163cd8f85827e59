"""`verify` asks again, alone: whatever was going on when the answer was made, it is the same, bit for bit."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import octavo
from conftest import GREEDY, ORACLE, given_up, settled
from octavo import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no seed": {},
    "several, no seed": {"n": 3},
    "several": {"n": 4, "seed": 7, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 20, "seed": 2**64 - 1},
    "prompt logprobs": {"n": 2, "prompt_logprobs": 2},
    "regex": {"regex": "[a-e]{3,9}", "n": 2},
    "schema": {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "max_tokens": 40},
    "banned words": {"bad_words": ["the", "a b"], "min_tokens": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request(tiny: octavo.LLM, kind: str) -> None:
    params = {"max_tokens": 20, "logprobs": 2, **KINDS[kind]}
    result = tiny.generate(list(range(40)), **params)
    verification = tiny.verify(result)
    assert verification, str(verification)
    tokens = sum(len(choice.token_ids) for choice in result.choices)
    assert verification.tokens == tokens > 0
    assert verification.logprobs == tokens + (39 if kind == "prompt logprobs" else 0)
    assert verification.limits == ()
    assert verification.difference is None
    assert str(verification).startswith("equal to a run alone, bit for bit")


def test_stop_strings(llm: octavo.LLM) -> None:
    result = llm.generate("One, two, three,", stop=["six", "fi"], max_tokens=40, temperature=0.5, n=3, logprobs=0)
    assert "stop" in {choice.finish_reason for choice in result.choices}
    verification = llm.verify(result)
    assert verification, str(verification)


def test_seeds_are_told_and_give_the_same_choice(tiny: octavo.LLM) -> None:
    result = tiny.generate([1, 2, 3], n=3, max_tokens=12)
    assert len({choice.seed for choice in result.choices}) == 3
    assert len({choice.request_id for choice in result.choices}) == 3
    for choice in result.choices:
        assert tiny.generate([1, 2, 3], seed=choice.seed, max_tokens=12).token_ids == choice.token_ids


def test_nothing_comes_from_the_cache(tiny: octavo.LLM) -> None:
    prompt = [random.Random(3).randrange(200) for _ in range(64)]
    tiny.generate(prompt, max_tokens=1)
    result = tiny.generate(prompt, max_tokens=4, logprobs=0)
    assert result.usage.cached_tokens == 63
    cached = settled(tiny).tokens_cached
    assert tiny.verify(result)
    assert settled(tiny).tokens_cached == cached


def test_without_logprobs_it_says_so(tiny: octavo.LLM) -> None:
    verification = tiny.verify(tiny.generate([1, 2], max_tokens=5, ignore_eos=True))
    assert verification
    assert verification.tokens == 5
    assert verification.logprobs == 0
    assert "no logprobs" in verification.limits[0]
    assert "no logprobs" in str(verification)


def test_what_was_given_up_is_compared_as_far_as_it_got(tiny: octavo.LLM) -> None:
    result, _ = given_up(tiny, [5, 6], after=3, logprobs=1)
    assert result.finish_reason == "cancelled"
    verification = tiny.verify(result)
    assert verification
    assert verification.tokens == len(result.token_ids) >= 3
    assert "'cancelled'" in verification.limits[0]


def test_a_deadline_before_the_first_token_leaves_nothing_to_compare(tiny: octavo.LLM) -> None:
    with pytest.raises(octavo.DeadlineExceededError) as caught:
        tiny.generate([5, 6], deadline_s=0.0, max_tokens=400)
    assert caught.value.partial is not None
    verification = tiny.verify(caught.value.partial)
    assert verification.tokens == 0
    assert "'deadline': it has no tokens" in verification.limits[0]


def test_what_the_answer_was_made_with_is_told(tiny_path: str, tmp_path: Path) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="1MiB", kv_cache_dtype="f16") as llm:
        result = llm.generate(list(range(30)), GREEDY, max_tokens=30, logprobs=0)
    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_path, copy)
    same = {"kv_cache_dtype": "f16", "threads": 1, "block_size": 32, "max_num_seqs": 3, "seed": 5}
    with octavo.LLM(copy, kv_cache_bytes="1MiB", **same) as other:
        verification = other.verify(result)
        assert verification, str(verification)
        assert verification.limits == ()
    other_model = ORACLE / "gguf" / "llama-q4_0.gguf"
    for model, settings, told in [
        (tiny_path, {"kv_cache_dtype": "f32"}, "kv_cache_dtype f16, this model has f32"),
        (
            tiny_path,
            {"dtype": "f32", "kv_cache_dtype": "f16"},
            "dtype q8_0 (19 matrices) and f16 (3 matrices), this model has f32",
        ),
        (tiny_path, {"device": "reference", "kv_cache_dtype": "f16"}, "device cpu, this model has reference"),
        (other_model, {"kv_cache_dtype": "f16"}, "llama-q4_0.gguf ("),
    ]:
        with octavo.LLM(model, kv_cache_bytes="1MiB", **settings) as other:
            verification = other.verify(result)
        assert len(verification.limits) == 1, verification
        assert told in verification.limits[0]
        assert told in str(verification)


@pytest.mark.parametrize(("asked", "same"), [("auto", "f16"), ("f16", "auto")])
def test_weights_are_compared_as_they_are_run_whatever_was_asked(asked: str, same: str) -> None:
    path = ORACLE / "gguf" / "llama-f16.gguf"
    settings: dict[str, Any] = {"kv_cache_bytes": "1MiB", "kv_cache_dtype": "f32"}
    with octavo.LLM(path, dtype=asked, **settings) as llm:
        result = llm.generate(list(range(30)), GREEDY, max_tokens=5, logprobs=0)
    with octavo.LLM(path, dtype=same, **settings) as alike:
        verification = alike.verify(result)
    assert verification, str(verification)
    assert verification.limits == ()
    with octavo.LLM(path, dtype="bf16", **settings) as unlike:
        (limit,) = unlike.verify(result).limits
    assert "dtype f16, this model has bf16" in limit


@pytest.mark.parametrize("nothing", [None, 5, "text"])
def test_what_is_no_result(tiny: octavo.LLM, nothing: Any) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=r"result must be an octavo\.Result, not a"):
        tiny.verify(nothing)


def test_a_difference_is_found_and_told(tiny: octavo.LLM) -> None:
    prompt = list(range(30))
    result = tiny.generate(prompt, GREEDY, max_tokens=30, logprobs=0)
    # The same weights, rounded otherwise: close, and never the same bits.
    with octavo.LLM(ORACLE / "gguf" / "llama-q4_0.gguf", kv_cache_bytes="4MiB") as other:
        verification = other.verify(result)
    assert not verification
    difference = verification.difference
    assert difference is not None
    assert difference.choice == 0
    assert difference.index == verification.tokens
    assert difference.logprob != difference.alone_logprob
    assert difference.token_id == result.token_ids[difference.index]
    assert str(difference.token_id) in str(verification)
    assert "different from a run alone" in str(verification)


def test_an_answer_of_an_engine_with_other_settings(tiny: octavo.LLM, tiny_path: str) -> None:
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "threads": 1, "block_size": 32, "max_queue": 0}
    with octavo.LLM(tiny_path, kv_cache_bytes="1MiB", enable_prefix_caching=False, **settings) as odd:
        for prompt in (list(range(3)), list(range(70))):
            result = odd.generate(prompt, n=3, max_tokens=9, logprobs=1)
            assert tiny.verify(result), str(tiny.verify(result))


def test_other_settings_are_told_by_the_end(tiny: octavo.LLM, tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="1MiB", max_model_len=20) as short:
        result = short.generate(list(range(10)), GREEDY, max_tokens=50, logprobs=0)
    verification = tiny.verify(result)
    assert verification.difference is not None
    assert verification.difference.token_id is None
    assert verification.difference.index == verification.tokens == 10


# ---- the answer does not depend on the weather -----------------------------------------------------------------------


def test_every_batch_size_from_1_to_64(tiny_path: str) -> None:
    """64 requests end one step after another, so that every size of a batch occurs; three times, in another order."""
    rng = random.Random(11)
    prompts = [[rng.randrange(200) for _ in range(rng.choice([1, 2, 15, 16, 17, 33]))] for _ in range(64)]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=124, ignore_eos=True, logprobs=1)
        for i in range(64)
    ]
    with octavo.LLM(tiny_path, kv_cache_bytes="8MiB", max_num_seqs=64, itl_target_ms=None) as llm:
        alone = [answer(llm.generate(prompt, param)) for prompt, param in zip(prompts, params, strict=True)]
        seen: set[int] = set()
        for _ in range(3):
            order = rng.sample(range(64), 64)
            cut = [replace(params[who], max_tokens=60 + rank) for rank, who in enumerate(order)]
            results = llm.generate([prompts[who] for who in order], cut)
            for rank, (who, result) in enumerate(zip(order, results, strict=True)):
                assert answer(result) == alone[who][: 60 + rank], f"request {who} in place {rank}"
            seen |= sizes(results)
    # Whoever comes a step later than the others ends together with another one.
    assert len(seen & set(range(1, 65))) >= 60, sorted(set(range(1, 65)) - seen)


def answer(result: octavo.Result) -> list[Any]:
    logprobs = result.logprobs or []
    return [(token, p.logprob.hex(), p.top) for token, p in zip(result.token_ids, logprobs, strict=True)]


def sizes(results: list[octavo.Result]) -> set[int]:
    """Of the batches in which each was without the one before it, who had the same steps but for that one."""
    steps = [result.anatomy.steps for result in results]
    others = [round(result.anatomy.neighbours * result.anatomy.steps) for result in results]
    last = zip(itertools.pairwise(steps), itertools.pairwise(others), strict=True)
    return {after - before + 1 for (one, two), (before, after) in last if two == one + 1}


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_are_verified(tiny: octavo.LLM, tiny_path: str, seed: int) -> None:
    """Threads submit, give up and wait as they like, over an engine too small for them; what they got is verified on a
    roomy one."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    settings = {
        "max_num_seqs": rng.choice([3, 8, 64]),
        "max_num_batched_tokens": rng.choice([64, 80, 512]),
        "itl_target_ms": rng.choice([None, 0.2]),
        "enable_prefix_caching": rng.random() < 0.8,
        "threads": rng.choice([1, 2]),
    }
    results: list[octavo.Result] = []
    with octavo.LLM(
        tiny_path, kv_cache_bytes=rng.choice([20, 60, 200]) * tiny.facts.block_bytes, max_model_len=200, **settings
    ) as llm:
        threads = [threading.Thread(target=_caller, args=(llm, 100 * seed + i, results)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = settled(llm)
        assert stats.blocks_owned == 0
        assert stats.blocks_free + stats.blocks_remembered == stats.blocks
    assert len(results) == 12 * 6
    for result in results:
        verification = tiny.verify(result)
        assert verification, str(verification)
    assert sum(len(result.token_ids) for result in results) > 200


def _caller(llm: octavo.LLM, seed: int, results: list[octavo.Result]) -> None:
    rng = random.Random(seed)
    stem = [random.Random(rng.randrange(3)).randrange(200) for _ in range(48)]
    for _ in range(6):
        prompt = stem[: rng.choice([0, 15, 16, 17, 48])] + [rng.randrange(200) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_k=rng.choice([0, 10]),
            n=rng.choice([1, 1, 1, 3]),
            seed=rng.choice([None, rng.randrange(2**64)]),
            max_tokens=rng.randint(1, 40),
            logprobs=rng.choice([None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, 0]),
            regex=rng.choice([None, None, None, "[a-z ]{1,30}"]),
            stop=rng.choice([None, ["e", "th"]]),
            ignore_eos=rng.random() < 0.5,
        )
        deadline = rng.choice([None, None, 0.02])
        keywords: dict[str, Any] = {"priority": rng.randint(-1, 1), "deadline_s": deadline, "user": f"user {seed % 3}"}
        try:
            with llm.stream(prompt, params, **keywords) as stream:
                for taken, _ in enumerate(stream):
                    if taken > 5 and rng.random() < 0.05:
                        stream.cancel()
                results.append(stream.result)
        except octavo.DeadlineExceededError as error:
            results.append(error.partial)  # type: ignore[arg-type]
