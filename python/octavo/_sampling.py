"""The sampler alone: what :class:`octavo.SamplingParams` make of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo import _octavo
from octavo._errors import InvalidRequestError
from octavo._numpy import numpy_for
from octavo._params import SamplingParams
from octavo._tokenizer import checked_ids

if TYPE_CHECKING:
    import numpy
    from numpy.typing import ArrayLike, NDArray


def sampling_probabilities(
    logits: ArrayLike,
    params: SamplingParams | None = None,
    *,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
) -> NDArray[numpy.float32]:
    """The probability with which each token would be drawn: the very steps of the engine, in its order.

    Args:
        logits: One number per token of the vocabulary, as from :meth:`octavo.LLM.logits`.
        params: How to sample. ``bad_words`` must be token ids here; what constrains the text (``stop``, grammars,
            ``min_tokens``) has no part in it.
        prompt_token_ids: The prompt, for ``repetition_penalty`` and ``bad_words``.
        output_token_ids: What has been generated, for these and the other penalties.

    Returns:
        float32, one for each token; they sum to 1.

    Raises:
        InvalidRequestError: A parameter is impossible, or no token is left to draw.
        ImportError: There is no numpy.
    """
    numpy = numpy_for("probabilities")
    found = _octavo.sampling_probabilities(*_task(logits, params, prompt_token_ids, output_token_ids))
    probabilities: NDArray[Any] = numpy.frombuffer(found, dtype="<f4")
    return probabilities


def sample(
    logits: ArrayLike,
    params: SamplingParams | None = None,
    *,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    draws: int = 1,
) -> NDArray[numpy.uint32]:
    """Token ids drawn from one row of logits, each as if it were drawn at the position after the one before. The coins
    follow from ``params.seed`` (``None``: 0) and the position, as in the engine. Arguments and errors as in
    :func:`sampling_probabilities`.

    Args:
        draws: How many, from 0 to 16,777,216.

    Returns:
        uint32, one for each draw.
    """
    numpy = numpy_for("drawn tokens")
    found = _octavo.sample(*_task(logits, params, prompt_token_ids, output_token_ids), draws)
    ids: NDArray[Any] = numpy.frombuffer(found, dtype="<u4")
    return ids


def _task(
    logits: Any, params: SamplingParams | None, prompt_token_ids: Any, output_token_ids: Any
) -> tuple[bytes, SamplingParams, list[int], list[int]]:
    numpy = numpy_for("logits")
    try:
        with numpy.errstate(over="ignore"):  # infinity is refused with the token's name
            row = numpy.asarray(logits, dtype="<f4")
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"logits must be one row of numbers: {error}") from None
    if row.ndim != 1 or not row.size:
        raise InvalidRequestError(f"logits must be one row of numbers, not an array of shape {row.shape}")
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be a SamplingParams, not a {type(params).__name__}")
    # What holds an answer to a form has no part in it.
    params = replace(params, json_schema=None, regex=None, grammar=None, choice=None)
    return row.tobytes(), params, checked_ids(prompt_token_ids), checked_ids(output_token_ids)
