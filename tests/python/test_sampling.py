"""Every parameter does what it says, seen from outside."""

from __future__ import annotations

import math
from typing import Any

import pytest

import octavo
from conftest import GREEDY
from octavo import SamplingParams

PROMPT = "Once upon a time"


def test_overrides_are_fields(tiny: octavo.LLM) -> None:
    assert len(tiny.generate([1], GREEDY, max_tokens=3).token_ids) == 3
    assert len(tiny.generate([1], temperature=0.0, max_tokens=3, ignore_eos=True).token_ids) == 3
    with pytest.raises(TypeError, match="max_new_tokens"):
        tiny.generate([1], max_new_tokens=3)


def test_a_seed_is_an_answer(tiny: octavo.LLM) -> None:
    def answer(**keywords: Any) -> list[int]:
        return tiny.generate([1, 2], max_tokens=20, ignore_eos=True, **keywords).token_ids

    assert answer(seed=1) == answer(seed=1)
    assert len({tuple(answer(seed=seed)) for seed in range(8)}) > 1
    assert answer(seed=2**64 - 1) == answer(seed=2**64 - 1)


def test_stop_strings_never_leak(llm: octavo.LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY, max_tokens=40).text
    stop = whole[20:26]
    for include in (False, True):
        with llm.stream(
            PROMPT, GREEDY, max_tokens=40, stop=[stop, "\0never"], include_stop_str_in_output=include
        ) as stream:
            text = "".join(chunk.text for chunk in stream)
        result = stream.result
        end = whole.index(stop) + (len(stop) if include else 0)
        assert text == result.text == whole[:end]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_stop_tokens(llm: octavo.LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY, max_tokens=20).token_ids
    token = whole[5]
    result = llm.generate(PROMPT, GREEDY, max_tokens=20, stop_token_ids=[token])
    assert result.token_ids == whole[: whole.index(token) + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    later = llm.generate(PROMPT, GREEDY, max_tokens=20, stop_token_ids=[token], min_tokens=10)
    assert len(later.token_ids) >= 10


def test_the_models_own_end(llm: octavo.LLM) -> None:
    result = llm.generate([{"role": "user", "content": "Say: Hi."}], temperature=0.0, max_tokens=200)
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in result.text


def test_bias_bans_and_allowances(tiny: octavo.LLM) -> None:
    free = tiny.generate([1, 2], GREEDY, max_tokens=10).token_ids
    assert free[0] not in tiny.generate([1, 2], GREEDY, max_tokens=10, logit_bias={free[0]: -1000}).token_ids
    assert free[0] not in tiny.generate([1, 2], GREEDY, max_tokens=10, bad_words=[[free[0]]]).token_ids
    assert set(tiny.generate([1, 2], GREEDY, max_tokens=10, allowed_token_ids=[3, 4]).token_ids) <= {3, 4}
    assert tiny.generate([1, 2], GREEDY, max_tokens=5, logit_bias={9: 1000.0}).token_ids == [9] * 5
    strict = tiny.generate([1, 2], GREEDY, max_tokens=40, repetition_penalty=2.0, frequency_penalty=2.0).token_ids
    assert len(set(strict)) > len(set(tiny.generate([1, 2], GREEDY, max_tokens=40).token_ids)) or len(set(strict)) == 40


def test_bad_words_are_banned_with_and_without_a_space(llm: octavo.LLM) -> None:
    text = llm.generate(PROMPT, GREEDY, max_tokens=12).text
    word = text.split()[1].strip(",.")
    assert word in text
    assert word not in llm.generate(PROMPT, GREEDY, max_tokens=12, bad_words=[word]).text.split()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", None),
        ("min_tokens", 1000),
        ("n", 0),
        ("n", 10**6),
        ("n", "two"),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 1e9),
        ("frequency_penalty", math.nan),
        ("logit_bias", {10**6: 1.0}),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {"three": 1.0}),
        ("logit_bias", [3]),
        ("bad_words", [[]]),
        ("bad_words", "word"),
        ("bad_words", 3),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**6]),
        ("logprobs", 65),
        ("logprobs", -1),
        ("prompt_logprobs", 1000),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 2),
    ],
)
def test_impossible_values_are_named(tiny: octavo.LLM, name: str, value: Any) -> None:
    with pytest.raises(octavo.InvalidRequestError) as caught:
        tiny.generate([1], **{name: value})
    assert name in str(caught.value) or (name == "stop" and "stop strings" in str(caught.value))
    assert isinstance(caught.value, ValueError)
    assert len(tiny.generate([1], GREEDY, max_tokens=1).token_ids) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("deadline_s", -1.0), ("deadline_s", math.nan), ("deadline_s", "soon"), ("priority", "high"), ("priority", 2**40),
     ("cache_salt", None), ("user", 7)],
)  # fmt: skip
def test_impossible_options_are_named(tiny: octavo.LLM, name: str, value: Any) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=name):
        tiny.generate([1], **{name: value})


def test_params_must_be_params(tiny: octavo.LLM) -> None:
    with pytest.raises(octavo.InvalidRequestError, match="must be a SamplingParams, not a dict"):
        tiny.generate([1], {"temperature": 0.0})
    assert tiny.generate([1], SamplingParams(max_tokens=1)).usage.completion_tokens == 1


def test_the_prefix_cache_shows_and_is_private(tiny: octavo.LLM) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 8
    first = tiny.generate(ids, GREEDY, max_tokens=8, cache_salt="tenant a")
    again = tiny.generate(ids, GREEDY, max_tokens=8, cache_salt="tenant a")
    other = tiny.generate(ids, GREEDY, max_tokens=8, cache_salt="tenant b")
    assert (first.usage.cached_tokens, other.usage.cached_tokens) == (0, 0)
    assert again.usage.cached_tokens == 48  # the block that holds the last token is computed again
    assert first.token_ids == again.token_ids == other.token_ids
