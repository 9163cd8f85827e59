"""A service's day in a minute: the requests of a public trace, time-compressed, through the real engine, and what must
hold whatever they do.

    python benches/trace.py [MODEL] [--trace FILE] [--requests 10000] [--scale 8] [--speed 40] [--seed 0]

Arrivals and lengths are those of the Azure conversation trace (a CSV of TIMESTAMP, ContextTokens, GeneratedTokens),
lengths divided by ``--scale``, time by ``--speed``; without a file they are drawn from distributions like its own. A
third of the prompts share a beginning; some callers give up, some have deadlines, some go first. Then: every request
ended exactly once, no block is missing, what readers of events were told is what is remembered, memory does not grow in
the last quarter of the requests; and the log of the whole run is played again, the scheduler's invariants
proved after every entry.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import octavo

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "fixtures" / "oracle" / "gguf" / "llama-q8_0.gguf"
TRACE = ROOT / ".." / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 40


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


def recorded(path: Path) -> Iterator[Arrival]:
    with path.open() as file:
        begun = None
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begun = begun or at
            yield Arrival((at - begun).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def drawn(seed: int) -> Iterator[Arrival]:
    """Means and spreads of the conversation trace."""
    chance, at = random.Random(seed), 0.0
    while True:
        at += chance.expovariate(1 / 0.181)
        lengths = chance.lognormvariate(6.63, 0.985), chance.lognormvariate(5.02, 0.859)
        yield Arrival(at, *(max(1, round(length)) for length in lengths))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--scale", type=float, default=8.0, help="divides lengths")
    parser.add_argument("--speed", type=float, default=40.0, help="divides time")
    parser.add_argument("--callers", type=int, default=512, help="most requests in flight; the next caller waits")
    parser.add_argument("--kv-cache-bytes", default="12MiB")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    from_file = chosen.trace.exists()
    arrivals = islice(recorded(chosen.trace) if from_file else drawn(chosen.seed), chosen.requests)
    source = chosen.trace.name if from_file else "a drawn trace"
    print(f"{chosen.requests} requests of {source}, lengths / {chosen.scale:g}, time / {chosen.speed:g}")
    with (
        tempfile.TemporaryDirectory() as folder,
        octavo.LLM(chosen.model, progress=False, kv_cache_bytes=chosen.kv_cache_bytes, max_queue=chosen.callers) as llm,
    ):
        print(f"{Path(chosen.model).name} on {llm.facts.device}, {llm.facts.blocks} blocks of {llm.facts.block_size}")
        log = Path(folder) / "run.log"
        with llm.record(log) as recording, Follower(llm) as follower:
            before = llm.stats()
            run = Run(llm, chosen)
            begun = time.perf_counter()
            asyncio.run(run.all(arrivals))
            run.report(time.perf_counter() - begun)
            check(llm, run, follower, before)
        assert recording.lost == 0, recording
        print(f"the log: {log.stat().st_size / 2**20:.1f} MiB, {recording.entries} entries; played again, checked:")
        replay = octavo.replay(log, schedule_only=True, check=True)
        assert replay, str(replay)
        assert replay.incomplete is None, str(replay)
        print(replay)


class Run:
    """All requests, each at its time."""

    def __init__(self, llm: octavo.LLM, chosen: argparse.Namespace) -> None:
        self._llm, self._chosen = llm, chosen
        self.ended: Counter[str] = Counter()
        self.first_token_s: list[float] = []
        self.resident: list[float] = []
        self.submitted = 0
        self.most_in_flight = 0

    async def all(self, arrivals: Iterator[Arrival]) -> None:
        begun, flying = time.perf_counter(), set()
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(0.0, begun + arrival.at_s / self._chosen.speed - time.perf_counter()))
            while len(flying) >= self._chosen.callers:
                await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._one(number, arrival))
            flying.add(task)
            task.add_done_callback(flying.discard)
            self.submitted += 1
            self.most_in_flight = max(self.most_in_flight, len(flying))
        while flying:
            await asyncio.gather(*flying)

    async def _one(self, number: int, arrival: Arrival) -> None:
        chance = random.Random(f"{self._chosen.seed} {number}")
        prompt = self._prompt(arrival, chance)
        output = min(max(1, round(arrival.output_tokens / self._chosen.scale)), self._room - len(prompt))
        params = octavo.SamplingParams(max_tokens=output, temperature=chance.choice([0.0, 1.0]), ignore_eos=True)
        options: dict[str, Any] = {"priority": int(chance.random() < 0.1), "user": f"user {number % 7}"}
        if chance.random() < 0.02:
            options["deadline_s"] = chance.uniform(0.0, 0.2)
        try:
            if chance.random() < 0.02:
                await self._given_up(prompt, params, options)
            else:
                result = await self._llm.agenerate(prompt, params, **options)
                assert len(result.token_ids) == output, f"{result} is not whole"
                self.ended[result.finish_reason] += 1
                self.first_token_s.append(result.anatomy.ttft_s)
        except octavo.DeadlineExceededError as error:
            # Without any answer: it was not taken, for it could not have been in time.
            self.ended["refused" if error.partial is None else "deadline"] += 1
        if self.ended.total() in {max(1, self._chosen.requests * quarter // 4) for quarter in range(1, 5)}:
            self.resident.append(resident_mib())

    async def _given_up(self, prompt: list[int], params: octavo.SamplingParams, options: dict[str, Any]) -> None:
        """After two tokens; whoever wanted no more has them all."""
        async with self._llm.astream(prompt, params, **options) as stream:
            taken = 0
            async for chunk in stream:
                taken += len(chunk.token_ids)
                if taken >= 2:
                    break
        self.ended["given up"] += 1

    @property
    def _room(self) -> int:
        return self._llm.facts.max_model_len

    def _prompt(self, arrival: Arrival, chance: random.Random) -> list[int]:
        tokens = min(max(1, round(arrival.prompt_tokens / self._chosen.scale)), self._room - 1)
        vocab = self._llm.facts.vocab
        shared: list[int] = []
        if chance.random() < 1 / 3:
            system = random.Random(f"system {chance.randrange(SYSTEM_PROMPTS)}")
            shared = [system.randrange(vocab) for _ in range(SYSTEM_TOKENS)][: tokens - 1]
        return shared + [chance.randrange(vocab) for _ in range(tokens - len(shared))]

    def report(self, seconds: float) -> None:
        cuts = statistics.quantiles(self.first_token_s, n=100, method="inclusive")
        rate = self.submitted / seconds
        print(f"{rate:.0f} requests a second, up to {self.most_in_flight} in flight; ended: {dict(self.ended)}")
        print(f"first token p50 {1e3 * cuts[49]:.0f} ms, p99 {1e3 * cuts[98]:.0f} ms, queueing included")


class Follower:
    """A router's view: counts ends, mirrors the cache."""

    def __init__(self, llm: octavo.LLM) -> None:
        self._events = llm.events(capacity=1 << 20)
        self._thread = threading.Thread(target=self._follow)
        self.kinds: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.blocks: set[tuple[int, int]] = set()

    def _follow(self) -> None:
        for event in self._events:
            self.kinds[event.type] += 1
            if event.type == "finished":
                self.ends[event.request_id or 0] += 1
            elif event.type in ("BlockStored", "BlockRemoved"):
                told = event.to_dict()
                block = told["block_hashes"][0], told["group_idx"]
                if event.type == "BlockStored":
                    assert block not in self.blocks
                    self.blocks.add(block)
                else:
                    self.blocks.remove(block)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> int:
        """Reads to the end; how many events were lost."""
        self._events.close()
        self._thread.join()
        return self._events.dropped


