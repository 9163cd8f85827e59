"""Beginnings and ends: closing, forking, interrupting, and what it all weighs."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import octavo
from conftest import GREEDY, KV_BYTES, python, settled


def test_close_and_after(tiny_path: str) -> None:
    llm = octavo.LLM(tiny_path, kv_cache_bytes="4MiB")
    # One may be through before this thread goes on.
    streams = [llm.stream([i], GREEDY, max_tokens=400) for i in range(30)]
    next(streams[0])
    llm.close()
    llm.close()
    with pytest.raises(octavo.EngineClosedError, match="closed"):
        list(itertools.chain.from_iterable(streams))
    for use in (lambda: llm.generate([1]), lambda: llm.stream([1]), llm.stats, lambda: llm.logits([1])):
        with pytest.raises(octavo.EngineClosedError, match="closed"):
            use()


def test_closing_ends_those_who_wait_in_other_threads(tiny_path: str) -> None:
    llm = octavo.LLM(tiny_path, kv_cache_bytes="4MiB")
    outcomes: list[object] = []

    def work() -> None:
        try:
            while True:
                outcomes.append(llm.generate([1], GREEDY, max_tokens=400))
        except octavo.EngineClosedError as error:
            outcomes.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    time.sleep(0.1)
    llm.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    assert sum(isinstance(outcome, octavo.EngineClosedError) for outcome in outcomes) == 4


def test_pickling_says_what_to_do(tiny: octavo.LLM) -> None:
    with pytest.raises(TypeError, match=r"octavo\.LLM\("):
        pickle.dumps(tiny)


def test_a_forked_child_is_told(tiny_path: str) -> None:
    code = """
