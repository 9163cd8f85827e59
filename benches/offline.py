"""What a model costs on this machine, stage by stage: load, prefill, decode at two lengths, concurrent requests.

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


if __name__ == "__main__":
    main()
