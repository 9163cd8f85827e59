"""What a model costs on this machine, stage by stage: load, prefill, decode at two lengths, concurrent requests; and
what the engine and Python add to it.

    python benches/offline.py [MODEL] [--tiny]

Every figure is the median of a few runs, of random prompts that share no prefix. ``--tiny`` is for tests: one short run
each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import octavo

GREEDY = octavo.SamplingParams(temperature=0.0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    runs, scale = (1, 16) if arguments.tiny else (5, 1)

    begun = time.perf_counter()
    with octavo.LLM(arguments.model, progress=False) as llm:
        loaded = time.perf_counter()
        llm.generate([1, 2, 3], GREEDY, max_tokens=1)
        first = time.perf_counter()
        print(f"{arguments.model} on {llm.facts.device}")
        print(f"ready in {loaded - begun:.2f} s, first token at {first - begun:.2f} s")

        def line(what: str, measure: Callable[..., float], *sizes: int) -> None:
            rate = statistics.median(measure(llm, *sizes) for _ in range(runs))
            print(f"{what:36} {rate:8.0f} tok/s")

        for tokens in (512 // scale, 2048 // scale):
            line(f"prefill, {tokens} tokens", prefill, tokens)
        for context in (128 // scale, 2048 // scale):
            line(f"decode at context {context}", decode, context, 64 // scale)
        for requests in (8, 16, 32):
            tokens = 128 // scale
            line(f"{requests} requests of {tokens} in, {tokens} out", concurrent, requests, tokens)
        for requests in (1, 64):
            before = llm.stats()
            llm.generate([prompt(llm, 16) for _ in range(requests)], GREEDY, max_tokens=128 // scale)
            after = llm.stats()
            steps, tokens = after.steps - before.steps, after.tokens_generated - before.tokens_generated
            outside = (after.steps_s - before.steps_s) - (after.executor_s - before.executor_s)
            print(f"outside of the executor, batch {requests:2} {1e6 * outside / steps:8.1f} µs a step,", end="")
            print(f" {1e6 * outside / tokens:.2f} µs a token")
        print(f"Python, streaming                    {1e6 * python(llm, 256 // scale):8.1f} µs a token")


def prompt(llm: octavo.LLM, tokens: int) -> list[int]:
    return [random.randrange(1000, llm.facts.vocab) for _ in range(tokens)]


def prefill(llm: octavo.LLM, tokens: int) -> float:
    result = llm.generate(prompt(llm, tokens), GREEDY, max_tokens=1)
    return tokens / result.anatomy.ttft_s


def decode(llm: octavo.LLM, context: int, steps: int) -> float:
    result = llm.generate(prompt(llm, context), GREEDY, max_tokens=steps + 1)
    return 1 / result.anatomy.tpot_s


def concurrent(llm: octavo.LLM, requests: int, tokens: int) -> float:
    prompts = [prompt(llm, tokens) for _ in range(requests)]
    begun = time.perf_counter()
    llm.generate(prompts, GREEDY, max_tokens=tokens)
    return requests * tokens / (time.perf_counter() - begun)


def python(llm: octavo.LLM, tokens: int) -> float:
    """Processor seconds that the caller's thread spends on a streamed token."""
    chunks = 0
    with llm.stream(prompt(llm, 16), GREEDY, max_tokens=tokens) as stream:
        next(stream)
        begun = time.thread_time()
        for _ in stream:
            chunks += 1
        spent = time.thread_time() - begun
    return spent / max(chunks, 1)


if __name__ == "__main__":
    main()
