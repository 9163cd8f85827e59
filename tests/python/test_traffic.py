"""Other people's traffic: it may cost time, and nothing else."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

import pytest

import octavo
from conftest import fingerprint, settled


@pytest.mark.parametrize("seed", range(12))
def test_a_random_history(tiny_path: str, seed: int) -> None:
    """Users, priorities, deadlines, cancelled calls, several answers, and a cache that is too small for all of them."""
    chance = random.Random(seed)
    shared = [chance.randrange(1, 90) for _ in range(40)]
    calls: list[tuple[list[int], dict[str, Any], float | None]] = []
    for _ in range(24):
        own = [chance.randrange(1, 90) for _ in range(chance.randint(1, 30))]
        prompt = shared[: chance.choice([0, 15, 16, 17, 33])] + own
        keywords = {
            "max_tokens": chance.randint(1, 40),
            "n": chance.choice([1, 1, 3]),
            "seed": chance.randrange(1000),
            "ignore_eos": True,
            "logprobs": chance.choice([None, 2]),
        }
        calls.append((prompt, keywords, chance.choice([None, None, chance.random() / 50])))

    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as fresh:
        block_bytes = fresh.facts.block_bytes
        wanted = [fresh.generate(prompt, cache_salt=f"{i}", **kw) for i, (prompt, kw, _) in enumerate(calls)]

    async def one(llm: octavo.LLM, i: int) -> octavo.Result | None:
        prompt, keywords, given_up = calls[i]
        options = {"user": chance.choice([None, "a", "b"]), "priority": chance.randint(-1, 1)}
        options["deadline_s"] = chance.choice([None, None, None, 0.01])
        await asyncio.sleep(chance.random() / 50)
        try:
            return await asyncio.wait_for(llm.agenerate(prompt, **keywords, **options), given_up)
        except octavo.DeadlineExceededError as error:
            return error.partial
        except asyncio.TimeoutError:
            return None

    async def everybody(llm: octavo.LLM) -> list[octavo.Result | None]:
        return await asyncio.gather(*(one(llm, i) for i in range(len(calls))))

    with octavo.LLM(tiny_path, kv_cache_bytes=40 * block_bytes, max_model_len=160, max_num_seqs=6) as llm:
        got = asyncio.run(everybody(llm))
        stats = settled(llm)
    assert stats.blocks_owned == 0
    assert stats.blocks_free + stats.blocks_remembered == stats.blocks
    assert any(result is not None for result in got)
    for result, want in zip(got, wanted, strict=True):
        if result is None:
            continue
        for choice, whole in zip(result.choices, want.choices, strict=True):
            assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            assert choice.finish_reason in (whole.finish_reason, "deadline")
        if all(choice.finish_reason != "deadline" for choice in result.choices):
            assert fingerprint(result) == fingerprint(want)


def test_a_light_user_does_not_wait_for_a_heavy_one(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", max_num_seqs=1) as llm, ExitStack() as streams:
        for i in range(50):
            streams.enter_context(llm.stream([i + 1, 2], user="heavy", max_tokens=100, ignore_eos=True))
        llm.generate([1, 2, 3], user="light", max_tokens=5)
        assert llm.stats().finished < 10


def test_every_request_hears_what_to_expect(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", max_num_seqs=1, max_queue=200) as llm, ExitStack() as streams:
        assert llm.generate([1, 2, 3], max_tokens=2).anatomy.predicted_ttft_s is None
        # A hundred answers tell how long one takes.
        results = llm.generate([[i % 90 + 1] for i in range(100)], max_tokens=20, ignore_eos=True)
        predicted = results[-1].anatomy.predicted_ttft_s
        assert predicted is not None
        assert predicted > 0
        assert results[-1].anatomy.to_dict()["predicted_ttft_s"] == predicted
        for i in range(150):
            streams.enter_context(llm.stream([i % 90 + 1, 2], max_tokens=200, ignore_eos=True))
        # Dozens are before it, and all are one user's: it cannot be in time. Who has read the counts may rely on it.
        assert llm.stats().waiting > 100
        with pytest.raises(octavo.DeadlineExceededError, match="cannot be met") as late:
            llm.generate([1], deadline_s=1e-4)
        assert late.value.partial is None
        assert late.value.retry_after is not None
        assert late.value.retry_after > 0
