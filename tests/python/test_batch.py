"""Many prompts at once: nobody's answer depends on who else is there."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

import octavo
from conftest import GREEDY, fingerprint, real_prompts, settled
from octavo import SamplingParams
from octavo._params import CallOptions


def mixed_requests(llm: octavo.LLM, count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, some with common beginnings, and parameters of every kind."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = [prompt["ids"] for prompt in real_prompts().values()]
    prompts, params = [], []
    for i in range(count):
        ids = rng.choice(texts)
        prompts.append(ids[: rng.choice([1, 2, 15, 16, 17, 40, 129])])
        temperature = 0.0 if i % 2 else 0.8
        params.append(
            SamplingParams(
                temperature=temperature,
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                repetition_penalty=rng.choice([1.0, 1.1]),
                max_tokens=rng.randint(1, 24),
                ignore_eos=True,
                seed=i,
                logprobs=rng.choice([0, 3]),
            )
        )
    assert all(token < llm.facts.vocab for ids in prompts for token in ids)
    return prompts, params


def test_a_batch_of_32_is_bit_equal_to_each_alone(llm: octavo.LLM) -> None:
    prompts, params = mixed_requests(llm, 32, seed=7)
    alone = [fingerprint(llm.generate(prompt, param)) for prompt, param in zip(prompts, params, strict=True)]
    together = [fingerprint(result) for result in llm.generate(prompts, params)]
    assert together == alone


def test_the_answer_does_not_depend_on_settings_of_the_engine(smollm2: str, llm: octavo.LLM) -> None:
    prompts, params = mixed_requests(llm, 8, seed=8)
    wanted = [fingerprint(result) for result in llm.generate(prompts, params)]
    # A pool so small that sequences lose their blocks, chunks of a few tokens, another number of threads, no cache.
    with octavo.LLM(
        smollm2,
        kv_cache_bytes=24 * llm.facts.block_bytes,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        enable_prefix_caching=False,
        threads=1,
    ) as small:
        assert [fingerprint(result) for result in small.generate(prompts, params)] == wanted


def test_the_real_prompts_inside_a_batch(llm: octavo.LLM) -> None:
    prompts = [prompt["ids"] for prompt in real_prompts().values() if prompt["n"] <= 130]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=32, logprobs=1)
    alone = [fingerprint(llm.generate(ids, params)) for ids in prompts]
    assert [fingerprint(result) for result in llm.generate(prompts, params)] == alone


def test_more_prompts_than_the_queue_holds(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="4MiB", max_num_seqs=2, max_queue=1) as llm:
        prompts = [[i + 1, i + 2] for i in range(40)]
        results = llm.generate(prompts, GREEDY, max_tokens=5)
        assert [result.prompt_token_ids for result in results] == prompts
        assert all(len(result.token_ids) == 5 for result in results)
        assert llm.generate(prompts[:3], GREEDY, max_tokens=5, n=2)[2].choices[1].finish_reason == "length"
        settled(llm)


def test_what_is_asked_for_together_begins_together(tiny_path: str) -> None:
    prompts = [[1, 2, 3, i] for i in range(8)]
    with octavo.LLM(tiny_path, kv_cache_bytes="4MiB") as llm:

        async def one_list() -> None:
            await llm.agenerate(prompts, GREEDY, max_tokens=1)

        async def one_by_one() -> None:
            await asyncio.gather(*(llm.agenerate(prompt, GREEDY, max_tokens=1) for prompt in prompts))

        def steps(ask: Callable[[], object]) -> int:
            before = llm.stats().steps
            ask()
            return llm.stats().steps - before

        for ask in (
            lambda: llm.generate(prompts, GREEDY, max_tokens=1),
            lambda: llm.score([1, 2, 3], [[5 + i] for i in range(8)]),
            lambda: llm.generate(prompts[0], GREEDY, max_tokens=1, n=8),
            lambda: asyncio.run(one_list()),
            lambda: asyncio.run(one_by_one()),
        ):
            # It does not wait for long: where the machine is busy with something else, they may come too late.
            assert min(steps(ask) for _ in range(20)) == 1


def test_whoever_said_that_more_would_come_is_answered_without_it(tiny: octavo.LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    ticket = tiny._engine.submit([1, 2], params, CallOptions(), more=True)
    assert ticket.wait(60.0)
    assert fingerprint(ticket.result()) == fingerprint(tiny.generate([1, 2], params))


def test_a_full_queue_is_an_answer(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="4MiB", max_num_seqs=1, max_queue=1) as llm:
        # There is room for two. More are opened, in case this thread is held up for longer than an answer takes.
        with ExitStack() as streams:
            opened = (streams.enter_context(llm.stream([i + 1], GREEDY, max_tokens=200)) for i in range(20))
            with pytest.raises(octavo.QueueFullError, match="max_queue") as full:
                list(opened)
            assert full.value.retry_after > 0
        settled(llm)
        assert len(llm.generate([3], GREEDY, max_tokens=2).token_ids) == 2


def test_kinds_of_prompts_in_one_list(llm: octavo.LLM) -> None:
    conversation = [{"role": "user", "content": "Say hello."}]
    prompts = ["Hello", conversation, [1, 2, 3]]
    results = llm.generate(prompts, max_tokens=2, temperature=0.0)
    assert [result.prompt_token_ids for result in results] == [
        llm.tokenize("Hello").ids,
        llm.render(conversation)[1],
        [1, 2, 3],
    ]


def test_a_bad_prompt_of_a_list_is_named_and_the_others_are_given_up(tiny: octavo.LLM) -> None:
    before = settled(tiny)
    with pytest.raises(octavo.InvalidRequestError, match="prompt 2 of the list"):
        tiny.generate([[1], [2], [10**6], [3]], max_tokens=5)
    assert settled(tiny).blocks_owned == before.blocks_owned
    with pytest.raises(octavo.InvalidRequestError, match="a list of 2, there are 3 prompts"):
        tiny.generate([[1], [2], [3]], [GREEDY, GREEDY])


def test_a_prompt_of_a_list_that_fails_midway_is_named(tiny: octavo.LLM) -> None:
    impossible = SamplingParams(regex="abc", allowed_token_ids=[tiny.tokenize("z", add_special_tokens=False).ids[-1]])

    def check(caught: pytest.ExceptionInfo[octavo.OctavoError], kind: type[Exception], message: str) -> None:
        assert type(caught.value) is kind
        assert re.search(message, str(caught.value)), str(caught.value)
        assert str(caught.value).count("of the list") == 1
        assert caught.value.partial is not None

    before = settled(tiny)
    for count in (3, 5):
        params = [GREEDY] * (count - 1) + [impossible]
        message = f"^prompt {count - 1} of the list: .*the grammar"
        with pytest.raises(octavo.OctavoError) as caught:
            tiny.generate([[1]] * count, params, max_tokens=200)
        check(caught, octavo.OctavoError, message)
        with pytest.raises(octavo.OctavoError) as caught:
            asyncio.run(tiny.agenerate([[1]] * count, params, max_tokens=200))
        check(caught, octavo.OctavoError, message)
    for work in (tiny.generate, lambda *args, **kw: asyncio.run(tiny.agenerate(*args, **kw))):
        with pytest.raises(octavo.DeadlineExceededError) as caught:
            work([[1], [2]], GREEDY, max_tokens=400, deadline_s=0.001)
        check(caught, octavo.DeadlineExceededError, r"^prompt [01] of the list: deadline_s \(0.001 s\) passed")
        with pytest.raises(octavo.InvalidRequestError, match=r"^prompt 1 of the list: (?!.*of the list)"):
            work([[1], [10**6]], GREEDY, max_tokens=5)
    assert settled(tiny).blocks_owned == before.blocks_owned


def test_progress_is_told(tiny_path: str) -> None:
    told: list[tuple[str, int, int]] = []
    with octavo.LLM(tiny_path, kv_cache_bytes="4MiB", progress=lambda *news: told.append(news)) as llm:
        llm.generate([[1], [2], [3]], max_tokens=2)
    assert {stage for stage, _, _ in told} == {"load", "generate"}
    assert told[-1] == ("generate", 3, 3)
    loads = [done for stage, done, _ in told if stage == "load"]
    assert loads == sorted(loads)


def test_a_listener_that_raises_ends_the_call(tiny_path: str) -> None:
    def angry(stage: str, _done: int, _total: int) -> None:
        raise RuntimeError(f"no more {stage}")

    with pytest.raises(RuntimeError, match="no more load"):
        octavo.LLM(tiny_path, progress=angry)


def test_threads_share_one_model(tiny: octavo.LLM) -> None:
    wanted = [fingerprint(tiny.generate([i + 1], GREEDY, max_tokens=16, logprobs=0)) for i in range(16)]
    found: dict[int, object] = {}

    def work(i: int) -> None:
        found[i] = fingerprint(tiny.generate([i + 1], GREEDY, max_tokens=16, logprobs=0))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(16)] == wanted


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core cannot do two things at once")
def test_the_gil_is_free_while_the_engine_works(llm: octavo.LLM) -> None:
    counted = 0
    over = threading.Event()

    def count() -> None:
        nonlocal counted
        while not over.is_set():
            counted += 1
            over.wait(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    result = llm.generate("Once upon a time", GREEDY, max_tokens=40)
    over.set()
    counter.join()
    # Each turn of the other thread takes a little over a millisecond when nothing holds it up.
    assert counted > result.anatomy.total_s * 1000 / 10
