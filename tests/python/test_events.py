"""Events tell whoever reads what happens; nobody waits for who reads slowly."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

import octavo
from conftest import GREEDY, python, settled


def test_the_life_of_a_request(tiny: octavo.LLM) -> None:
    prompt = [(7 * i) % 200 for i in range(40)]
    with tiny.events() as events:
        result = tiny.generate(prompt, GREEDY, max_tokens=30, n=2, user="ada", cache_salt="life")
        settled(tiny)
        told = events.take()
    assert [event.sequence_number for event in told] == list(
        range(told[0].sequence_number, told[-1].sequence_number + 1)
    )
    assert [event.time_ns for event in told] == sorted(event.time_ns for event in told)
    for choice in result.choices:
        own = [event.to_dict() for event in told if event.request_id == choice.request_id]
        assert [event["type"] for event in own] == ["queued", "admitted", "first_token", "finished"]
        assert own[0] == {"type": "queued", "request_id": choice.request_id, "user": "ada", "prompt_tokens": 40}
        assert own[-1]["finish_reason"] == choice.finish_reason
        assert own[-1]["completion_tokens"] == len(choice.token_ids)
    # The second choice shares what the first has read.
    cached = [event.to_dict()["cached_tokens"] for event in told if event.type == "admitted"]
    assert cached == [0, 39]


def test_blocks_as_routers_want_them(tiny: octavo.LLM) -> None:
    prompt = [(11 * i) % 200 for i in range(50)]
    stored: dict[str, list[dict[str, Any]]] = {}
    for salt in ("", "a tenant"):
        with tiny.events() as events:
            tiny.generate(prompt, GREEDY, max_tokens=20, cache_salt=salt)
            settled(tiny)
            stored[salt] = [event.to_dict() for event in events.take() if event.type == "BlockStored"]
    for blocks in stored.values():
        assert len(blocks) == (50 + 19) // 16
        assert all(set(block) == KEYS for block in blocks)
        # A chain from the first block on, and its tokens are the prompt's.
        parents = [None, *(block["block_hashes"][0] for block in blocks)]
        assert [block["parent_block_hash"] for block in blocks] == parents[:-1]
        tokens = [token for block in blocks for token in block["token_ids"]]
        assert tokens[:50] == prompt
        assert all(block["block_size"] == len(block["token_ids"]) == 16 for block in blocks)
        assert all(isinstance(block["block_hashes"][0], int) for block in blocks)
    names = [{block["block_hashes"][0] for block in blocks} for blocks in stored.values()]
    assert not names[0] & names[1]


KEYS = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "group_idx",
    "medium",
}


def test_what_becomes_of_a_conversation(tiny: octavo.LLM) -> None:
    with tiny.events() as events:
        with tiny.session(ttl_s=60) as session:
            first = session.generate([1, 2, 3], GREEDY, max_tokens=4)
            session.generate([1, 2, 3, *first.token_ids, 5], GREEDY, max_tokens=4)
        settled(tiny)
        told = [event.to_dict() for event in events.take() if event.type == "session"]
    assert {event["session_id"] for event in told} == {session.id}
    assert [event["kind"] for event in told] == ["kept", "resumed", "kept", "closed"]
    assert [event["tokens"] for event in told] == [6, 6, 11, 11]
    assert all(event["blocks"] == 1 for event in told)


def test_a_mirror_of_the_cache(tiny_path: str, tiny: octavo.LLM) -> None:
    """Whoever follows stores and removals has what the engine remembers, evictions and preemptions included."""
    with (
        octavo.LLM(tiny_path, kv_cache_bytes=12 * tiny.facts.block_bytes, max_model_len=120, max_num_seqs=4) as llm,
        llm.events(capacity=100_000) as events,
    ):
        prompts = [[(i * j) % 200 for j in range(1, 30)] for i in range(1, 31)]
        llm.generate(prompts, GREEDY, max_tokens=40)
        stats = settled(llm)
        mirror: set[int] = set()
        kinds: Counter[str] = Counter()
        for event in events.take():
            told = event.to_dict()
            kinds[event.type] += 1
            if event.type == "BlockStored":
                mirror |= set(told["block_hashes"])
            elif event.type == "BlockRemoved":
                mirror -= set(told["block_hashes"])
        assert events.dropped == 0
        assert kinds["finished"] == kinds["queued"] == 30
        assert kinds["preempted"] == stats.preemptions > 0
        assert kinds["admitted"] == 30 + stats.preemptions
        assert kinds["BlockRemoved"] > 10
        # A block may also be remembered by the end of a prompt alone, which no router asks for.
        assert 0 < len(mirror) <= stats.blocks_remembered


def test_several_readers_and_a_slow_one(tiny: octavo.LLM) -> None:
    with tiny.events() as one, tiny.events() as other, tiny.events(capacity=3) as slow:
        tiny.generate([[i] for i in range(1, 20)], GREEDY, max_tokens=5)
        settled(tiny)
        first, second, last = one.take(), other.take(), slow.take()
    assert [event.to_dict() for event in first] == [event.to_dict() for event in second]
    assert len(first) >= 19 * 4
    assert [event.sequence_number for event in last] == [event.sequence_number for event in first[-3:]]
    assert slow.dropped == len(first) - 3
    assert one.dropped == 0


def test_iterating_waits_and_ends(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="1MiB") as llm:
        events, seen = llm.events(), []
        reader = threading.Thread(target=lambda: seen.extend(event.type for event in events))
        reader.start()
        assert llm.events().next(0.01) is None
        llm.generate([1, 2], GREEDY, max_tokens=3)
        closed = llm.events()
        closed.close()
        assert list(closed) == []
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert seen == ["queued", "admitted", "first_token", "finished"]
    with pytest.raises(octavo.EngineClosedError):
        llm.events()


def test_a_recording_clears_the_cache_and_says_so(tiny_path: str, tmp_path: Any) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="1MiB") as llm, llm.events() as events:
        llm.generate(list(range(40)), GREEDY, max_tokens=3)
        with llm.record(tmp_path / "run.log"):
            pass
        assert settled(llm).blocks_remembered == 0
        assert events.take()[-1].type == "AllBlocksCleared"
        assert llm.generate(list(range(40)), GREEDY, max_tokens=3).usage.cached_tokens == 0


def test_an_impossible_capacity(tiny: octavo.LLM) -> None:
    for capacity in (0, 1 << 40, -1, 10**30, 1.5, "many"):
        with pytest.raises(octavo.InvalidRequestError, match="capacity"):
            tiny.events(capacity)  # type: ignore[arg-type]


def test_how_long_is_waited(tiny: octavo.LLM) -> None:
    with tiny.events() as events:
        for patience in (float("nan"), -1, -0.5, float("-inf"), 10**400, "x"):
            with pytest.raises(octavo.InvalidRequestError, match="patience_s must be a number of seconds from 0 up"):
                events.next(patience)  # type: ignore[arg-type]
        assert events.next(0) is None
        for patience in (float("inf"), 1e300, 10**30):
            later = threading.Timer(0.2, lambda: tiny.generate([1], GREEDY, max_tokens=1))
            later.start()
            assert events.next(patience) is not None, patience
            later.join()
            settled(tiny)
            events.take()


def test_waiting_for_ever_can_be_interrupted(tiny_path: str) -> None:
    done = python(
        """
import octavo, os, signal, sys, threading
with octavo.LLM(sys.argv[1], kv_cache_bytes="1MiB") as llm, llm.events() as events:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        events.next(float("inf"))
    except KeyboardInterrupt:
        print("interrupted")
""",
        tiny_path,
    )
    assert done.stdout == "interrupted\n", done.stderr
