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
        # Greedy decoding takes the first of equals, which is what stands first among the best.
        is_greedy = all(token.top[0][0] == token.token_id for token in tokens)
        return cls(sum(logprobs), is_greedy, [token.token_id for token in tokens], logprobs)


def token_pairs(engine: Engine, prompt: Any, continuations: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The tokens of the prompt and of what follows it, for each continuation."""
    if isinstance(continuations, (str, bytes)) or not isinstance(continuations, Sequence):
        raise InvalidRequestError(f"continuations must be a list of texts, not a {type(continuations).__name__}")
    before = engine.token_ids(to_engine(prompt))
    if not before:
        raise InvalidRequestError("the prompt is empty; a continuation is scored after at least one token")
    pairs = []
    for i, continuation in enumerate(continuations):
        try:
            pairs.append(_pair(engine, prompt, before, continuation))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"continuations[{i}]: {error}") from None
    return pairs


def _pair(engine: Engine, prompt: Any, before: list[int], continuation: Any) -> tuple[list[int], list[int]]:
    if not isinstance(continuation, str):
        return before, _ids(engine, continuation)
    if not continuation:
        raise InvalidRequestError("an empty text has no tokens to score")
    if isinstance(prompt, str):
        whole, stem = engine.token_ids(prompt + continuation), prompt.rstrip()
        count = len(engine.token_ids(stem)) if stem else 0
        if 0 < count < len(whole):
            return whole[:count], whole[count:]
    # Nothing to lean on, or one token over the border: then the two are told apart.
    return before, engine.tokenize(continuation, special=False, add_special_tokens=False).ids


def _ids(engine: Engine, continuation: Any) -> list[int]:
    ids = to_engine(continuation)
    if not isinstance(ids, list):
        raise InvalidRequestError("a continuation is a str or token ids, not messages")
    return engine.token_ids(ids)
