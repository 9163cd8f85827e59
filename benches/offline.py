"""What a model costs on this machine, stage by stage: load, prefill, decode at two lengths, concurrent requests; and
what the engine and Python add to it.

    python benches/offline.py [MODEL] [--tiny]

Every figure is the median of a few runs, of random prompts that share no prefix. ``--tiny`` is for tests: one short run
each.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import octavo

GREEDY = octavo.SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = octavo.SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)


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

        def line(what: str, measure: Callable[..., float], *how: object) -> None:
            rate = statistics.median(measure(llm, *how) for _ in range(runs))
            print(f"{what:36} {rate:8.0f} tok/s")

        for tokens in (512 // scale, 2048 // scale):
            line(f"prefill, {tokens} tokens", prefill, tokens)
        for context in (128 // scale, 2048 // scale):
            line(f"decode at context {context}", decode, context, 64 // scale)
        for requests in (8, 16, 32):
            tokens = 128 // scale
            line(f"{requests} requests of {tokens} in, {tokens} out", concurrent, requests, tokens, GREEDY)
        line("  at temperature 0.8, top-p 0.95", concurrent, 32, 128 // scale, SAMPLED)
        for requests in (1, 64):
            before = llm.stats()
            llm.generate([prompt(llm, 16) for _ in range(requests)], GREEDY, max_tokens=128 // scale)
            after = llm.stats()
            steps, tokens = after.steps - before.steps, after.tokens_generated - before.tokens_generated
            outside = (after.steps_s - before.steps_s) - (after.executor_s - before.executor_s)
            print(f"outside of the executor, batch {requests:2} {1e6 * outside / steps:8.1f} µs a step,", end="")
            print(f" {1e6 * outside / tokens:.2f} µs a token")
        whole = [1e6 * streaming(llm, 256 // scale) for _ in range(runs)]
        bare = [1e6 * waking(llm, 256 // scale) for _ in range(runs)]
        there = [1e6 * lagging(llm, 64 // scale) for _ in range(runs)]
        print(f"Python, streaming                    {statistics.median(whole):8.1f} µs a token,", end="")
        print(f" of which waking a sleeping thread {statistics.median(bare):.1f} µs")
        print(f"  tokens that are there already      {statistics.median(there):8.1f} µs a token")


def prompt(llm: octavo.LLM, tokens: int) -> list[int]:
    return [random.randrange(1000, llm.facts.vocab) for _ in range(tokens)]


def prefill(llm: octavo.LLM, tokens: int) -> float:
    result = llm.generate(prompt(llm, tokens), GREEDY, max_tokens=1)
    return tokens / result.anatomy.ttft_s


def decode(llm: octavo.LLM, context: int, steps: int) -> float:
    result = llm.generate(prompt(llm, context), GREEDY, max_tokens=steps + 1)
    return 1 / result.anatomy.tpot_s


def concurrent(llm: octavo.LLM, requests: int, tokens: int, params: octavo.SamplingParams) -> float:
    prompts = [prompt(llm, tokens) for _ in range(requests)]
    begun = time.perf_counter()
    llm.generate(prompts, params, max_tokens=tokens)
    return requests * tokens / (time.perf_counter() - begun)


def streaming(llm: octavo.LLM, tokens: int) -> float:
    """Processor seconds that the caller's thread spends on a streamed token. It sleeps between two."""
    with llm.stream(prompt(llm, 16), GREEDY, max_tokens=tokens) as stream:
        next(stream)
        return thread_seconds(lambda: sum(1 for _ in stream))


def waking(llm: octavo.LLM, tokens: int) -> float:
    """Processor seconds of being woken as often while the model runs, and nothing else: by a byte from a process."""
    pace = llm.generate(prompt(llm, 16), GREEDY, max_tokens=tokens).anatomy.tpot_s
    write = f"import os, time\nwhile True:\n    time.sleep({pace})\n    os.write(1, b'.')"
    decoding = threading.Thread(target=lambda: llm.generate(prompt(llm, 16), GREEDY, max_tokens=2 * tokens))

    def read(times: int) -> int:
        for _ in range(times):
            os.read(pipe, 1)
        return times

    with subprocess.Popen([sys.executable, "-c", write], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        pipe = writer.stdout.fileno()
        read(1)
        decoding.start()
        seconds = thread_seconds(lambda: read(tokens))
        decoding.join()
        writer.kill()
    return seconds


def lagging(llm: octavo.LLM, tokens: int) -> float:
    """Processor seconds for a piece of text that need not be waited for: of many answers that advance together."""
    with llm.stream(prompt(llm, 16), SAMPLED, n=32, max_tokens=tokens) as stream:
        next(stream)
        return thread_seconds(lambda: sum(1 for _ in stream))


def thread_seconds(work: Callable[[], int]) -> float:
    """Processor seconds of this thread for each of the things that `work` counts."""
    begun = time.thread_time()
    count = work()
    return (time.thread_time() - begun) / max(count, 1)


if __name__ == "__main__":
    main()
