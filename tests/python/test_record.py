"""A recording is the whole story: played again, every step and every token come out the same."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import octavo
from conftest import GREEDY, ORACLE, settled
from octavo import SamplingParams


def traffic(llm: octavo.LLM, seed: int, count: int) -> None:
    """Requests of every kind from several threads, some of which give up."""
    threads = [threading.Thread(target=_caller, args=(llm, 10 * seed + i, count)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled(llm)


def _caller(llm: octavo.LLM, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        prompt = list(range(rng.choice([0, 16, 33]))) + [rng.randrange(200) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randint(1, 40),
            stop=rng.choice([None, ["e"]]),
            regex=rng.choice([None, None, "[a-z]{2,9}"]),
            prompt_logprobs=rng.choice([None, 0]),
            frequency_penalty=rng.choice([0.0, 0.3]),
        )
        keywords: dict[str, Any] = {
            "priority": rng.randint(-1, 1),
            "cache_salt": rng.choice(["", "tenant"]),
            "user": rng.choice([None, "ada", "ben"]),
            "deadline_s": rng.choice([None, None, 0.01]),
        }
        try:
            with llm.stream(prompt, params, **keywords) as stream:
                for taken, _ in enumerate(stream):
                    if taken == 10 and rng.random() < 0.2:
                        break
        except octavo.DeadlineExceededError:
            pass
    with llm.session(ttl_s=rng.choice([0.001, 60.0])) as session:
        turn = [rng.randrange(200) for _ in range(rng.randint(1, 30))]
        for _ in range(3):
            turn += [*session.generate(turn, GREEDY, max_tokens=rng.randint(1, 20)).token_ids, 7]
    llm.score([1, 2, 3], [[4, 5], [6]])
    llm.logits([1, 2, 3])


def small(path: str, *, blocks: int = 40, **settings: Any) -> octavo.LLM:
    return octavo.LLM(path, kv_cache_bytes=blocks * 6144, max_model_len=120, max_num_seqs=5, seed=9, **settings)


@pytest.fixture(scope="module")
def log(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "run.log"
    with small(tiny_path, blocks=12, itl_target_ms=0.5, threads=2) as llm:
        llm.generate([1, 2, 3], max_tokens=5)  # before: not in the log
        with llm.record(path) as recording:
            traffic(llm, seed=1, count=6)
            llm.generate([[i] * 20 for i in range(8)], GREEDY, max_tokens=60)
        assert recording.path == path
        assert recording.entries > 100
        assert recording.lost == 0
        llm.generate([1, 2, 3], max_tokens=5)  # after: likewise
        assert llm.stats().preemptions > 0
    return path


def test_schedule_and_tokens_come_out_again(log: Path) -> None:
    replay = octavo.replay(log)
    assert replay, str(replay)
    assert replay.incomplete is None
    assert replay.difference is None
    # Three choices are three requests; each caller also scores twice and asks for logits.
    assert replay.requests >= 5 * (6 + 3)
    assert replay.steps > 20
    assert replay.tokens > 100
    assert "exactly those of the log" in str(replay)
    assert octavo.replay(log, threads=1)


def test_without_the_model_the_schedule_alone(log: Path) -> None:
    replay = octavo.replay(log, schedule_only=True, check=True)
    assert replay
    assert replay.replayed_on is None
    assert (replay.steps, replay.tokens) == (octavo.replay(log).steps, octavo.replay(log).tokens)


def test_another_model_is_refused(log: Path) -> None:
    with pytest.raises(octavo.OctavoError, match="another model"):
        octavo.replay(log, model=ORACLE / "gguf" / "llama-q4_0.gguf")


def test_damage_is_told(log: Path, tmp_path: Path) -> None:
    data = log.read_bytes()
    rng = random.Random(5)
    path = tmp_path / "changed.log"
    head = len(b"octavo log\n") + 4
    for _ in range(100):
        changed = bytearray(data)
        changed[rng.randrange(head, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(octavo.OctavoError, match=r"changed\.log: damaged at byte \d+"):
            octavo.replay(path, schedule_only=True)
    for appended in (b"x", bytes(100), data):
        path.write_bytes(data + appended)
        with pytest.raises(octavo.OctavoError, match=f"damaged at byte {len(data)}: .* {len(appended)} bytes follow"):
            octavo.replay(path, schedule_only=True)


def test_a_cache_type_that_was_chosen_is_in_the_log(log: Path) -> None:
    """Which it is depends on the processor."""
    assert re.search(rb'"kv_cache_dtype":"b?f16"', log.read_bytes())


def test_a_recording_ends_with_its_engine(tiny_path: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with small(tiny_path) as llm:
        llm.record(path)
        wanted = llm.generate([1, 2, 3], GREEDY, max_tokens=7)
    replay = octavo.replay(path)
    assert replay
    assert replay.incomplete is None
    assert (replay.requests, replay.tokens) == (1, len(wanted.token_ids))


def test_a_recording_that_was_killed_is_played_as_far_as_it_goes(tiny_path: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    code = f"""
import os, octavo, time
llm = octavo.LLM({tiny_path!r}, kv_cache_bytes="1MiB", progress=False)
llm.record({str(path)!r})
llm.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
time.sleep(0.5)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 9
    replay = octavo.replay(path)
    assert replay
    assert replay.tokens == 50
    assert replay.incomplete is not None
    assert "without saying so" in replay.incomplete
    assert "incomplete" in str(replay)


