"""Log-likelihoods of continuations, and what the choices of one call share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE, settled


def log_softmax(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    highest = wide.max(axis=-1, keepdims=True)
    return wide - highest - np.log(np.exp(wide - highest).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_scores_are_what_the_logits_say(tiny: octavo.LLM, length: int) -> None:
    prompt = [5 + i % 90 for i in range(length)]
    continuations = [[7], [7, 8, 9], list(range(20, 60)), [7]]
    for score, continuation in zip(tiny.score(prompt, continuations), continuations, strict=True):
        rows = log_softmax(tiny.logits(prompt + continuation, positions="all"))[length - 1 : -1]
        wanted = rows[np.arange(len(continuation)), continuation]
        assert score.token_ids == continuation
        assert np.allclose(score.token_logprobs, wanted, atol=1e-5)
        assert math.isclose(score.logprob, sum(score.token_logprobs))
        assert score.is_greedy == bool((rows.argmax(axis=1) == continuation).all())


def test_the_greedy_answer_is_greedy(tiny: octavo.LLM) -> None:
    prompt = [11, 12, 13]
    answer = tiny.generate(prompt, GREEDY, max_tokens=6).token_ids
    other = [*answer[:5], (answer[5] + 1) % 100]
    greedy, not_greedy = tiny.score(prompt, [answer, other])
    assert (greedy.is_greedy, not_greedy.is_greedy) == (True, False)
    assert greedy.logprob > not_greedy.logprob


def test_the_prompt_is_computed_once(tiny_path: str) -> None:
    for caching in (True, False):
        with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", enable_prefix_caching=caching) as llm:
            prompt = [5 + i % 90 for i in range(100)]
            before = llm.stats().tokens_computed
            llm.score(prompt, [[i, i + 1] for i in range(10, 26)])
            computed = llm.stats().tokens_computed - before
            # The row of the prompt's last token scores a continuation's first, so each computes it for itself.
            assert computed == 100 + 2 + 15 * (1 + 2)


def test_text_is_cut_as_evaluation_harnesses_cut_it(tiny: octavo.LLM) -> None:
    ids = lambda text: tiny.tokenize(text).ids  # noqa: E731
    (score,) = tiny.score("The sky is ", ["blue and wide"])
    whole, stem = ids("The sky is blue and wide"), ids("The sky is")
    assert score.token_ids == whole[len(stem) :]
    # The two would be one token: told apart.
    merged = next(text for text in ("he", "in", "an", "th", "er", "on") if len(ids(text)) == 1 + len(ids("")))
    (score,) = tiny.score(merged[0], [merged[1]])
    assert score.token_ids == tiny.tokenize(merged[1], special=False, add_special_tokens=False).ids
    (score,) = tiny.score([5, 6], ["blue"])
    assert score.token_ids == tiny.tokenize("blue", special=False, add_special_tokens=False).ids
    (score,) = tiny.score("A", np.array([[3, 4]]).tolist())
    assert score.token_ids == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "continuations", "message"),
    [
        ("A", "B", "a list of texts"),
        ("A", [""], "continuations[0]: an empty text"),
        ([5], [[6], []], "continuations[1]: the prompt is empty"),
        ("A", [5], "continuations[0]: "),
        ([], [[6]], "the prompt is empty"),
        ([5], [[6], [10**6]], "continuations[1]: "),
        ([5], [[6] * 100_000], "max_model_len"),
        ([5], [[6], [6] * 100_000], "continuations[1]: "),
    ],
)
def test_bad_continuations_are_named(tiny: octavo.LLM, prompt: Any, continuations: Any, message: str) -> None:
    with pytest.raises(octavo.InvalidRequestError) as error:
        tiny.score(prompt, continuations)
    assert message in str(error.value)
    settled(tiny)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_choices_share_the_prompt(tiny_path: str, length: int, caching: bool) -> None:
    """Every choice beyond the first takes the prompt but for its last token, and draws what it would draw alone."""
    prompt = [5 + i % 90 for i in range(length)]
    params = octavo.SamplingParams(max_tokens=9, ignore_eos=True, seed=3, n=5)
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", enable_prefix_caching=caching) as llm:
        result = llm.generate(prompt, params)
        stats = settled(llm)
        # The prompt once, its last token for every further choice, and what each generates.
        assert stats.tokens_computed == length + 4 + 5 * 8
        again = llm.generate(prompt, params)
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in result.choices]
    assert len({tuple(choice.token_ids) for choice in result.choices}) == 5
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", max_num_seqs=5, max_num_batched_tokens=16) as other:
        assert [c.token_ids for c in other.generate(prompt, params).choices] == [c.token_ids for c in result.choices]


@pytest.mark.parametrize("model", ["gguf/gemma3-q8_0.gguf", "tiny/gemma3/bf16"])
def test_windows_give_their_blocks_back(model: str) -> None:
    """Five local layers see 20 positions and one sees all: a long sequence needs little more than the one's share."""
    path = str(Path(ORACLE) / model)
    prompt = [5 + i % 90 for i in range(600)]
    with octavo.LLM(path, kv_cache_bytes="16MiB") as llm:
        whole = llm.generate(prompt, GREEDY, max_tokens=40)
        again = llm.generate(prompt, GREEDY, max_tokens=40)
        assert (whole.usage.cached_tokens, again.usage.cached_tokens) == (0, 599)
        layers, block = 6, llm.facts.block_bytes
    needed = layers * 40 * block
    with octavo.LLM(path, kv_cache_bytes=needed // 3, max_num_batched_tokens=64) as llm:
        small = llm.generate(prompt, GREEDY, max_tokens=40)
        assert settled(llm).preemptions == 0
    assert whole.token_ids == again.token_ids == small.token_ids
