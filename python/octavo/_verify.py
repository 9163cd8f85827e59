"""Whether an answer depends on the weather: it is asked for again, alone, and compared bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo._errors import InvalidRequestError
from octavo._octavo import Result

if TYPE_CHECKING:
    from octavo._octavo import Choice, Engine, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer and its repetition differ."""

    choice: int
    """Which of the ``n`` answers."""
    what: str
    """``token``, ``logprobs``, ``prompt_logprobs``, ``finish_reason``, ``stop_reason`` or ``text``."""
    index: int
    """Which token of the answer, or of the prompt."""
    token_id: int | None
    """The answer's token there; ``None``: it has no such token."""
    alone_token_id: int | None
    """The repetition's."""
    logprob: float | None
    """The answer's log-probability there, if it was asked for."""
    alone_logprob: float | None
    """The repetition's."""
    detail: str
    """Both sides as text."""

    def __str__(self) -> str:
        where = "" if self.what in ("finish_reason", "stop_reason", "text") else f" {self.index}"
        return f"choice {self.choice}: {self.what.replace('_', ' ')}{where} is {self.detail}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`octavo.LLM.verify` found. True if everything that could be compared is equal, bit for bit."""

    difference: Difference | None
    """The first difference, if there is one."""
    tokens: int
    """Tokens that were compared, over all choices."""
    logprobs: int
    """Of these, with how many log-probabilities were; and those of the prompt, if it had any."""
    limits: tuple[str, ...]
    """What could not be verified, and why; and what the answer was made with that this model has not: another device,
    ``dtype``, ``kv_cache_dtype`` or model gives other bits."""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            found = f"different from a run alone: {self.difference}"
        else:
            found = f"equal to a run alone, bit for bit: {self.tokens} tokens, {self.logprobs} log-probabilities"
        return "\n".join([found, *self.limits])


def verify(engine: Engine, result: Result) -> Verification:
    """Asks for every choice again, one after another."""
    if not isinstance(result, Result):
        raise InvalidRequestError(f"result must be an octavo.Result, not a {type(result).__name__}")
    compared = _Compared()
    limits = [
        f"the answer was made with {name} {there}, this model has {here}: it need not be the same"
        for name, there, here in engine.made_otherwise(result)
    ]
    for choice in result.choices:
        whole = choice.finish_reason in ("stop", "length")
        if not whole:
            seen = f"its {len(choice.token_ids)} tokens were compared" if choice.token_ids else "it has no tokens"
            limits.append(f"choice {choice.index} ended with {choice.finish_reason!r}: {seen}, not its end")
        if choice.logprobs is None:
            limits.append(f"choice {choice.index} has no logprobs: its tokens were compared alone")
        if not (whole or choice.token_ids):
            continue
        alone = _again(engine, result, choice.index)
        difference = compared.first_difference(result, choice, alone, whole)
        if difference is not None:
            return Verification(difference, compared.tokens, compared.logprobs, tuple(limits))
    return Verification(None, compared.tokens, compared.logprobs, tuple(limits))


def _again(engine: Engine, result: Result, index: int) -> Result:
    ticket = engine.submit_again(result, index)
    try:
        ticket.wait()
        return ticket.result()
    except BaseException:
        # As in LLM.generate: the exception keeps the ticket alive.
        ticket.cancel()
        raise


class _Compared:
    """Counts what was equal."""

    def __init__(self) -> None:
        self.tokens = 0
        self.logprobs = 0

    def first_difference(self, result: Result, choice: Choice, alone: Result, whole: bool) -> Difference | None:
        if choice.index == 0 and result.prompt_logprobs is not None and alone.prompt_logprobs is not None:
            # A request that was given up may have been told a part of them.
            before, after = result.prompt_logprobs[1:], alone.prompt_logprobs[1:]
            for i, (found, again) in enumerate(zip(before, after, strict=False), start=1):
                if _bits(found) != _bits(again):
                    return _difference(choice.index, "prompt_logprobs", i, found, again)
                self.logprobs += 1
        tokens = self._first_token(choice, alone, whole)
        if tokens is not None or not whole:
            return tokens
        for what in ("finish_reason", "stop_reason", "text"):
            ours, theirs = getattr(choice, what), getattr(alone, what)
            if ours != theirs:
                end, detail = len(choice.token_ids), f"{ours!r}, alone {theirs!r}"
                return Difference(choice.index, what, end, None, None, None, None, detail)
        return None

    def _first_token(self, choice: Choice, alone: Result, whole: bool) -> Difference | None:
        ours, theirs = choice.token_ids, alone.token_ids
        for i in range(max(len(ours), len(theirs)) if whole else len(ours)):
            token, again = _at(ours, i), _at(theirs, i)
            logprob, logprob_again = _at(choice.logprobs, i), _at(alone.logprobs, i)
            if token != again:
                values = [None if at is None else at.logprob for at in (logprob, logprob_again)]
                detail = f"{_named(token, values[0])}, alone {_named(again, values[1])}"
                return Difference(choice.index, "token", i, token, again, values[0], values[1], detail)
            if _bits(logprob) != _bits(logprob_again):
                return _difference(choice.index, "logprobs", i, logprob, logprob_again)
            self.tokens += 1
            self.logprobs += logprob is not None
        return None


def _difference(
    choice: int, what: str, index: int, found: TokenLogprobs | None, again: TokenLogprobs | None
) -> Difference:
    sides = (found, again)
    token, token_again = (None if at is None else at.token_id for at in sides)
    value, value_again = (None if at is None else at.logprob for at in sides)
    return Difference(choice, what, index, token, token_again, value, value_again, f"{found}, alone {again}")


def _at(values: Sequence[Any] | None, i: int) -> Any:
    return None if values is None or i >= len(values) else values[i]


def _named(token: int | None, logprob: float | None) -> str:
    if token is None:
        return "missing (the answer has ended)"
    return f"{token}" if logprob is None else f"{token} (logprob {logprob!r})"


def _bits(at: TokenLogprobs | None) -> Any:
    """As bits, so that 0.0 is not -0.0."""
    if at is None:
        return None
    values = [at.logprob, *(value for _, value in at.top)]
    return at.token_id, at.rank, [token for token, _ in at.top], struct.pack(f"<{len(values)}f", *values)
