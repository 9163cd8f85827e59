"""Log-likelihoods of given continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo._errors import InvalidRequestError
from octavo._prompts import to_engine

if TYPE_CHECKING:
    from octavo._octavo import Engine, Ticket


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after a prompt."""

    #: Natural logarithm of its probability: the sum of ``token_logprobs``.
    logprob: float
    #: Every token is the likeliest after those before it.
    is_greedy: bool
    #: The continuation's tokens.
    token_ids: list[int]
    #: The logarithm of each token's probability.
    token_logprobs: list[float]

    @classmethod
    def of(cls, ticket: Ticket) -> Score:
        """What a finished ticket says."""
        tokens = ticket.scores()
        logprobs = [token.logprob for token in tokens]
        return cls(sum(logprobs), all(token.rank == 1 for token in tokens), [t.token_id for t in tokens], logprobs)


def token_pairs(engine: Engine, prompt: Any, continuations: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The tokens of the prompt and of what follows it, for each continuation."""
    if isinstance(continuations, (str, bytes)) or not isinstance(continuations, Sequence):
        raise InvalidRequestError(f"continuations must be a list of texts, not a {type(continuations).__name__}")
    pairs = []
    before = engine.token_ids(to_engine(prompt))
    for i, continuation in enumerate(continuations):
        pair = _pair(engine, prompt, before, continuation)
        if not pair[1]:
            raise InvalidRequestError(f"continuations[{i}] is {continuation!r}, which is no token after the prompt")
        pairs.append(pair)
    return pairs


def _pair(engine: Engine, prompt: Any, before: list[int], continuation: Any) -> tuple[list[int], list[int]]:
    if not isinstance(continuation, str):
        ids = to_engine(continuation) if len(continuation) else []
        if not isinstance(ids, list):
            raise InvalidRequestError("a continuation is a str or token ids, not messages")
        return before, ids
    if not isinstance(prompt, str):
        return before, engine.tokenize(continuation, special=False, add_special_tokens=False).ids
    stem = prompt.rstrip(" ")
    # All spaces and nothing else: there is no other text that they could lean on.
    whole = engine.token_ids(prompt + continuation)
    count = len(engine.token_ids(stem)) if stem else len(before)
    return whole[:count], whole[count:]