def check(llm: octavo.LLM, run: Run, follower: Follower, before: octavo.Stats) -> None:
    until = time.monotonic() + 30
    while (stats := llm.stats()).running + stats.waiting > 0:
        assert time.monotonic() < until, stats
        time.sleep(0.01)
    assert follower.finish() == 0, "the reader of events was too slow"
    taken = run.submitted - run.ended["refused"]
    assert run.ended.total() == run.submitted, run.ended
    assert taken == stats.finished - before.finished == follower.kinds["queued"] == follower.kinds["finished"], stats
    assert set(follower.ends.values()) == {1}, "somebody ended twice"
    assert stats.blocks_owned == 0
    assert stats.blocks_free + stats.blocks_remembered == stats.blocks
    assert len(follower.blocks) <= stats.blocks_remembered
    cached, computed = stats.tokens_cached, stats.tokens_computed
    generated, preemptions = stats.tokens_generated, stats.preemptions
    print(f"{computed} tokens computed, {cached} found in the cache; {generated} generated; {preemptions} preemptions")
    print("every request ended exactly once; every block is free or remembered; events tell the same")
    print("resident memory after each quarter:", ", ".join(f"{mib:.1f} MiB" for mib in run.resident))
    # A small run is over before allocators and pools have what they need, and this program keeps a number or two of
    # every request.
    assert run.submitted < 10_000 or run.resident[-1] - run.resident[-2] < 4, "memory is not flat"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
