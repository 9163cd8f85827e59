"""What callers of a busy engine feel: requests arrive at random, others' prompts come between one's tokens.

    python benches/online.py [MODEL] [--rate 0.5] [--seconds 60] [--prompt 128] [--output 64] [--seed 0] [--tiny]

Arrivals are a Poisson process. Times are the caller's, taken where the chunks arrive: to the first token from the
moment of the call, and between tokens. Then what a shared prefix is worth: to one who comes later, and to many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from itertools import pairwise

from common import arrival_times, percentile

import octavo

GREEDY = octavo.SamplingParams(temperature=0.0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--itl-target-ms", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="for tests: a second of it")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rate, arguments.seconds, arguments.output = 4.0, 1.0, 4
    with octavo.LLM(arguments.model, progress=False, itl_target_ms=arguments.itl_target_ms) as llm:
        llm.generate([1, 2, 3], GREEDY, max_tokens=4)
        print(f"{arguments.model} on {llm.facts.device}")
        arrivals(llm, arguments)
        shared_prefix(llm, 64 if arguments.tiny else 512)


def arrivals(llm: octavo.LLM, arguments: argparse.Namespace) -> None:
    chance = random.Random(arguments.seed)
    starts = arrival_times(arguments.rate, arguments.seconds, chance)
    prompts = [fresh(llm, arguments.prompt, chance) for _ in starts]

    async def one(start: float, prompt: list[int]) -> tuple[float, list[float]]:
        await asyncio.sleep(start)
        called, times = time.perf_counter(), []
        async for _ in llm.astream(prompt, GREEDY, max_tokens=arguments.output):
            times.append(time.perf_counter())
        return times[0] - called, [later - earlier for earlier, later in pairwise(times)]

    async def everybody() -> list[tuple[float, list[float]]]:
        return await asyncio.gather(*map(one, starts, prompts))

    felt = asyncio.run(everybody())
    print(f"{len(starts)} requests of {arguments.prompt} in, {arguments.output} out, {arguments.rate} a second")
    line("first token", [first for first, _ in felt])
    line("between tokens", [gap for _, gaps in felt for gap in gaps])
    line("longest gap of a request", [max(gaps) for _, gaps in felt if gaps])


def shared_prefix(llm: octavo.LLM, tokens: int) -> None:
    """Sixteen new tokens after a prefix that is there, after nothing, and after one that sixteen bring at once."""
    chance = random.Random(1)
    later, alone = [], []
    for _ in range(5):
        prefix = fresh(llm, tokens, chance)
        llm.generate(prefix, GREEDY, max_tokens=1)
        later.append(first_token(llm, prefix + fresh(llm, 16, chance)))
        alone.append(first_token(llm, fresh(llm, 16, chance)))
    print(f"first token of 16 tokens: {1e3 * statistics.median(alone):.1f} ms; ", end="")
    print(f"after {tokens} known ones: {1e3 * statistics.median(later):.1f} ms")
    before = llm.stats().tokens_computed
    prefix = fresh(llm, tokens, chance)
    begun = time.perf_counter()
    llm.generate([prefix + fresh(llm, 16, chance) for _ in range(16)], GREEDY, max_tokens=1)
    together = time.perf_counter() - begun
    computed, asked = llm.stats().tokens_computed - before, 16 * (tokens + 16)
    print(f"16 at once after {tokens} new ones: {1e3 * together:.0f} ms, {computed} tokens computed of {asked}")


def first_token(llm: octavo.LLM, prompt: list[int]) -> float:
    return float(llm.generate(prompt, GREEDY, max_tokens=1).anatomy.ttft_s)


def fresh(llm: octavo.LLM, tokens: int, chance: random.Random) -> list[int]:
    return [chance.randrange(1000, llm.facts.vocab) for _ in range(tokens)]


def line(what: str, seconds: list[float]) -> None:
    p50, p95, p99 = (1e3 * percentile(seconds, percent) for percent in (50, 95, 99))
    print(f"{what:26} p50 {p50:7.1f} ms   p95 {p95:7.1f} ms   p99 {p99:7.1f} ms   most {1e3 * max(seconds):7.1f} ms")


if __name__ == "__main__":
    main()
