"""Which order of a prompt's parts the cache can do most with."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

import octavo
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


def test_the_order_is_the_best_of_all() -> None:
    for seed in range(20):
        coins = random.Random(seed)
        slots = coins.randint(1, 5)
        texts = [[f"{slot} {i} " * coins.randint(1, 60) for i in range(coins.randint(1, 6))] for slot in range(slots)]
        chosen = [[coins.choice(column) for column in texts] for _ in range(15)]

        def reused(order: tuple[int, ...], chosen: list[list[str]] = chosen) -> int:
            """Tokens of whole parts, without the rounding to blocks."""
            seen, found = set(), 0
            for one in chosen:
                for end in range(1, len(order) + 1):
                    beginning = tuple(one[slot] for slot in order[:end])
                    found += -(-len(beginning[-1]) // 4) if beginning in seen else 0
                    seen.add(beginning)
            return found

        lint = octavo.lint_prompts([{"parts": one} for one in chosen])
        order = tuple(lint.parts.index(name) for name in lint.order)
        best = max(reused(order) for order in itertools.permutations(range(slots)))
        # Whole blocks are less than whole parts, by less than one of 16 a prompt.
        assert reused(order) >= best - 16 * len(chosen), f"seed {seed}"
        assert lint.reused_tokens <= lint.reused_tokens_best <= best, f"seed {seed}"


def test_tokens_and_time_of_a_model(tiny: octavo.LLM) -> None:
    lint = octavo.lint_prompts(prompts(), tiny)
    counted = sum(
        len(tiny.tokenize(p["text"], add_special_tokens=False).ids) for one in prompts() for p in one["parts"]
    )
    assert (lint.tokens, lint.estimated) == (counted, False)
    assert lint.tokens_per_s is not None
    assert lint.saved_s == pytest.approx(lint.saved_tokens / lint.tokens_per_s)


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
    ],
)
def test_what_is_no_prompt(bad: list[Any], told: str) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=told):
        octavo.lint_prompts(bad)


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
