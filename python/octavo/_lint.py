"""Which order of a prompt's parts the prefix cache can do most with: stable first, variable last."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from octavo._errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo._llm import LLM
    from octavo._tokenizer import Tokenizer

#: The best order is looked for among all where that takes at most this many steps; else part by part.
_MOST_STEPS = 4_000_000
#: Tokens in a block of the cache, by default: what is reused is whole blocks.
_BLOCK_SIZE = 16
#: Bytes of text in a token, about, where there is no tokenizer to ask.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class PromptLint:
    """What :func:`lint_prompts` found. ``print`` says it."""

    prompts: int
    tokens: int
    """Of all prompts together."""
    parts: tuple[str, ...]
    """Names of the parts, as they stand in the prompts."""
    order: tuple[str, ...]
    """The order of which most is reused."""
    distinct: Mapping[str, int]
    """How many different texts each part has."""
    reused_tokens: int
    """Tokens that a cache of any size finds, as the prompts stand."""
    reused_tokens_best: int
    """The same in the best order."""
    tokens_per_s: float | None
    """How fast prompts are read."""
    estimated: bool
    """Tokens were estimated from the length of the text: no tokenizer was given."""

    @property
    def saved_tokens(self) -> int:
        """What the best order saves."""
        return self.reused_tokens_best - self.reused_tokens

    @property
    def saved_s(self) -> float | None:
        """Seconds that the best order saves."""
        return self.saved_tokens / self.tokens_per_s if self.tokens_per_s else None

    def __str__(self) -> str:
        about = "about " if self.estimated else ""

        def share(tokens: int) -> str:
            return f"{about}{tokens} ({100 * tokens / max(1, self.tokens):.0f} %)"

        lines = [
            f"{self.prompts} prompts, {about}{self.tokens} tokens",
            f"as they stand   {share(self.reused_tokens)} tokens are reused: {' → '.join(self.parts)}",
        ]
        if self.saved_tokens > 0:
            time = "" if self.saved_s is None else f", {self.saved_s:.2f} s of reading"
            lines += [
                f"best order      {share(self.reused_tokens_best)} tokens are reused: {' → '.join(self.order)}",
                f"it would save   {about}{self.saved_tokens} tokens{time}",
            ]
        else:
            lines.append("no other order of the parts reuses more")
        lines += [f"  {name}: {self.distinct[name]} different of {self.prompts}" for name in self.order]
        return "\n".join(lines)


#: One prompt: its parts by name.
_Parts: TypeAlias = "dict[str, str]"


def lint_prompts(
    prompts: Iterable[Any], model: LLM | Tokenizer | None = None, *, tokens_per_s: float | None = None
) -> PromptLint:
    """Which order of their parts would let most of these prompts be reused, one after the other, by a cache that
    forgets nothing. Parts are reused whole, and in whole blocks of 16 tokens.

    Args:
        prompts: Each a str (taken apart at empty lines), or a mapping with ``"parts"``: a list of texts, or of mappings
            with a ``"name"`` and a ``"text"``; or with ``"messages"``, of which each is a part. Parts are told apart by
            their name or, without one, by their place.
        model: Whose tokens to count, and how fast it reads; ``None``: tokens are estimated.
        tokens_per_s: How fast prompts are read, for the time saved; measured if ``model`` is an :class:`octavo.LLM`.

    Raises:
        InvalidRequestError: A prompt has another form.
    """
    taken_apart = [_parts(prompt, i) for i, prompt in enumerate(prompts)]
    if not taken_apart:
        raise InvalidRequestError("there are no prompts to look at")
    names = list(dict.fromkeys(name for parts in taken_apart for name in parts))
    table = _Table(taken_apart, names, _counter(model))
    best = table.best_order()
    given = list(range(len(names)))
    now, then = table.reused(given), table.reused(best)
    if then <= now:
        best, then = given, now
    return PromptLint(
        prompts=len(taken_apart),
        tokens=table.total,
        parts=tuple(names),
        order=tuple(names[slot] for slot in best),
        distinct={name: len(set(table.values[slot])) for slot, name in enumerate(names)},
        reused_tokens=now,
        reused_tokens_best=then,
        tokens_per_s=tokens_per_s if tokens_per_s is not None else _reading_rate(model),
        estimated=model is None,
    )


def _parts(prompt: Any, at: int) -> _Parts:
    if isinstance(prompt, str):
        pieces = prompt.split("\n\n")
        ends = ["\n\n"] * (len(pieces) - 1) + [""]
        return {f"paragraph {i + 1}": piece + end for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))}
    if isinstance(prompt, Mapping) and isinstance(prompt.get("parts"), (list, tuple)):
        found: _Parts = {}
        for i, part in enumerate(prompt["parts"]):
            name, text = f"part {i + 1}", part
            if isinstance(part, Mapping):
                name, text = part.get("name", name), part.get("text")
            if not isinstance(text, str) or not isinstance(name, str):
                raise InvalidRequestError(f"prompt {at}: parts[{i}] must be a text, or have a 'name' and a 'text'")
            if name in found:
                raise InvalidRequestError(f"prompt {at}: two parts are named {name!r}")
            found[name] = text
        return found
    if isinstance(prompt, Mapping) and isinstance(prompt.get("messages"), (list, tuple)):
        return {_message_name(message, i, at): _message_text(message) for i, message in enumerate(prompt["messages"])}
    raise InvalidRequestError(
        f"prompt {at} is a {type(prompt).__name__}; a prompt is a str, {{'parts': […]}} or {{'messages': […]}}"
    )


def _message_name(message: Any, i: int, at: int) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"prompt {at}: messages[{i}] must have a 'role' and usually a 'content'")
    return f"message {i + 1} ({message['role']})"


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _counter(model: Any) -> Callable[[str], int]:
    if model is None:
        return lambda text: -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)
    return lambda text: len(model.tokenize(text, add_special_tokens=False).ids)


def _reading_rate(model: Any) -> float | None:
    """Prompt tokens per second of a loaded model: it reads one."""
    if not hasattr(model, "generate"):
        return None
    length = min(512, model.facts.max_model_len - 1)
    ids = [i % model.facts.vocab for i in range(length)]
    result = model.generate(ids, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=f"lint {uuid4().hex}")
    return float(length / result.anatomy.prefill_s)


class _Table:
    """Prompts by parts, each text a number."""

    def __init__(self, prompts: Sequence[_Parts], names: Sequence[str], count: Callable[[str], int]) -> None:
        texts: dict[str | None, int] = {}
        self.values = [[texts.setdefault(parts.get(name), len(texts)) for parts in prompts] for name in names]
        tokens = [0 if text is None else count(text) for text in texts]
        self.tokens = [[tokens[value] for value in column] for column in self.values]
        self.total = sum(map(sum, self.tokens))
        self.prompts = range(len(prompts))

    def reused(self, order: Sequence[int]) -> int:
        """Tokens that are found if the prompts come one after the other."""
        seen: set[tuple[int, ...]] = set()
        found = 0
        for i in self.prompts:
            beginning: tuple[int, ...] = ()
            known = 0
            still = True
            for slot in order:
                beginning += (self.values[slot][i],)
                still = still and beginning in seen
                known += self.tokens[slot][i] if still else 0
                seen.add(beginning)
            found += known // _BLOCK_SIZE * _BLOCK_SIZE
        return found

    def best_order(self) -> list[int]:
        """What a part costs depends only on which parts come before it, not on their order: it is computed once for
        every combination of texts up to it. So the best order of all parts follows from the best of every subset."""
        slots = len(self.values)
        if (1 << slots) * len(self.prompts) * slots > _MOST_STEPS:
            return self._greedy()
        classes: list[list[int]] = [[0 for _ in self.prompts]]
        best: list[tuple[int, int]] = [(0, -1)]  # of each subset: what it costs at least, and its last part
        for subset in range(1, 1 << slots):
            lowest = (subset & -subset).bit_length() - 1
            classes.append(_numbered(classes[subset & (subset - 1)], self.values[lowest]))
            first = dict(zip(classes[subset], self.prompts, strict=True)).values()
            members = [slot for slot in range(slots) if subset >> slot & 1]
            cost = {slot: sum(self.tokens[slot][i] for i in first) for slot in members}
            # Of equals the one that stands last stays last.
            least, last = min((best[subset ^ (1 << slot)][0] + cost[slot], -slot) for slot in members)
            best.append((least, -last))
        order: list[int] = []
        subset = (1 << slots) - 1
        while subset:
            order.append(best[subset][1])
            subset ^= 1 << order[-1]
        return order[::-1]

    def _greedy(self) -> list[int]:
        """Always the part next of which the least is computed again, relative to its size."""
        left, order = set(range(len(self.values))), []
        classes = [0 for _ in self.prompts]
        while left:

            def again(slot: int, before: list[int] = classes) -> tuple[float, int]:
                joined = _numbered(before, self.values[slot])
                first = dict(zip(joined, self.prompts, strict=True)).values()
                return sum(self.tokens[slot][i] for i in first) / max(1, sum(self.tokens[slot])), slot

            order.append(min(left, key=again))
            left.remove(order[-1])
            classes = _numbered(classes, self.values[order[-1]])
        return order


def _numbered(classes: Sequence[int], values: Sequence[int]) -> list[int]:
    """Every combination of a class and a value gets a number."""
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(pair, len(numbers)) for pair in zip(classes, values, strict=True)]
