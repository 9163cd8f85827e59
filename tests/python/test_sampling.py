"""Every parameter does what it says, seen from outside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE, bits
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


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_found_in_broken_ends(llm: octavo.LLM, include: bool) -> None:
    """Broken bytes become U+FFFD only when nothing can make them whole any more: at the end."""
    broken = [i for i in range(llm.facts.vocab) if "\ufffd" in llm.detokenize([i])]
    assert broken
    ends = 0
    for seed in range(12):
        keywords: dict[str, Any] = {"seed": seed, "max_tokens": 3, "allowed_token_ids": broken}
        whole = llm.generate("x", **keywords).text
        stopping = {"stop": "\ufffd", "include_stop_str_in_output": include, **keywords}
        with llm.stream("x", **stopping) as stream:
            text = "".join(chunk.text for chunk in stream)
        result = stream.result
        if "\ufffd" not in whole:
            assert (result.text, result.finish_reason) == (whole, "length")
            continue
        assert text == result.text == whole[: whole.index("\ufffd") + include]
        assert (result.finish_reason, result.stop_reason) == ("stop", "\ufffd")
        ends += len(result.token_ids) == keywords["max_tokens"]
        # Only a token that ends it comes after: the string came first.
        last = llm.generate("x", stop_token_ids=broken, **stopping)
        assert last.finish_reason == "stop"
        assert include or "\ufffd" not in last.text
    assert ends > 1


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


def test_bad_words_ban_tokens_not_spellings(llm: octavo.LLM) -> None:
    held = llm.generate(PROMPT, GREEDY, regex="hello", bad_words=["hello"])
    banned = [llm.tokenize(text, add_special_tokens=False).ids for text in ("hello", " hello")]
    assert held.text == "hello"
    assert held.token_ids not in banned


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
    assert again.usage.cached_tokens == 63  # the last token is computed again
    assert first.token_ids == again.token_ids == other.token_ids


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_every_backend_draws_what_the_sampler_draws(device: str) -> None:
    """From the same logits, parameters, seed and position the same token, wherever the logits came from."""
    tokens = []
    with octavo.LLM(ORACLE / "gguf" / "llama-f16.gguf", device=device, kv_cache_bytes="8MiB") as model:
        for seed in range(40):
            prompt = [1 + (seed * 7 + i * i) % 500 for i in range(1 + seed % 20)]
            params = SamplingParams(
                temperature=1.3, top_k=50, top_p=0.95, min_p=0.001, repetition_penalty=1.1, seed=seed, max_tokens=1
            )
            logits = model.logits(prompt)[0]
            (token,) = octavo.sample(logits, params, prompt_token_ids=prompt)
            assert model.generate(prompt, params, ignore_eos=True).token_ids == [token]
            assert octavo.sampling_probabilities(logits, params, prompt_token_ids=prompt)[token] > 0
            tokens.append(token)
    assert len(set(tokens)) > 20


def test_the_sampler_alone() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0])
    even = octavo.sampling_probabilities(np.zeros(4))
    assert even.dtype == np.float32
    assert even.tolist() == [0.25] * 4
    assert octavo.sampling_probabilities(logits, SamplingParams(temperature=0.0)).tolist() == [0, 0, 0, 1]
    kept = octavo.sampling_probabilities(logits, SamplingParams(top_k=2, bad_words=[[0, 3]]), output_token_ids=[0])
    assert (kept > 0).tolist() == [False, True, True, False]
    first, again = (octavo.sample(logits, SamplingParams(seed=5), draws=100) for _ in range(2))
    assert (first == again).all()
    # The coin belongs to the position: the second draw is the first of one position later.
    assert octavo.sample(logits, SamplingParams(seed=5), output_token_ids=[0], draws=99).tolist() == first[1:].tolist()
    for call, says in [
        (lambda: octavo.sample([[1.0]]), "one row"),
        (lambda: octavo.sample([]), "one row"),
        (lambda: octavo.sample([1.0, math.nan]), "NaN"),
        (lambda: octavo.sample([1.0], SamplingParams(top_p=2.0)), "top_p"),
        (lambda: octavo.sample([1.0], output_token_ids=[1]), "outside the vocabulary"),
        (lambda: octavo.sample([1.0], draws=-1), "draws"),
        (lambda: octavo.sample([1.0], {"seed": 1}), "must be a SamplingParams"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(octavo.InvalidRequestError, match=says):
            call()


def test_prompt_logprobs_however_the_prompt_is_read(tiny_path: str) -> None:
    """Bit for bit: in one piece, in chunks, after a hit in the prefix cache, and in the middle of a batch."""
    ids = [1 + (i * 37) % 500 for i in range(100)]

    def scored(model: octavo.LLM, k: int) -> Any:
        result = model.generate(ids, GREEDY, max_tokens=2, prompt_logprobs=k, logprobs=k)
        found = result.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(ids)
        assert all(len(each.top) == k for each in found[1:] if each is not None)
        return [bits([each]) for each in found[1:] if each is not None], bits(result.logprobs)

    with octavo.LLM(tiny_path, kv_cache_bytes="8MiB") as whole:
        wanted = {k: scored(whole, k) for k in (0, 3)}
        assert whole.generate(ids, GREEDY, max_tokens=2).usage.cached_tokens == 99
        assert {k: scored(whole, k) for k in (0, 3)} == wanted
        longer = whole.generate([*ids, 7, 8], GREEDY, max_tokens=1, prompt_logprobs=3).prompt_logprobs
        assert longer is not None
        assert [bits([each]) for each in longer[1 : len(ids)] if each is not None] == wanted[3][0]
    for rows in (16, 33):
        with (
            octavo.LLM(tiny_path, kv_cache_bytes="8MiB", max_num_batched_tokens=rows, max_num_seqs=4) as chunked,
            chunked.stream([9] * 50, GREEDY, max_tokens=100),
        ):
            assert {k: scored(chunked, k) for k in (0, 3)} == wanted


def test_special_tokens_in_the_text(llm: octavo.LLM) -> None:
    (special,) = llm.tokenize("<|im_start|>").ids
    ordinary = llm.tokenize(" the").ids
    only = {"allowed_token_ids": [special, *ordinary], "temperature": 50.0, "seed": 3}
    shown = llm.generate(PROMPT, max_tokens=20, ignore_eos=True, skip_special_tokens=False, **only)
    hidden = llm.generate(PROMPT, max_tokens=20, ignore_eos=True, skip_special_tokens=True, **only)
    assert shown.token_ids == hidden.token_ids
    assert special in shown.token_ids
    assert shown.text.count("<|im_start|>") == shown.token_ids.count(special)
    assert hidden.text == shown.text.replace("<|im_start|>", "")
    # A stop string is looked for in the text as it is given out.
    stopped = llm.generate(
        PROMPT, max_tokens=20, ignore_eos=True, skip_special_tokens=False, stop="<|im_start|>", **only
    )
    assert (stopped.finish_reason, "<|im_start|>" in stopped.text) == ("stop", False)
    assert llm.generate(PROMPT, max_tokens=20, ignore_eos=True, stop="<|im_start|>", **only).finish_reason == "length"


def test_words_of_several_tokens_are_banned_as_a_whole(tiny: octavo.LLM) -> None:
    free = tiny.generate([1, 2], GREEDY, max_tokens=12).token_ids
    pair = free[4:6]
    found = tiny.generate([1, 2], GREEDY, max_tokens=12, bad_words=[pair]).token_ids
    assert found[:5] == free[:5]
    assert found[5] != free[5]
    assert pair not in [found[i : i + 2] for i in range(len(found) - 1)]
    # A word may begin in the prompt.
    assert tiny.generate([1, 2], GREEDY, max_tokens=1, bad_words=[[2, free[0]]]).token_ids != free[:1]


@pytest.mark.parametrize("include", [False, True])
def test_several_stop_strings_and_a_minimum(llm: octavo.LLM, include: bool) -> None:
    whole = llm.generate(PROMPT, GREEDY, max_tokens=40)
    text = whole.text
    early, late = text[10:14], text[12:20]  # they overlap; the one that ends first counts
    result = llm.generate(PROMPT, GREEDY, max_tokens=40, stop=[late, early], include_stop_str_in_output=include)
    end = text.index(early) + (len(early) if include else 0)
    assert (result.text, result.stop_reason) == (text[:end], early)
    later = llm.generate(PROMPT, GREEDY, max_tokens=40, stop=[early], min_tokens=20, include_stop_str_in_output=include)
    assert len(later.token_ids) >= 20
    assert later.text.startswith(text[: text.index(early) + len(early)])