import os, sys, octavo
llm = octavo.LLM(sys.argv[1], kv_cache_bytes="4MiB")
stream = llm.stream([1], max_tokens=400, ignore_eos=True)
next(stream)
child = os.fork()
if child == 0:
    for use in (lambda: llm.generate([1]), lambda: next(stream), llm.stats, lambda: llm.tokenize("x")):
        try:
            use()
        except octavo.EngineClosedError as error:
            assert "after the fork" in str(error), error
        else:
            os._exit(3)
    llm.close()
    del stream
    mine = octavo.LLM(sys.argv[1], kv_cache_bytes="4MiB")
    assert len(mine.generate([1], max_tokens=3, ignore_eos=True).token_ids) == 3
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(llm.generate([1], max_tokens=3, ignore_eos=True).token_ids) == 3
print("both fine")
"""
    done = python(code, tiny_path, timeout=60)
    assert done.stdout == "both fine\n", done.stderr


def test_a_forked_child_leaves_its_blocks_in_peace(tiny_path: str, tmp_path: Path) -> None:
    """What was opened before the fork is its parent's: to leave a block ends nothing and raises nothing."""
    code = """
import os, sys, octavo
path, log = sys.argv[1:]
with octavo.LLM(path, kv_cache_bytes="4MiB") as llm, llm.record(log) as recording:
    with llm.events() as events, llm.stream([1], max_tokens=9, ignore_eos=True) as stream:
        next(stream)
        child = os.fork()
        if child == 0:
            assert repr(llm).startswith("LLM(")
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(llm.generate([1], max_tokens=3, ignore_eos=True).token_ids) == 3
if child:
    assert octavo.replay(log).incomplete is None
    print("fine")
"""
    done = python(code, tiny_path, str(tmp_path / "run.log"), timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


@pytest.mark.parametrize(
    "leaving",
    [
        "streams = [llm.stream([i], P) for i in range(50)]; next(streams[0])",
        "class A: pass\na = A(); a.a, a.llm, a.stream = a, llm, llm.stream([1], P); next(a.stream); del llm",
        "[threading.Thread(target=lambda: list(llm.stream([1] * 9, P)), daemon=True).start() for _ in range(50)]",
        "threading.Thread(target=lambda: [0 for _ in llm.events()], daemon=True).start(); time.sleep(0.1)",
        "atexit.register(lambda: llm.generate([1], P))",
        "class A:\n    def __del__(self): llm.generate([1, 2], P, stop_token_ids=[5], n=2)\na = A()",
        "async def main():\n    asyncio.ensure_future(llm.agenerate([1], P)); await anext(llm.astream([1], P))",
    ],
)
def test_a_program_that_ends_in_the_midst_of_things(tiny_path: str, leaving: str) -> None:
    code = f"""
import asyncio, atexit, sys, threading, time, octavo
P = octavo.SamplingParams(max_tokens=400, ignore_eos=True)
llm = octavo.LLM(sys.argv[1], kv_cache_bytes="4MiB")
{leaving}
if "main" in globals():
    asyncio.run(main())
print("end")
"""
    done = python(code, tiny_path, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


def test_calls_leave_nothing_behind(tiny: octavo.LLM) -> None:
    def refused() -> None:
        with pytest.raises(octavo.InvalidRequestError):
            tiny.generate([10**6])

    def late() -> None:
        stream = tiny.stream([1], GREEDY, deadline_s=0.0)
        for _ in range(2):
            with pytest.raises(octavo.DeadlineExceededError):
                stream.result  # noqa: B018

    def turns() -> None:
        with tiny.session() as session, tiny.events() as events:
            session.generate([1, 2], GREEDY, max_tokens=2)
            events.take()

    calls = [
        lambda: tiny.generate([1, 2, 3], GREEDY, max_tokens=3, logprobs=2, prompt_logprobs=1),
        lambda: [chunk.logprobs for chunk in tiny.stream([1, 2], GREEDY, max_tokens=3, n=2, logprobs=1)],
        lambda: next(tiny.stream([1], GREEDY, max_tokens=300)),
        lambda: (tiny.tokenize("some text"), tiny.stats(), tiny.explain_cache("x"), tiny.detokenize([1])),
        refused,
        late,
        turns,
    ]

    def weigh(times: int) -> tuple[int, int, int]:
        for call in calls:
            for _ in range(times):
                call()
        settled(tiny)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE")  # noqa: PTH208

    weigh(300)
    before = weigh(300)
    after = weigh(1000)
    assert after[0] - before[0] < 100
    assert after[1] == before[1]
    assert after[2] - before[2] < 2e6, "bytes for 7000 calls"


def test_threads_that_take_turns_all_the_time(tiny: octavo.LLM) -> None:
    """The interpreter changes threads after every microsecond; streams are shared, cancelled and read by several."""
    until = time.monotonic() + 2
    shared: list[octavo.Stream] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        deeds = [
            lambda: tiny.generate([[1], [2, 3]], max_tokens=5),
            lambda: [chunk.text for chunk in one()],
            lambda: one().result,
            lambda: one().cancel(),
            lambda: tiny.verify(tiny.generate([1, 2], max_tokens=4, logprobs=1)),
            lambda: (tiny.stats(), tiny.explain_cache([1, 2, 3])),
        ]

        def one() -> octavo.Stream:
            if rng.random() < 0.5 or not shared:
                shared.append(tiny.stream([rng.randrange(100)], max_tokens=40, ignore_eos=True))
            return rng.choice(shared[-8:])

        try:
            while time.monotonic() < until:
                rng.choice(deeds)()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    for stream in shared:
        stream.cancel()
    assert settled(tiny).blocks_owned == 0


def test_copies_are_the_thing_itself_and_pickling_says_what_to_send(tiny: octavo.LLM) -> None:
    result = tiny.generate([1, 2], GREEDY, max_tokens=2, logprobs=1)
    for thing in (result, result.anatomy, result.choices[0], result.usage, result.logprobs[0], tiny.tokenize("x")):  # type: ignore[index]
        assert copy.copy(thing) is thing
        assert copy.deepcopy([thing])[0] is thing
        with pytest.raises(TypeError, match=f"octavo's {type(thing).__name__} objects stay in the process"):
            pickle.dumps(thing)
    assert eval(repr(result), {"Result": dict, "Usage": dict})["text"] == result.text


def test_an_error_that_is_asked_for_again_is_as_it_was(tiny: octavo.LLM) -> None:
    stream = tiny.stream([1], GREEDY, deadline_s=0.0)
    depths = []
    for _ in range(3):
        with pytest.raises(octavo.DeadlineExceededError) as caught:
            list(stream)
        depths.append(len(caught.traceback))
    assert depths == depths[:1] * 3


INTERRUPTED = """
import asyncio, sys, threading, time, os, signal, octavo
what, path = sys.argv[1:]
llm = None if what == "load" else octavo.LLM(path, kv_cache_bytes="64MiB")
params = octavo.SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)

def interrupt():
    time.sleep(0.02 if what == "load" else 0.4)
    global begun
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    if what == "load":
        for _ in range(100):
            octavo.LLM(path, kv_cache_bytes="64MiB").close()
    elif what == "generate":
        llm.generate("Once upon a time", params)
    elif what == "sample":
        octavo.sample([0.0] * 50_000, draws=10_000_000)
    elif what == "asyncio":
        asyncio.run(llm.agenerate(["Once upon a time"] * 8, params))
    elif what == "batch":
        llm.generate(["Once upon a time"] * 8, params)
    else:
        for _ in llm.stream("Once upon a time", params):
            pass
except KeyboardInterrupt:
    print("interrupted after", time.monotonic() - begun)
    if llm is not None:
        for _ in range(200):
            if llm.stats().running == 0:
                break
            time.sleep(0.01)
        assert llm.stats().running == 0, llm.stats()
        llm.generate("Hello", max_tokens=1)
"""


@pytest.mark.parametrize("what", ["load", "generate", "batch", "stream", "asyncio", "sample"])
def test_ctrl_c(smollm2: str, what: str) -> None:
    done = python(INTERRUPTED, what, smollm2)
    assert done.stdout.startswith("interrupted after"), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1.0


def test_exit_without_closing(tiny_path: str) -> None:
    """A program may end with a model open and a stream half read."""
    code = """
import sys, octavo
llm = octavo.LLM(sys.argv[1], kv_cache_bytes="4MiB")
stream = llm.stream([1], max_tokens=400, ignore_eos=True)
print(next(stream).index)
"""
    begun = time.monotonic()
    done = python(code, tiny_path, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
    assert time.monotonic() - begun < 20


def test_memory_and_first_token(smollm2: str) -> None:
    """Resident at most the file, the KV budget and 200 MB; the first token within 2 s of a warm start."""
    code = """
import sys, time
begun = time.monotonic()
import octavo
llm = octavo.LLM(sys.argv[1], kv_cache_bytes=int(sys.argv[2]))
with llm.stream("Once upon a time", max_tokens=64, ignore_eos=True) as stream:
    next(stream)
    first = time.monotonic() - begun
    for _ in stream:
        pass
llm.generate(["Once upon a time, number %d" % i for i in range(32)], max_tokens=32, ignore_eos=True)
# Not what getrusage says: that begins with the peak of the process that started this one.
print(first, next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    Path(smollm2).read_bytes()  # warm
    # The best of some: how long it takes on a machine that is busy with other things says nothing.
    runs = [python(code, smollm2, str(KV_BYTES)) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    first, resident = zip(*([float(number) for number in run.stdout.split()] for run in runs), strict=True)
    print(f"first token after {min(first):.2f} s, resident {max(resident) / 1e6:.0f} MB")
    assert max(resident) <= Path(smollm2).stat().st_size + KV_BYTES + 200e6
    assert min(first) < 2.0


def test_opening_and_closing_leaks_nothing(tiny_path: str) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def cycle() -> None:
        with octavo.LLM(tiny_path, kv_cache_bytes="4MiB") as llm:
            llm.generate([1, 2], max_tokens=2)

    cycle()
    files, threads = open_files(), threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    for _ in range(10):
        cycle()
    assert (open_files(), threading.active_count()) == (files, threads)
    assert len(os.listdir("/proc/self/task")) <= tasks  # noqa: PTH208


def test_a_terminal_sees_a_bar(smollm2: str) -> None:
    """Only on a terminal, only on stderr, only after a second, and it cleans up after itself."""
    import pty

    code = """
import sys, octavo
llm = octavo.LLM(sys.argv[1], kv_cache_bytes="64MiB")
llm.generate(["Once upon a time"] * 48, max_tokens=int(sys.argv[2]), ignore_eos=True)
"""
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code, smollm2, "150"], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how a closed terminal looks on Linux
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert child.stdout is not None
    assert child.stdout.read() == b""
    child.stdout.close()
    assert child.wait() == 0
    assert b"tok/s" in seen
    assert seen.endswith(b"\r\x1b[K")
    quiet = python(code, smollm2, "5")
    assert quiet.stderr == ""


def test_sigint_is_still_pythons() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
