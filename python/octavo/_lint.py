"""Which order of a prompt's parts the prefix cache can do most with: stable first, variable last."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from octavo._errors import InvalidRequestError
from octavo._lint_order import Table

if TYPE_CHECKING:
    from octavo._llm import LLM
    from octavo._tokenizer import Tokenizer

#: Every order of the parts is tried where that reads at most so many tokens.
_MOST_TOKENS = 1_000_000
#: Tokens in a block of the cache, by default: what is reused is whole blocks.
_BLOCK_SIZE = 16
#: Bytes of a token: of its id; and about so many of text, where there is no tokenizer to ask.
_TOKEN = 4


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
    present: Mapping[str, int]
    """How many prompts have each part."""
    distinct: Mapping[str, int]
    """How many different texts it has in them."""
    reused_tokens: int
    """Tokens that a prefix cache of any size finds, as the prompts stand."""
    reused_tokens_best: int
    """The same in :attr:`order`."""
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
        lines += [f"  {name}: {self.distinct[name]} different of {self.present[name]}" for name in self.order]
        return "\n".join(lines)


def lint_prompts(
    prompts: Iterable[Any], model: LLM | Tokenizer | None = None, *, tokens_per_s: float | None = None
) -> PromptLint:
    """How much of these prompts, one after the other, a prefix cache that forgets nothing finds: whole blocks of
    tokens, and of an equal prompt all but the last. And in which order of their parts it would find most.

    Few parts are tried in every order. Of many the order is the one in which whole parts are reused most, or nearly
    so: what blocks cut off, and what two texts of a part begin with alike, enters into the numbers, not the choice.

    Args:
        prompts: Each a str (taken apart at empty lines), or a mapping with ``"parts"``: a list of texts, or of mappings
            with a ``"name"`` and a ``"text"``; or with ``"messages"``, of which each is a part. Parts are told apart by
            their name or, without one, by their place. A part may be absent from some prompts.
        model: Whose tokens, blocks and chat template to take, and how fast it reads. With a :class:`octavo.Tokenizer`
            messages are their contents alone; with ``None`` tokens are also estimated.
        tokens_per_s: How fast prompts are read, for the time saved; measured if ``model`` is an :class:`octavo.LLM`.

    Raises:
        InvalidRequestError: A prompt has another form, or an argument is impossible.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts must be a list of prompts, not a {type(prompts).__name__}")
    if model is not None and not hasattr(model, "tokenize"):
        raise InvalidRequestError(f"model must be an octavo.LLM or octavo.Tokenizer, not a {type(model).__name__}")
    if tokens_per_s is not None:
        _check_rate(tokens_per_s)
    taken_apart = [_Prompt.of(prompt, i) for i, prompt in enumerate(prompts)]
    if not taken_apart:
        raise InvalidRequestError("there are no prompts to look at")
    names = list(dict.fromkeys(name for prompt in taken_apart for name in prompt.parts))
    reader = _Reader(taken_apart, model)
    tokens, now = reader.read(None)
    best, then = _best_order(reader, names, tokens)
    texts = {name: [prompt.parts[name] for prompt in taken_apart if name in prompt.parts] for name in names}
    return PromptLint(
        prompts=len(taken_apart),
        tokens=tokens,
        parts=tuple(names),
        order=tuple(best if then > now else names),
        present={name: len(found) for name, found in texts.items()},
        distinct={name: len(set(found)) for name, found in texts.items()},
        reused_tokens=now,
        reused_tokens_best=max(now, then),
        tokens_per_s=tokens_per_s if tokens_per_s is not None else _reading_rate(model),
        estimated=model is None,
    )


def _best_order(reader: _Reader, names: list[str], tokens: int) -> tuple[Sequence[str], int]:
    """The best order of the parts, and what is reused then."""
    if math.factorial(min(len(names), 20)) * tokens <= _MOST_TOKENS:
        # Of equals the first, which is nearest to how they stand.
        return max(((order, reader.reused(order)) for order in permutations(names)), key=lambda found: found[1])
    table = Table([prompt.parts for prompt in reader.prompts], names, reader.count)
    order = [names[slot] for slot in table.best_order()]
    return order, reader.reused(order)


