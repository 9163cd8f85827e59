"""Every call ends, whatever becomes of the engine; and what would break it is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import octavo
from conftest import GREEDY, ORACLE, settled


def test_closing_while_event_loops_submit_leaves_nobody_waiting(tiny_path: str) -> None:
    for _ in range(10):
        llm = octavo.LLM(tiny_path, kv_cache_bytes="4MiB")
        outcomes: list[BaseException | octavo.Result] = []

        def submit(llm: octavo.LLM = llm, outcomes: list[Any] = outcomes) -> None:
            async def main() -> None:
                for _ in range(200):
                    await llm.agenerate([1], GREEDY, max_tokens=5)

            try:
                asyncio.run(asyncio.wait_for(main(), 30))
            except octavo.EngineClosedError as error:
                outcomes.append(error)

        loops = [threading.Thread(target=submit) for _ in range(4)]
        for loop in loops:
            loop.start()
        time.sleep(0.02)
        closers = [threading.Thread(target=llm.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in closers + loops:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert len(outcomes) == len(loops)


def test_the_anatomy_of_what_a_close_ended_adds_up(smollm2: str) -> None:
    llm = octavo.LLM(smollm2, kv_cache_bytes="64MiB", max_model_len=1024)
    stream = llm.stream([1, 2, 3], GREEDY, max_tokens=900)
    next(stream)
    llm.close()
    with pytest.raises(octavo.EngineClosedError) as caught:
        _ = stream.result
    partial = caught.value.partial
    assert partial.usage.completion_tokens == len(partial.token_ids) > 0
    anatomy = partial.anatomy
    assert sum(anatomy.parts_ns.values()) == anatomy.total_ns
    assert anatomy.stream_s < anatomy.total_s


def test_text_of_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ORACLE / "tiny" / "llama-tied-rope3" / "f32", tmp_path / "model"))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    beyond = json.loads((folder / "config.json").read_text())["vocab_size"]
    added = {**tokenizer["added_tokens"][-1], "id": beyond, "content": "<beyond>", "special": True}
    tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer))
    with octavo.LLM(folder, kv_cache_bytes="4MiB") as llm:
        assert llm.tokenize("<beyond>").ids[-1] == beyond
        with pytest.raises(octavo.InvalidRequestError, match=f"is {beyond}, the vocabulary has {beyond} tokens"):
            llm.generate("<beyond>", max_tokens=1)
        assert len(llm.generate("hello", GREEDY, max_tokens=1).token_ids) == 1


def test_logits_that_are_no_numbers_fail_the_request_alone(tmp_path: Path) -> None:
    """One token's embedding is broken; whoever has it in the prompt fails, also in a chunk that draws nothing."""
    folder = Path(shutil.copytree(ORACLE / "tiny" / "llama-untied-sharded" / "bf16", tmp_path / "model"))
    broken = 7
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        size = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + size])
        if "model.embed_tokens.weight" in head:
            info = head["model.embed_tokens.weight"]
            row = 2 * info["shape"][1]
            begin = 8 + size + info["data_offsets"][0] + broken * row
            data[begin : begin + row] = b"\xc0\x7f" * info["shape"][1]
            file.write_bytes(data)
    with octavo.LLM(folder, kv_cache_bytes="4MiB", max_num_seqs=4, max_num_batched_tokens=16) as llm:
        prompt = [broken] + [1] * 40
        with pytest.raises(octavo.OctavoError, match="logit"):
            llm.generate(prompt, GREEDY, max_tokens=4, prompt_logprobs=1)
        for positions in ("last", "all"):
            with pytest.raises(octavo.OctavoError, match="logit"):
                llm.logits(prompt, positions=positions)
        assert len(llm.generate([1] * 40, GREEDY, max_tokens=4).token_ids) == 4
        assert settled(llm).blocks_owned == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 10**13), ("threads", 5000), ("max_queue", 2**64 - 64), ("max_num_seqs", 10**9), ("block_size", 24)],
)
def test_settings_beyond_reason_are_named(tiny_path: str, name: str, value: int) -> None:
    with pytest.raises(octavo.ModelLoadError, match=name):
        octavo.LLM(tiny_path, **{name: value})  # type: ignore[arg-type]


def test_a_deadline_far_away_is_no_deadline(tiny: octavo.LLM) -> None:
    assert len(tiny.generate([1], GREEDY, max_tokens=3, deadline_s=18446744073.71).token_ids) == 3


def test_a_named_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(octavo.ModelLoadError, match="regular file"):
        octavo.LLM(tmp_path / "model.gguf")


def test_a_batch_of_an_event_loop_is_as_patient_as_one_of_a_thread(tiny_path: str) -> None:
    prompts = [[i] for i in range(1, 20)]
    with octavo.LLM(tiny_path, kv_cache_bytes="4MiB", max_num_seqs=2, max_queue=1) as llm:
        wanted = [result.token_ids for result in llm.generate(prompts, GREEDY, max_tokens=5)]
        found = asyncio.run(llm.agenerate(prompts, GREEDY, max_tokens=5))
        assert [result.token_ids for result in found] == wanted
        for n in (0, "3"):
            with pytest.raises(octavo.InvalidRequestError, match="n must"):
                asyncio.run(llm.agenerate([[1], [2]], GREEDY, n=n))


def test_a_cancelled_one_that_waits_hears_of_it_before_the_next_step(llm: octavo.LLM) -> None:
    """A step that reads a long prompt takes a while; what ends before it is told before it."""
    with llm.stream([3] * 1500, GREEDY, max_tokens=2) as busy:
        begun = time.monotonic()
        with pytest.raises(octavo.DeadlineExceededError):
            llm.generate([5] * 1500, GREEDY, max_tokens=2, deadline_s=0.0)
        told_after = time.monotonic() - begun
        whole = busy.result.anatomy.total_s
    assert told_after < whole


def test_a_stream_stays_in_its_event_loop(tiny: octavo.LLM) -> None:
    stream = tiny.astream([1], GREEDY, max_tokens=300)
    asyncio.run(asyncio.wait_for(anext(stream), 10))
    with pytest.raises(octavo.OctavoError, match="another event loop"):
        asyncio.run(asyncio.wait_for(anext(stream), 10))
    stream.cancel()
