"""What the cache says about a prompt: how much would be found, and why not more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import octavo
from conftest import GREEDY


@pytest.fixture
def llm(tiny_path: str) -> Iterator[octavo.LLM]:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as llm:
        yield llm


def tokens(count: int, family: int = 0) -> list[int]:
    return [5 + (i * (7 + family) + family) % 90 for i in range(count)]


def test_what_is_said_is_what_is_found(llm: octavo.LLM) -> None:
    for length in (1, 15, 16, 17, 33, 50):
        for family in (0, 0, 1):
            prompt = tokens(20) + tokens(length, family)
            said = llm.explain_cache(prompt)
            assert said.prompt_tokens == len(prompt)
            assert llm.generate(prompt, GREEDY, max_tokens=2).usage.cached_tokens == said.cached_tokens, said
            assert said.lost_tokens == len(prompt) - 1 - said.cached_tokens
            assert said.prompt_tokens - 1 >= said.cached_tokens
            after = llm.explain_cache(prompt)
            assert (after.cached_tokens, after.reason) == (len(prompt) - 1, "complete")
            assert "all but the last token" in str(after)


def test_the_first_token_that_differs(smollm2: str) -> None:
    with octavo.LLM(smollm2, kv_cache_bytes="64MiB", max_model_len=512) as llm:
        text = "You are a helpful assistant for the harbour office. Today is {}. Answer briefly and politely, please."
        assert llm.explain_cache(text).lost_ms is None, "nothing was measured yet"
        llm.generate(text.format("Monday"), max_tokens=1)
        said = llm.explain_cache(text.format("Friday"))
        assert said.reason == "differs"
        assert said.differs_at is not None
        ids = llm.tokenize(text.format("Friday")).ids
        assert llm.detokenize(ids[: said.differs_at]).endswith("Today is")
        assert said.prompt_text is not None
        assert said.prompt_text.startswith(" Friday")
        assert said.cached_text is not None
        assert said.cached_text.startswith(" Monday")
        assert said.lost_ms is not None
        assert said.lost_ms > 0
        assert "' Friday" in str(said).replace('"', "'")
        assert f"token {said.differs_at} differs" in str(said)
        chat = [{"role": "user", "content": "Hello"}]
        assert llm.explain_cache(chat).prompt_tokens == len(llm.render(chat)[1])


@pytest.mark.parametrize(("cached", "asked"), [("🌍", "🌎"), ("é", "è"), ("漢", "漣")])
def test_characters_of_several_tokens_are_told_whole(llm: octavo.LLM, cached: str, asked: str) -> None:
    for before in range(20):
        text = "x" * before + "{} and on it goes, for several blocks"
        llm.generate(text.format(cached), GREEDY, max_tokens=1, cache_salt=str(before))
        said = llm.explain_cache(text.format(asked), cache_salt=str(before))
        assert said.reason == "differs"
        assert said.prompt_text is not None
        assert said.cached_text is not None
        assert said.prompt_text != said.cached_text
        assert "�" not in said.prompt_text + said.cached_text
        # Unless the block's end leaves bytes alone.
        if not said.cached_text.startswith("b\""):
            assert (said.prompt_text[0], said.cached_text[0]) == (asked, cached)
            assert f'"{asked}' in str(said)


def test_the_last_token_is_always_computed(llm: octavo.LLM) -> None:
    llm.generate(tokens(64), GREEDY, max_tokens=1)
    said = llm.explain_cache(tokens(48))
    assert (said.cached_tokens, said.reason) == (32, "shorter_than_block")
    assert "what is left, but for the last token, which is always computed, does not fill a block of 16" in str(said)


def test_reasons(llm: octavo.LLM) -> None:
    assert llm.explain_cache(tokens(40)).reason == "empty_namespace"
    llm.generate(tokens(40), GREEDY, max_tokens=1)
    assert llm.explain_cache(tokens(90, family=3)).reason == "never_seen"
    assert llm.explain_cache(tokens(39)).reason == "shorter_than_block"
    assert llm.explain_cache(tokens(40), cache_salt="x").reason == "empty_namespace"
    with llm.session() as session:
        first = session.generate(tokens(30, family=5), GREEDY, max_tokens=11)
        prompt = tokens(30, family=5) + first.token_ids + [7]
        assert session.explain_cache(prompt).cached_tokens == 40
        assert llm.explain_cache(prompt).cached_tokens == 32, "what a session keeps is its own"


def test_turns_with_tools_are_explained(llm: octavo.LLM) -> None:
    turn = [{"role": "user", "content": "hi"}]
    options = {"documents": [{"text": "a document"}], "add_generation_prompt": False}
    with llm.session() as session:
        prompt = session.generate(turn, GREEDY, max_tokens=1, **options).prompt_token_ids
        said = session.explain_cache(turn, **options)
        assert (said.prompt_tokens, said.cached_tokens) == (len(prompt), len(prompt) - 1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
            session.explain_cache(turn, temperature=0)
    with pytest.raises(octavo.InvalidRequestError, match="the session is closed"):
        session.explain_cache(turn)


def test_evicted_and_when(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as probe:
        block_bytes = probe.facts.block_bytes
    with octavo.LLM(tiny_path, kv_cache_bytes=8 * block_bytes, max_model_len=128) as llm:
        llm.generate(tokens(100), GREEDY, max_tokens=1)
        llm.generate(tokens(110, family=2), GREEDY, max_tokens=1)
        said = llm.explain_cache(tokens(100))
        assert said.reason == "evicted"
        assert said.evicted_s_ago is not None
        assert 0 <= said.evicted_s_ago < 60
        assert "evicted" in str(said)
        assert llm.explain_cache(tokens(100), cache_salt="x").reason == "empty_namespace"


def test_without_prefix_caching(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", enable_prefix_caching=False) as llm:
        llm.generate(tokens(40), GREEDY, max_tokens=1)
        said = llm.explain_cache(tokens(40))
        assert (said.reason, said.cached_tokens) == ("disabled", 0)


def test_bad_prompts(llm: octavo.LLM) -> None:
    for salt in (5, None, "\ud800"):
        with pytest.raises(octavo.InvalidRequestError, match="cache_salt must be a str that is valid Unicode"):
            llm.explain_cache([1], cache_salt=salt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"explain_cache\(\) got an unexpected keyword argument 'max_tokens'"):
        llm.explain_cache([1], max_tokens=1)
    with pytest.raises(octavo.InvalidRequestError):
        llm.explain_cache([])
    with pytest.raises(octavo.InvalidRequestError, match="vocabulary"):
        llm.explain_cache([10**6])


def test_another_tenants_prompt_looks_like_nobodys(tiny_path: str) -> None:
    """Two engines that differ in one thing: whether another tenant has sent the prompt that is probed."""

    def probe(theirs: list[int]) -> tuple[object, ...]:
        with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as llm:
            llm.generate(theirs, GREEDY, max_tokens=3, cache_salt="them")
            with llm.session(cache_salt="them") as session:
                session.generate(theirs, GREEDY, max_tokens=3)
                before = llm.stats()
                said = llm.explain_cache(tokens(90), cache_salt="us")
                result = llm.generate(tokens(90), GREEDY, max_tokens=3, cache_salt="us")
                after = llm.stats()
        return (
            (said.cached_tokens, said.reason, said.differs_at, said.cached_text, said.evicted_s_ago),
            (result.usage.cached_tokens, result.anatomy.computed_tokens, result.anatomy.steps, result.anatomy.chunks),
            after.tokens_cached - before.tokens_cached,
            after.tokens_computed - before.tokens_computed,
            (after.blocks_free, after.blocks_remembered, after.blocks_owned, after.blocks_pinned),
        )

    assert probe(tokens(90)) == probe(tokens(90, family=4))
