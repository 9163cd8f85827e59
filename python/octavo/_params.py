"""What a caller may set: how to sample, how a call is treated, how an engine is set up. The engine reads it by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo._errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Checked when a request is made; an impossible value raises
    :class:`octavo.InvalidRequestError` with its name.

    The steps run in this order: the grammar's mask, allowed and banned tokens, logit bias, penalties, temperature,
    ``min_p``, ``top_k``, ``top_p``, then the draw. The same prompt, parameters and seed give the same tokens, whatever
    else is running.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest, in [0, 1]."""
    max_tokens: int = 256
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """Nothing ends the generation before this many tokens."""
    n: int = 1
    """How many answers to the one prompt, from 1 to the model's ``max_num_seqs``."""
    stop: str | Sequence[str] | None = None
    """Texts that end the generation: at most 64, of at most 4096 bytes each. They are looked for in all of the text,
    also in the U+FFFD that stand for broken characters at its end."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the generation, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the text that ended it."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the generation."""
    seed: int | None = None
    """Seed of the coins; ``None``: drawn from the engine's."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that was generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output; 1 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    bad_words: Sequence[str | Sequence[int]] | None = None
    """Words whose tokens must not be generated one after the other: each as token ids, or as text, which stands for
    the tokens that it is split into, with and without a space before it. The same text spelled with other tokens can
    still appear, above all where a grammar asks for it."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be generated."""
    logprobs: int | None = None
    """Log-probability of every generated token and of this many of the best, at most 64; 0: only the chosen one's."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, likewise at most 64."""
    skip_special_tokens: bool = True
    """Special tokens leave no text."""
    json_schema: Mapping[str, Any] | str | bool | None = None
    """The answer is JSON that this schema (a dict, or JSON text) accepts; ``True`` and ``{}``: any JSON. At most one of
    ``json_schema``, ``regex``, ``grammar`` and ``choice`` may be given. Where nothing can follow the answer ends with
    ``"stop"``, also before ``min_tokens`` and with ``ignore_eos``; one that ``max_tokens`` cuts off is not complete."""
    regex: str | None = None
    """The whole answer matches this regular expression (Rust's syntax: no look-around, no back-references)."""
    grammar: str | None = None
    """The answer follows this grammar, in llguidance's variant of Lark; it begins at the rule ``start``."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""


def schema_text(schema: Any) -> str:
    """A JSON schema as JSON text."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(f"json_schema must be a dict, JSON text or True, not a {type(schema).__name__}")
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema must be made of JSON values: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a call is treated, whatever it asks for."""

    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is set up. The meaning of each field is told at :class:`octavo.LLM`."""

    device: str
    dtype: str
    kv_cache_dtype: str
    kv_cache_bytes: int | None
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_queue: int
    itl_target_ms: float | None
    enable_prefix_caching: bool
    threads: int | None
    seed: int
