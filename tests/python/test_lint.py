"""Which order of a prompt's parts the cache can do most with."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import octavo
from conftest import GREEDY
from test_cli import command


def part(name: str, text: str) -> dict[str, str]:
    return {"name": name, "text": text}


def prompts(count: int = 12) -> list[Any]:
    return [
        {
            "parts": [
                part("time", f"It is {i} o'clock. " * 4),
                part("rules", "Be brief and kind. " * 40),
                part("customer", f"Customer {i % 3}. " * 20),
                part("question", f"Question {i}?" * 5),
            ]
        }
        for i in range(count)
    ]


def test_stable_first_variable_last() -> None:
    lint = octavo.lint_prompts(prompts(), tokens_per_s=100.0)
    assert lint.parts == ("time", "rules", "customer", "question")
    assert lint.order[:2] == ("rules", "customer")
    assert lint.reused_tokens == 0
    assert lint.saved_tokens == lint.reused_tokens_best > 0.5 * lint.tokens
    assert lint.saved_s == lint.saved_tokens / 100
    assert "rules → customer" in str(lint)
    assert lint.estimated


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_the_order_is_the_best_of_all(tiny_path: str, with_tokenizer: bool) -> None:
    tokenizer = octavo.Tokenizer(tiny_path) if with_tokenizer else None
    for seed in range(40):
        coins = random.Random(seed)
        slots = coins.randint(1, 4)
        texts = [
            [f"w{i} " * coins.randint(1, 30) for i in range(coins.randint(1, 3))] + [None] for _ in range(slots)
        ]
        chosen = [[coins.choice(column) for column in texts] for _ in range(coins.randint(2, 7))]

        def lint(order: Any, chosen: list[list[str | None]] = chosen) -> octavo.PromptLint:
            parts = [[part(str(slot), text) for slot in order if (text := one[slot]) is not None] for one in chosen]
            return octavo.lint_prompts([{"parts": one} for one in parts], tokenizer)

        given = lint(range(slots))
        best = max(lint(order).reused_tokens for order in itertools.permutations(range(slots)))
        assert given.reused_tokens_best == best, f"seed {seed}"
        assert lint([int(name) for name in given.order]).reused_tokens == best, f"seed {seed}"
        for name, texts_of in given.distinct.items():
            there = [one[int(name)] for one in chosen if one[int(name)] is not None]
            assert (texts_of, given.present[name]) == (len(set(there)), len(there)), f"seed {seed}"


@pytest.mark.parametrize("kind", ["texts", "parts", "chats"])
def test_what_is_reused_is_what_the_cache_finds(tiny: octavo.LLM, kind: str) -> None:
    coins = random.Random(kind)
    rules = "Be brief, and never invent facts. " * 6
    asked: list[Any] = []
    for i in range(25):
        words = [f"{coins.choice('abc')} " * coins.randint(0, 20) for _ in range(3)]
        asked.append(
            {
                "texts": f"{rules}\nQuestion {i % 20}: {words[0]}",
                "parts": [part("rules", rules), part("b", words[1]), part("c", words[2])],
                "chats": [{"role": "system", "content": rules}, *({"role": "user", "content": w} for w in words[:2])],
            }[kind]
        )
    forms = {"texts": lambda one: one, "parts": lambda one: {"parts": one}, "chats": lambda one: {"messages": one}}
    lint = octavo.lint_prompts([forms[kind](one) for one in asked], tiny)
    prompts = [one if kind != "parts" else "".join(piece["text"] for piece in one) for one in asked]
    usages = [tiny.generate(prompt, GREEDY, max_tokens=1, cache_salt=f"as {kind}").usage for prompt in prompts]
    assert lint.tokens == sum(usage.prompt_tokens for usage in usages)
    assert lint.reused_tokens == sum(usage.cached_tokens for usage in usages) > 0
    assert lint.tokens_per_s is not None
    assert lint.saved_s == pytest.approx(lint.saved_tokens / lint.tokens_per_s)
    assert not lint.estimated


def test_many_short_paragraphs_take_no_time() -> None:
    coins = random.Random(1)
    texts = ["\n\n".join(f"paragraph {coins.randrange(10**6)} text" for _ in range(2000)) for _ in range(40)]
    begun = time.process_time()
    lint = octavo.lint_prompts(texts)
    # Quadratic work took minutes.
    assert time.process_time() - begun < 15
    assert len(lint.parts) == 2000


def test_the_other_forms_of_a_prompt() -> None:
    texts = [f"Date: {i}.\n\n" + "Rules. " * 60 for i in range(5)]
    lint = octavo.lint_prompts(texts)
    assert lint.order == ("paragraph 2", "paragraph 1")
    chats = [
        {"messages": [{"role": "system", "content": "s " * 99}, {"role": "user", "content": str(i)}]} for i in range(5)
    ]
    lint = octavo.lint_prompts(chats)
    assert lint.order == ("message 1 (system)", "message 2 (user)")
    assert lint.saved_tokens == 0
    assert "no other order" in str(lint)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([], "no prompts"),
        ([5], "prompt 0 is a int"),
        ([{"parts": [5]}], r"parts\[0\]"),
        ([{"parts": [part("a", "x"), part("a", "y")]}], "two parts are named 'a'"),
        ([{"messages": [{"content": "x"}]}], r"messages\[0\]"),
        (5, "prompts must be a list of prompts, not a int"),
        (None, "prompts must be a list"),
        ("a text", "prompts must be a list of prompts, not a str"),
        ({"parts": ["a"]}, "prompts must be a list of prompts, not a dict"),
    ],
)
def test_what_is_no_prompt(bad: Any, told: str) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=told):
        octavo.lint_prompts(bad)


def test_arguments_that_are_none(tiny_path: str) -> None:
    for rate in (0, -5, float("nan"), float("inf"), "fast", 10**400):
        with pytest.raises(octavo.InvalidRequestError, match="tokens_per_s must be a finite number above 0"):
            octavo.lint_prompts(["a"], tokens_per_s=rate)  # type: ignore[arg-type]
    with pytest.raises(octavo.InvalidRequestError, match=r"model must be .*\.Tokenizer, not a str"):
        octavo.lint_prompts(["a"], "smollm2")  # type: ignore[arg-type]
    with pytest.raises(octavo.InvalidRequestError, match="prompt 1: the text is not valid Unicode"):
        octavo.lint_prompts(["a", "\ud800"], octavo.Tokenizer(tiny_path))


def test_many_parts_are_ordered_one_by_one() -> None:
    names = [f"p{i:02}" for i in range(24)]
    many = [
        {"parts": [part(name, (f"{i} " if int(name[1:]) % 2 else "same ") * 20) for name in names]} for i in range(50)
    ]
    order = octavo.lint_prompts(many).order
    assert all(int(name[1:]) % 2 == 0 for name in order[:12])


def test_the_command(tmp_path: Path, tiny_path: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts())) + "\n\n")
    done = command("lint-prompts", str(file), "--tokens-per-s", "1000")
    assert done.returncode == 0, done.stderr
    assert "best order" in done.stdout
    assert "s of reading" in done.stdout
    done = command("lint-prompts", "-", "--model", tiny_path, input=file.read_text())
    assert done.returncode == 0, done.stderr
    assert "about" not in done.stdout.splitlines()[0]
    file.write_text('"fine"\n{"parts": ["a"')
    done = command("lint-prompts", str(file))
    assert done.returncode == 1
    assert "line 2" in done.stderr


def test_lines_as_json_has_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(text, ensure_ascii=False) for text in ("a\u2028b", "c\u0085d", "e\u000cf")]
    file.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode() + b"\n")
    done = command("lint-prompts", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 prompts")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (bytes(range(128, 256)), "no UTF-8 text, at byte 0"),
        (b"[" * 100_000, "line 1: a prompt is nested too deeply"),
        (b"9" * 10_000, "line 1: a prompt is a line of JSON"),
        (b'"a', "line 1"),
        (b"", "no prompts"),
        (b"5", "prompt 0 is a int"),
    ],
    ids=["binary", "deep", "long number", "cut", "empty", "number"],
)
def test_what_is_no_file_of_prompts(tmp_path: Path, data: bytes, told: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    done = command("lint-prompts", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