def test_when_a_recording_cannot_begin(tiny_path: str, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    with small(tiny_path) as llm:
        with ExitStack() as streams:
            for i in range(60):
                streams.enter_context(llm.stream([1, i], GREEDY, max_tokens=100))
            with pytest.raises(octavo.OctavoError, match="while nothing runs or waits"):
                llm.record(other)
        settled(llm)
        with llm.session(), pytest.raises(octavo.OctavoError, match="no session is open"):
            llm.record(other)
        with llm.record(tmp_path / "first.log"), pytest.raises(octavo.OctavoError, match=r"into .*first\.log"):
            llm.record(other)
        assert not other.exists()
    with pytest.raises(octavo.EngineClosedError):
        llm.record(other)


def test_only_a_log_is_written_over(tiny_path: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_path, model)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "link").symlink_to(model)
    with small(str(model)) as llm:
        for path in (precious, model, tmp_path / "link"):
            before = path.read_bytes()
            with pytest.raises(FileExistsError, match="no octavo log") as caught:
                llm.record(path)
            assert caught.value.filename == str(path)
            assert path.read_bytes() == before
        again = tmp_path / "again.log"
        again.touch()
        for tokens in (30, 5):
            with llm.record(again):
                llm.generate([1, 2, 3], GREEDY, max_tokens=tokens)
            assert octavo.replay(again, schedule_only=True).tokens == tokens


def test_two_recordings_in_one_file(tiny_path: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with small(tiny_path) as one, small(tiny_path) as two:
        with one.record(path):
            with pytest.raises(FileExistsError, match="another recording is being written into this file"):
                two.record(path)
            one.generate([1], GREEDY, max_tokens=3)
        assert octavo.replay(path)
        with two.record(path):
            pass


def test_a_recording_that_nobody_holds(tiny_path: str, tmp_path: Path) -> None:
    with small(tiny_path) as llm:
        assert llm.recording is None
        llm.record(tmp_path / "dropped.log")
        gc.collect()
        assert llm.recording is not None
        assert llm.recording.path == tmp_path / "dropped.log"
        llm.recording.close()
        assert llm.recording is None
        with llm.record(tmp_path / "next.log") as recording:
            assert llm.recording is recording
            assert not recording.ended
        assert recording.ended


def test_errors_of_files_are_the_systems(tiny_path: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    absent = tmp_path / "no" / "run.log"
    with small(tiny_path) as llm:
        for call in (llm.record, octavo.replay):
            for path, kind, number in [
                (absent, FileNotFoundError, errno.ENOENT),
                (tmp_path, IsADirectoryError, errno.EISDIR),
                (pipe, OSError, errno.EINVAL),
            ]:
                with pytest.raises(kind) as caught:
                    call(path)
                assert (caught.value.errno, caught.value.filename) == (number, str(path))
                assert "os error" not in str(caught.value)
            for nothing in ("", "a\0b", "\ud800", None, 5):
                with pytest.raises(octavo.InvalidRequestError, match="path must be a path"):
                    call(nothing)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "closed.log"
    path.write_bytes(log.read_bytes())
    path.chmod(0)
    with pytest.raises(PermissionError):
        octavo.replay(path)


@pytest.mark.parametrize("threads", [-1, 10**30, 1.5, "x", 0])
def test_impossible_threads(log: Path, threads: Any) -> None:
    with pytest.raises(octavo.ModelLoadError, match="threads must be"):
        octavo.replay(log, threads=threads)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_told_and_the_answer_is_given(tiny_path: str) -> None:
    with small(tiny_path) as llm:
        recording = llm.record("/dev/full")
        assert len(llm.generate([1, 2, 3], GREEDY, max_tokens=7).token_ids) == 7
        with pytest.raises(OSError, match="/dev/full") as caught:
            recording.close()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
        assert recording.ended


def test_what_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "no.log"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(octavo.OctavoError, match="no octavo log"):
        octavo.replay(path)
    with pytest.raises(OSError, match="none"):
        octavo.replay(tmp_path / "none.log")


def test_the_command(log: Path, tiny_path: str) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "octavo.cli", "replay", *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)

    done = command(str(log), "--model", tiny_path, "--check")
    assert done.returncode == 0, done.stderr
    assert "the schedule and the tokens are exactly those of the log" in done.stdout
    assert "the schedule is exactly that of the log" in command(str(log), "--schedule-only").stdout
    failed = command(tiny_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no octavo log" in failed.stderr
