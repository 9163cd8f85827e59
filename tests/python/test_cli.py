"""The command, as a shell sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import octavo


def command(*arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **keywords,
    )


def test_chat_once(smollm2: str) -> None:
    done = command("chat", smollm2, "Why is the sky blue?", "--max-tokens", "12", "--temperature", "0", "--anatomy")
    assert done.returncode == 0, done.stderr
    with octavo.LLM(smollm2, kv_cache_bytes="64MiB") as llm:
        wanted = llm.generate([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=12, temperature=0).text
    assert done.stdout == wanted + "\n"
    line, *anatomy = done.stderr.splitlines()
    assert re.fullmatch(
        r"\[\d+ tok prompt · \d+\.\d\d s to first token · \d+ tok/s · .*, \d+ threads? · "
        r"[\d.]+ MB weights \+ [\d.]+ [MG]B KV\]",
        line,
    ), line
    assert any(part.startswith("decode") for part in anatomy)
    assert "\x1b" not in done.stderr


def test_chat_in_turns(smollm2: str) -> None:
    done = command(
        "chat", smollm2, "--max-tokens", "4", "--kv-cache-bytes", "64MiB", input="Hello\n\nAnd again, please\n"
    )
    assert done.returncode == 0, done.stderr
    summaries = done.stderr.splitlines()
    assert len(summaries) == 2
    assert "cached" in summaries[1]  # the first turn is not read again


def test_run(tiny_path: str) -> None:
    arguments = ("run", tiny_path, "--max-tokens", "5", "--temperature", "0", "--kv-cache-bytes", "4MiB")
    plain = command(*arguments, "hello")
    assert plain.returncode == 0, plain.stderr
    told = json.loads(command(*arguments, "--json", input="hello").stdout)
    assert plain.stdout == told["text"] + "\n"
    assert told["usage"]["completion_tokens"] == len(told["token_ids"])
    assert sum(told["anatomy"]["parts_ns"].values()) == told["anatomy"]["total_ns"]


def test_pull_and_inspect(smollm2: str) -> None:
    assert command("pull", "smollm2").stdout == smollm2 + "\n"
    shown = command("inspect", smollm2)
    assert shown.returncode == 0, shown.stderr
    for word in (
        "llama",
        "30",
        "576",
        "9, 3 for keys and values, 64 wide",
        "49152",
        "Q4_1",
        "Q8_0",
        "smollm",
        "per token",
    ):
        assert word in shown.stdout, f"{word} is missing in\n{shown.stdout}"
    assert "im_start" in command("inspect", smollm2, "--template").stdout


def test_doctor() -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("instruction sets", "cores", "memory", "GPU driver", "CUDA kernels", octavo.__version__):
        assert word in done.stdout


def test_doctor_says_that_nothing_will_run() -> None:
    done = command("doctor", env={**os.environ, "OCTAVO_CPU_ISA": "foo"})
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "foo" in line)
    assert re.search(r"will use +NOTHING, no model can be loaded: .*foo", line), line
    assert "overrides" not in done.stdout
    assert "memory" in done.stdout


def test_help_is_plain_text() -> None:
    for name in ("chat", "run", "pull", "inspect", "replay", "lint-prompts", "doctor"):
        done = command(name, "--help")
        assert done.returncode == 0, done.stderr
        assert f"octavo {name}: " in done.stdout
        assert "`" not in done.stdout


def test_mistakes_are_one_line(tiny_path: str) -> None:
    for arguments in (
        ("chat", "no-such-model", "hi"),
        ("inspect", __file__),
        ("run", tiny_path, "x", "--temperature", "-1"),
        ("run", tiny_path, "x", "--device", "abacus"),
        ("pull", "pypi:../x"),
        ("pull", ""),
        ("pull", "/dev/null"),
        ("run", "", "x"),
        ("inspect", "a\udcff"),
        ("replay", ""),
        ("replay", "/dev/null"),
        ("replay", __file__),
        ("replay", __file__, "--threads", "-1"),
        ("lint-prompts", ""),
        ("lint-prompts", "/nowhere"),
        ("lint-prompts", __file__, "--tokens-per-s", "0"),
        ("run", tiny_path, "a\udcff"),
        ("run", tiny_path, "x", "--threads", "-1"),
        ("run", tiny_path, "x", "--max-tokens", "9" * 30),
        ("chat", tiny_path, "x", "--kv-cache-bytes", "-1"),
    ):
        done = command(*arguments)
        assert (done.returncode, done.stdout.strip()) == (1, ""), arguments
        assert done.stderr.startswith("octavo: "), arguments
        assert "internal error" not in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1, arguments
    assert command().returncode == 2
    assert command("chat").stderr.endswith("octavo chat: error: the following arguments are required: model\n")
    contradiction = command("replay", __file__, "--schedule-only", "--threads", "2")
    assert (contradiction.returncode, contradiction.stderr) == (
        1,
        "octavo: schedule_only runs no model, so threads has no part in it\n",
    )
    assert command("--version").stdout == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_an_output_that_has_not_all_characters(tiny_path: str, tmp_path: Any, encoding: str) -> None:
    model = tmp_path / "modèle.gguf"
    model.symlink_to(tiny_path)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = command("pull", str(model), env=environment, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    name = r"mod\xe8le.gguf" if encoding == "ascii" else "modèle.gguf"
    assert done.stdout == f"{tmp_path}/{name}\n"


def test_an_input_that_is_no_text(tiny_path: str) -> None:
    for name in ("run", "chat"):
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli", name, tiny_path, "--max-tokens", "2"],
            input=b"\xff\xfe\x00\n",
            capture_output=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        assert done.returncode == 1, name
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("octavo: the input is not utf-8 text"), line


def test_a_reader_that_has_seen_enough(smollm2: str) -> None:
    chat = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli", "run", smollm2, "Once upon a time", "--max-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdout.read(1)
    chat.stdout.close()
    assert chat.wait(60) == 0
    assert b"Traceback" not in chat.stderr.read()
    chat.stderr.close()


def test_ctrl_c_is_quiet(smollm2: str) -> None:
    chat = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli", "chat", smollm2, "Tell me a long story.", "--max-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdout.read(1)
    begun = time.monotonic()
    os.kill(chat.pid, signal.SIGINT)
    assert chat.wait(30) == 130
    assert time.monotonic() - begun < 5
    assert chat.stderr.read() == b""
    chat.stdout.close()
    chat.stderr.close()


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color(tiny_path: str, variables: dict[str, str], coloured: bool) -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli", "run", tiny_path, "x", "--max-tokens", "2", "--kv-cache-bytes", "4MiB"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**environment, "TERM": "xterm", **variables},
        check=False,
    )
    os.close(theirs)
    seen = os.read(ours, 4096)
    os.close(ours)
    assert done.returncode == 0, seen
    assert (b"\x1b[2m" in seen) == coloured


@pytest.mark.parametrize(("plumbing", "status"), [(">/dev/full", 1), (">&-", 0), ("<&- >/dev/null", 0)])
def test_odd_plumbing_leaves_no_traceback(tiny_path: str, plumbing: str, status: int) -> None:
    command = f'exec "{sys.executable}" -m octavo.cli run "{tiny_path}" hello --max-tokens 3 {plumbing}'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stderr


def test_a_question_too_long_does_not_end_a_conversation(tiny_path: str) -> None:
    """At a terminal; where a program asks, its next question builds on this one."""
    import pty

    arguments = [sys.executable, "-m", "octavo.cli", "chat", tiny_path, "--max-tokens", "2", "--max-model-len", "60"]
    questions = f"hi\n{'word ' * 90}\nhi\n"
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [*arguments, "--kv-cache-bytes", "4MiB"], stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    os.close(theirs)
    os.write(ours, questions.encode() + b"\x04")
    assert chat.stderr is not None
    told = chat.stderr.read().decode()
    chat.stderr.close()
    assert chat.wait(60) == 0
    os.close(ours)
    assert re.search(r"needs a max_model_len of at least \d+, it is 60\]\n", told), told
    assert len(re.findall("tok prompt", told)) == 2, told
    done = command(*arguments[3:], "--kv-cache-bytes", "4MiB", input=questions)
    assert (done.returncode, done.stderr.count("tok prompt")) == (1, 1)
    assert done.stderr.splitlines()[-1].startswith("octavo: a prompt of")
