"""The sampler alone: what :class:`octavo.SamplingParams` make of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo import _octavo
from octavo._errors import InvalidRequestError
from octavo._params import SamplingParams

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
    """
    import numpy

    found = _octavo.sampling_probabilities(*_task(logits, params, prompt_token_ids, output_token_ids))
    return numpy.frombuffer(found, dtype="<f4")


def sample(
    logits: ArrayLike,
    params: SamplingParams | None = None,
    *,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    draws: int = 1,
) -> NDArray[numpy.uint32]:
    """Token ids drawn from one row of logits, each as if it were drawn at the position after the one before. The coins
    follow from ``params.seed`` (``None``: 0) and the position, as in the engine. Arguments as in
    :func:`sampling_probabilities`."""
    import numpy

    if not isinstance(draws, int) or draws < 0:
        raise InvalidRequestError(f"draws must be a whole number from 0 up, not {draws!r}")
    found = _octavo.sample(*_task(logits, params, prompt_token_ids, output_token_ids), draws)
    return numpy.frombuffer(found, dtype="<u4")


def _task(
    logits: Any, params: SamplingParams | None, prompt_token_ids: Any, output_token_ids: Any
) -> tuple[bytes, SamplingParams, list[int], list[int]]:
    import numpy

    row = numpy.asarray(logits, dtype="<f4")
    if row.ndim != 1 or not row.size:
        raise InvalidRequestError(f"logits must be one row of numbers, not an array of shape {row.shape}")
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be a SamplingParams, not a {type(params).__name__}")
    return row.tobytes(), params, [*map(int, prompt_token_ids)], [*map(int, output_token_ids)]