def _check_rate(tokens_per_s: Any) -> None:
    try:
        possible = math.isfinite(tokens_per_s) and tokens_per_s > 0
    except (TypeError, ValueError, OverflowError):
        possible = False
    if not possible:
        raise InvalidRequestError(f"tokens_per_s must be a finite number above 0, not {tokens_per_s!r}")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, taken apart."""

    parts: dict[str, str]
    """By name, as they stand."""
    between: str
    """What stands between two of them."""
    messages: dict[str, Mapping[str, Any]] | None
    """By the same names, if it is a chat."""

    @classmethod
    def of(cls, prompt: Any, at: int) -> _Prompt:
        if isinstance(prompt, str):
            pieces = prompt.split("\n\n")
            return cls({f"paragraph {i + 1}": piece for i, piece in enumerate(pieces)}, "\n\n", None)
        if isinstance(prompt, Mapping) and isinstance(prompt.get("parts"), (list, tuple)):
            return cls(_named_parts(prompt["parts"], at), "", None)
        if isinstance(prompt, Mapping) and isinstance(prompt.get("messages"), (list, tuple)):
            messages = {_message_name(message, i, at): message for i, message in enumerate(prompt["messages"])}
            return cls({name: _message_text(message) for name, message in messages.items()}, "", messages)
        raise InvalidRequestError(
            f"prompt {at} is a {type(prompt).__name__}; a prompt is a str, {{'parts': […]}} or {{'messages': […]}}"
        )

    def in_order(self, order: Sequence[str] | None) -> list[str]:
        """Names of its parts; ``None``: as they stand."""
        return list(self.parts) if order is None else [name for name in order if name in self.parts]


def _named_parts(parts: Sequence[Any], at: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for i, part in enumerate(parts):
        name, text = f"part {i + 1}", part
        if isinstance(part, Mapping):
            name, text = part.get("name", name), part.get("text")
        if not isinstance(text, str) or not isinstance(name, str):
            raise InvalidRequestError(f"prompt {at}: parts[{i}] must be a text, or have a 'name' and a 'text'")
        if name in found:
            raise InvalidRequestError(f"prompt {at}: two parts are named {name!r}")
        found[name] = text
    return found


def _message_name(message: Any, i: int, at: int) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"prompt {at}: messages[{i}] must have a 'role' and usually a 'content'")
    return f"message {i + 1} ({message['role']})"


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    try:
        return json.dumps(content, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"a message's content must be made of JSON values: {error}") from None


def _reading_rate(model: Any) -> float | None:
    """Prompt tokens per second of a loaded model: it reads one."""
    if not hasattr(model, "generate"):
        return None
    length = min(512, model.facts.max_model_len - 1)
    ids = [i % model.facts.vocab for i in range(length)]
    result = model.generate(ids, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=f"lint {uuid4().hex}")
    return float(length / result.anatomy.prefill_s)


class _Reader:
    """Prompts as the cache gets them: rows of tokens, of four bytes each."""

    def __init__(self, prompts: Sequence[_Prompt], model: Any) -> None:
        self.prompts = prompts
        self._model = model
        self._is_llm = hasattr(model, "generate")
        self._block_size = model.facts.block_size if self._is_llm else _BLOCK_SIZE

    def read(self, order: Sequence[str] | None) -> tuple[int, int]:
        """Tokens of all prompts, and how many of them are found."""
        cache, tokens, found = _Cache(self._block_size), 0, 0
        for i, prompt in enumerate(self.prompts):
            try:
                row = self._row(prompt, prompt.in_order(order))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {i}: {error}") from None
            tokens += -(-len(row) // _TOKEN)
            found += cache.find(row)
        return tokens, found

    def reused(self, order: Sequence[str]) -> int:
        """Tokens that are found in another order; -1: a chat template does not take it."""
        try:
            return self.read(order)[1]
        except InvalidRequestError:
            return -1

    def count(self, text: str) -> int:
        """Tokens of a part alone."""
        return -(-len(self._tokens(text, add_special_tokens=False)) // _TOKEN)

    def _row(self, prompt: _Prompt, names: list[str]) -> bytes:
        if prompt.messages is not None and self._is_llm:
            return array("I", self._model.render([prompt.messages[name] for name in names])[1]).tobytes()
        return self._tokens(prompt.between.join(prompt.parts[name] for name in names))

    def _tokens(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        if self._model is None:
            return text.encode(errors="replace")
        return array("I", self._model.tokenize(text, add_special_tokens=add_special_tokens).ids).tobytes()


class _Cache:
    """A prefix cache that forgets nothing."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size * _TOKEN
        # A block is known by a hash of all up to its end, and so is the end of a prompt.
        self._known: set[int] = set()

    def find(self, row: bytes) -> int:
        """Tokens of a prompt that are found; it is known from then on. Its last is always computed."""
        stem = max(0, -(-len(row) // _TOKEN) - 1) * _TOKEN
        name, found, finding = 0, 0, True
        for begin in range(0, len(row), self._block):
            end = begin + self._block
            if begin < stem < end:
                tail = hash((name, row[begin:stem], "end"))
                found = stem if finding and tail in self._known else found
                self._known.add(tail)
            if end > len(row):
                break
            name = hash((name, row[begin:end]))
            finding = finding and name in self._known
            found = end if finding and end <= stem else found
            self._known.add(name)
        return found // _TOKEN
