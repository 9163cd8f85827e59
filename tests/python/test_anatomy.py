"""Where the time went: all of it, and nothing twice."""

from __future__ import annotations

import time

import pytest

import octavo
from conftest import GREEDY


def assert_partition(anatomy: octavo.Anatomy) -> None:
    parts = anatomy.parts_ns
    assert list(parts) == [
        "tokenize",
        "queue_sequences", "queue_blocks", "queue_prefix", "queue_budget",
        "prefill_computing", "prefill_waiting",
        "decode_computing", "decode_waiting", "decode_preempted",
        "stream",
    ]  # fmt: skip
    assert all(ns >= 0 for ns in parts.values())
    assert sum(parts.values()) == anatomy.total_ns
    stages = anatomy.tokenize_s + anatomy.queue_s + anatomy.prefill_s + anatomy.decode_s + anatomy.stream_s
    assert abs(stages - anatomy.total_s) < 1e-9
    if anatomy.ttft_s is not None:
        assert abs(anatomy.ttft_s - (anatomy.tokenize_s + anatomy.queue_s + anatomy.prefill_s)) < 1e-9


def test_the_parts_are_the_whole(llm: octavo.LLM) -> None:
    begun = time.monotonic_ns()
    result = llm.generate("Why is the sky blue? Because", GREEDY, max_tokens=20)
    wall = time.monotonic_ns() - begun
    anatomy = result.anatomy
    assert_partition(anatomy)
    assert anatomy.total_ns <= wall
    # What lies around the engine's door is Python's, and little.
    assert wall - anatomy.total_ns < 20e6
    assert anatomy.prompt_tokens == result.usage.prompt_tokens == len(result.prompt_token_ids)
    assert anatomy.completion_tokens == result.usage.completion_tokens == 20
    assert anatomy.steps >= 20
    assert anatomy.preemptions == 0


def test_inter_token_times_are_the_decode(llm: octavo.LLM) -> None:
    anatomy = llm.generate("One, two,", GREEDY, max_tokens=16).anatomy
    gaps = anatomy.inter_token_times
    assert gaps.shape == (15,)
    assert (gaps > 0).all()
    assert anatomy.tpot_s is not None
    assert abs(gaps.mean() - anatomy.tpot_s) < 1e-9
    assert abs(gaps.sum() - anatomy.decode_s) < 1e-6


def test_a_batch_shares_its_steps(tiny: octavo.LLM) -> None:
    results = tiny.generate([[i + 1, 2, 3] for i in range(8)], GREEDY, max_tokens=60)
    for result in results:
        assert_partition(result.anatomy)
    assert max(result.anatomy.neighbours for result in results) > 1
    alone = tiny.generate([40, 2, 3], GREEDY, max_tokens=30).anatomy
    assert alone.neighbours == 0
    assert alone.block_seconds > 0
    assert alone.byte_seconds == alone.block_seconds * tiny.facts.block_bytes


def test_cancelled_and_late_requests_have_one_too(tiny: octavo.LLM) -> None:
    with tiny.stream([1], GREEDY, max_tokens=400) as stream:
        next(stream)
    assert_partition(stream.result.anatomy)
    with pytest.raises(octavo.DeadlineExceededError) as late:
        tiny.generate([1], GREEDY, max_tokens=400, deadline_s=0.0)
    assert late.value.partial is not None
    assert_partition(late.value.partial.anatomy)


def test_it_is_drawn(llm: octavo.LLM) -> None:
    result = llm.generate("Hello", GREEDY, max_tokens=8)
    picture = str(result.anatomy)
    for stage in ("tokenize", "queue", "prefill", "decode", "stream"):
        assert any(line.startswith(stage) for line in picture.splitlines())
    assert all(len(line) <= 78 for line in picture.splitlines())
    assert set(result.anatomy.to_dict()) >= {"total_ns", "parts_ns", "ttft_s", "tpot_s"}
    assert "8 tokens" in repr(result.anatomy)
