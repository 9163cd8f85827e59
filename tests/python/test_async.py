"""One event loop, many requests, no thread for each."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import suppress

import pytest

import octavo
from conftest import GREEDY, fingerprint, settled


def test_agenerate_is_generate(tiny: octavo.LLM) -> None:
    async def main() -> tuple[octavo.Result, list[octavo.Result]]:
        one = await tiny.agenerate([1, 2], GREEDY, max_tokens=10)
        many = await tiny.agenerate([[i + 1] for i in range(100)], GREEDY, max_tokens=5)
        return one, many

    one, many = asyncio.run(main())
    assert fingerprint(one) == fingerprint(tiny.generate([1, 2], GREEDY, max_tokens=10))
    assert [result.prompt_token_ids for result in many] == [[i + 1] for i in range(100)]
    wanted = tiny.generate([[i + 1] for i in range(100)], GREEDY, max_tokens=5)
    assert [fingerprint(result) for result in many] == [fingerprint(result) for result in wanted]


def test_64_streams_half_of_them_dropped(tiny: octavo.LLM) -> None:
    before = settled(tiny)
    wanted = {i: tiny.generate([i + 1, 9], GREEDY, max_tokens=60).token_ids for i in range(1, 64, 2)}

    async def read(i: int) -> list[int] | None:
        tokens: list[int] = []
        async with tiny.astream([i + 1, 9], GREEDY, max_tokens=60) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
                if i % 2 == 0 and len(tokens) > i // 2:
                    return None
        assert stream.result.token_ids == tokens
        return tokens

    async def main() -> list[list[int] | None]:
        return await asyncio.gather(*(read(i) for i in range(64)))

    found = asyncio.run(main())
    assert {i: tokens for i, tokens in enumerate(found) if tokens is not None} == wanted
    after = settled(tiny)
    assert after.blocks_owned == before.blocks_owned == 0


def test_cancelling_the_task_cancels_the_request(llm: octavo.LLM) -> None:
    async def main() -> None:
        async def read() -> None:
            async for _ in llm.astream([1], GREEDY, max_tokens=3000):
                pass

        tasks = [asyncio.create_task(read()), asyncio.create_task(llm.agenerate([2], GREEDY, max_tokens=3000))]
        while llm.stats().running < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    before = settled(llm)
    asyncio.run(main())
    after = settled(llm)
    assert after.finished - before.finished == 2
    assert after.tokens_generated - before.tokens_generated < 3000
    assert after.blocks_owned == 0


def test_the_loop_is_free_while_the_engine_works(llm: octavo.LLM) -> None:
    async def main() -> tuple[int, octavo.Result]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        result = await llm.agenerate("Once upon a time", GREEDY, max_tokens=40)
        ticker.cancel()
        return ticks, result

    ticks, result = asyncio.run(main())
    assert ticks > result.anatomy.total_s / 0.005 / 10


def test_errors_come_out_of_the_await(tiny: octavo.LLM) -> None:
    async def main() -> None:
        with pytest.raises(octavo.InvalidRequestError, match="temperature"):
            await tiny.agenerate([1], temperature=-1.0)
        with pytest.raises(octavo.InvalidRequestError, match="prompt 1 of the list"):
            await tiny.agenerate([[1], [10**6]])
        with pytest.raises(octavo.DeadlineExceededError):
            await tiny.agenerate([1], GREEDY, max_tokens=400, deadline_s=0)
        stream = tiny.astream([10**6])
        with pytest.raises(octavo.InvalidRequestError, match="vocabulary"):
            await stream.__anext__()
        unread = tiny.astream([1], GREEDY, max_tokens=400)
        with pytest.raises(octavo.OctavoError, match="not been read to its end"):
            unread.result  # noqa: B018
        await unread.aclose()
        assert [chunk async for chunk in unread] == []

    asyncio.run(main())
    assert settled(tiny).blocks_owned == 0


def test_a_loop_after_a_loop(tiny: octavo.LLM) -> None:
    for _ in range(3):
        assert len(asyncio.run(tiny.agenerate([3], GREEDY, max_tokens=3)).token_ids) == 3


def test_a_stream_is_asked_for_once_whoever_reads_it(tiny: octavo.LLM) -> None:
    async def read(stream: octavo.AsyncStream) -> list[int]:
        return [token async for chunk in stream for token in chunk.token_ids]

    async def main() -> list[int]:
        stream = tiny.astream([1, 2], GREEDY, max_tokens=30)
        one, other = await asyncio.gather(read(stream), read(stream))
        assert sorted(one + other) == sorted(stream.result.token_ids)
        return one + other

    before = settled(tiny).finished
    assert len(asyncio.run(main())) == 30
    assert settled(tiny).finished == before + 1


def test_a_stream_that_is_given_up_before_it_has_begun(tiny: octavo.LLM) -> None:
    async def main() -> None:
        stream = tiny.astream([1], GREEDY, max_tokens=1000)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # its prompt is on its way to another thread
        stream.cancel()
        with suppress(StopAsyncIteration):
            await reading
        async for _ in stream:
            pass
        assert stream.result.finish_reason == "cancelled"
        # One that was never begun is not begun by looking at it.
        stream = tiny.astream([1], GREEDY)
        stream.cancel()
        async with stream:
            assert [chunk async for chunk in stream] == []

    before = settled(tiny)
    asyncio.run(main())
    after = settled(tiny)
    assert after.finished == before.finished + 1
    assert after.tokens_generated - before.tokens_generated < 1000


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_at_any_moment_gives_everything_back(tiny: octavo.LLM, seed: int) -> None:
    rng = random.Random(seed)

    async def read() -> None:
        async with tiny.astream([1, 2], GREEDY, max_tokens=200) as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        for _ in range(15):
            for work in (read(), tiny.agenerate([1], GREEDY, max_tokens=200), tiny.agenerate([[1], [2]] * 9, GREEDY)):
                task = asyncio.ensure_future(work)
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                await asyncio.sleep(rng.choice([0, 0.0005, 0.002]))
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if not task.done()]

    before = settled(tiny)
    asyncio.run(main())
    after = settled(tiny)
    assert (after.blocks_owned, after.sessions) == (before.blocks_owned, before.sessions)


def test_a_batch_that_fails_leaves_no_error_unheard(tiny_path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with octavo.LLM(tiny_path, kv_cache_bytes="4MiB") as llm:
            batch = asyncio.ensure_future(llm.agenerate([[i + 1] for i in range(60)], GREEDY, max_tokens=300))
            while llm.stats().running < 20 and not batch.done():
                await asyncio.sleep(0.001)
            await asyncio.to_thread(llm.close)
            with pytest.raises(octavo.EngineClosedError, match="closed"):
                await batch

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text
