"""Streams: what is read piece by piece is the whole, and what is not read is not computed."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import octavo
from conftest import GREEDY, ORACLE, fingerprint, given_up, settled


def test_the_pieces_are_the_whole(llm: octavo.LLM) -> None:
    with llm.stream("Once upon a time", GREEDY, max_tokens=30, logprobs=2) as stream:
        chunks = list(stream)
    result = stream.result
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert b"".join(chunk.bytes for chunk in chunks) == result.text.encode()
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [p.token_id for chunk in chunks for p in chunk.logprobs or []] == result.token_ids
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert llm.detokenize(result.token_ids) == result.text
    assert fingerprint(result) == fingerprint(llm.generate("Once upon a time", GREEDY, max_tokens=30, logprobs=2))


def test_text_is_whole_characters(llm: octavo.LLM) -> None:
    text = "日本語 🌧️🚢 ünïcödé"
    ids = llm.tokenize(text).ids
    # A copy machine: only the next token of the text is allowed, so every split inside a character is met.
    received = ""
    for i in range(len(ids)):
        with llm.stream([1], max_tokens=1, allowed_token_ids=[ids[i]], ignore_eos=True) as stream:
            for chunk in stream:
                received += chunk.text
                chunk.text.encode()
    assert llm.detokenize(ids) == text
    assert all(len(llm.tokenize(text).pieces[i]) > 0 for i in range(len(ids)))


def test_leaving_early_stops_the_work(llm: octavo.LLM) -> None:
    before = settled(llm)
    with llm.stream("Tell me everything.", GREEDY, max_tokens=1000) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    after = settled(llm)
    assert after.blocks_owned == before.blocks_owned == 0
    assert after.tokens_generated - before.tokens_generated < 50


def test_cancel_keeps_what_was_there(tiny: octavo.LLM) -> None:
    result, tokens = given_up(tiny, [1, 2], after=1, temperature=0.0)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == tokens


def test_dropping_a_stream_cancels_it(tiny: octavo.LLM) -> None:
    stream = tiny.stream([1, 2], GREEDY, max_tokens=400)
    next(stream)
    del stream
    gc.collect()
    assert settled(tiny).blocks_owned == 0


def test_a_stream_outlives_its_llm(tiny_path: str) -> None:
    stream = octavo.LLM(tiny_path, kv_cache_bytes="4MiB").stream([1, 2], GREEDY, max_tokens=20)
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 20


def test_64_streams_half_of_them_dropped(tiny: octavo.LLM) -> None:
    """No leak, and the others' tokens unchanged."""
    before = settled(tiny)
    wanted = {i: fingerprint(tiny.generate([i + 1, 7], GREEDY, max_tokens=60, logprobs=0)) for i in range(1, 64, 2)}
    found: dict[int, object] = {}
    failures: list[BaseException] = []

    def read(i: int) -> None:
        try:
            with tiny.stream([i + 1, 7], GREEDY, max_tokens=60, logprobs=0) as stream:
                read_so_far = 0
                for chunk in stream:
                    read_so_far += len(chunk.token_ids)
                    if i % 2 == 0 and read_so_far > i // 4:
                        return
            found[i] = fingerprint(stream.result)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(i,)) for i in range(64)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not failures
    assert found == wanted
    after = settled(tiny)
    assert (after.blocks, after.blocks_owned) == (before.blocks, 0)
    assert after.blocks_free + after.blocks_remembered == after.blocks
    assert after.finished - before.finished == 64 + 32


def test_a_slow_reader_gets_it_all_in_fewer_pieces(tiny: octavo.LLM) -> None:
    with tiny.stream([5], GREEDY, max_tokens=50) as stream:
        time.sleep(0.5)
        chunks = list(stream)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 50
    assert len(chunks) < 50
    assert stream.result.anatomy.stream_s > 0


def test_a_deadline_ends_it_with_what_there_is(tiny: octavo.LLM) -> None:
    with pytest.raises(octavo.DeadlineExceededError) as caught:
        tiny.generate([1], GREEDY, max_tokens=400, deadline_s=0.0)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.partial is not None
    assert caught.value.partial.finish_reason == "deadline"
    settled(tiny)
    with tiny.stream([1], GREEDY, max_tokens=5, deadline_s=60) as stream:
        assert sum(len(chunk.token_ids) for chunk in stream) == 5


def test_several_answers_to_one_prompt(tiny: octavo.LLM) -> None:
    params = octavo.SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    with tiny.stream([1, 2, 3], params) as stream:
        texts = ["", "", ""]
        for chunk in stream:
            texts[chunk.index] += chunk.text
    result = stream.result
    assert [choice.text for choice in result.choices] == texts
    assert len({tuple(choice.token_ids) for choice in result.choices}) > 1
    assert result.token_ids == tiny.generate([1, 2, 3], params, n=1).token_ids
    assert result.usage.completion_tokens == 36


@pytest.mark.parametrize("name", ["gemma3", "llama-untied-sharded", "qwen2", "mistral-swa"])
@pytest.mark.parametrize("skip", [True, False])
def test_whatever_is_generated_streams_as_it_decodes(name: str, skip: bool) -> None:
    """Random weights: tokens of every kind, broken characters and special tokens among them."""
    broken = 0
    with octavo.LLM(ORACLE / "tiny" / name / "bf16", kv_cache_bytes="16MiB") as llm:
        for seed in range(12):
            params = octavo.SamplingParams(
                temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True, skip_special_tokens=skip
            )
            with llm.stream([5, 6, 7], params) as stream:
                pieces = [chunk.text for chunk in stream]
            result = stream.result
            whole = llm.detokenize(result.token_ids, skip_special_tokens=skip)
            assert "".join(pieces) == result.text == whole, seed
            broken += "\ufffd" in whole
    print(f"{broken} of 12 answers have broken characters")
