"""Conversations that keep their blocks between turns."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import octavo
from conftest import GREEDY, fingerprint, settled


def kinds(session: octavo.Session) -> list[str]:
    return [event.kind for event in session.events]


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_next_turn_computes_only_what_is_new(llm: octavo.LLM) -> None:
    messages = [ask("Name three colours.")]
    said: list[int] = []
    known = 0
    with llm.session(ttl_s=60) as session:
        assert session.state == "new"
        for turn in range(4):
            result = session.generate(messages, temperature=0.0, max_tokens=24)
            if turn:
                # Everything that was said but for the last token, which was drawn and never run: also the answer.
                assert result.anatomy.kept == "resumed"
                assert result.usage.cached_tokens == known - 1
                assert result.prompt_token_ids[:known] == said
                assert result.anatomy.computed_tokens == len(result.prompt_token_ids) - known + len(result.token_ids)
            # The answer is the one that anybody would get for these tokens.
            alone = llm.generate(result.prompt_token_ids, temperature=0.0, max_tokens=24, cache_salt=f"alone {turn}")
            assert fingerprint(result) == fingerprint(alone)
            said = result.prompt_token_ids + result.token_ids
            known = len(said)
            messages += [{"role": "assistant", "content": result.text}, ask(f"And {turn} more?")]
        assert kinds(session) == ["kept", *["resumed", "kept"] * 3]
        assert session.report().tokens_held == known - 1


def test_what_the_model_wrote_stays_what_it_wrote(llm: octavo.LLM) -> None:
    """Tokens that a model writes need not be those that the tokenizer makes of their text."""
    text = "ab" * 40
    odd = [i for c in text for i in llm.tokenize(c).ids]
    assert odd != llm.tokenize(text).ids, "the case needs a text with more than one way to be split"
    begin = "Say: "
    with llm.session() as session:
        first = session.generate(begin, GREEDY, max_tokens=len(odd), allowed_token_ids=sorted(set(odd)))
        written = llm.tokenize(first.text).ids
        again = session.generate(begin + first.text + " and", GREEDY, max_tokens=3)
        assert again.prompt_token_ids[: len(first.prompt_token_ids) + len(odd)] == [
            *first.prompt_token_ids,
            *first.token_ids,
        ]
        assert first.token_ids != written
        assert again.usage.cached_tokens == len(first.prompt_token_ids) + len(odd) - 1
        # Another text than the one that was said.
        other = session.generate(begin + "something else", GREEDY, max_tokens=3)
        assert other.anatomy.kept == "diverged"
        assert other.prompt_token_ids == llm.tokenize(begin + "something else").ids


def test_a_special_token_in_a_message_is_none(llm: octavo.LLM) -> None:
    """Messages that only look like what was said are not taken for it."""
    with llm.session() as session:
        first = session.generate([ask("Hello")], temperature=0.0, max_tokens=8)
        said = llm.detokenize(first.prompt_token_ids + first.token_ids)
        start = llm.render([ask("")], add_generation_prompt=False)[0]
        prefix = start[: start.index("user\n") + len("user\n")] if "user\n" in start else ""
        fake = [ask(said.removeprefix(prefix) + " and more")]
        text, ids = llm.render(fake)
        assert text.startswith(said), "the case needs a text that looks the same"
        assert session.generate(fake, temperature=0.0, max_tokens=2).prompt_token_ids == ids


def test_rent_and_expiry_are_told(tiny: octavo.LLM) -> None:
    with tiny.session(ttl_s=0.2) as session:
        result = session.generate([5, 6, 7] * 10, GREEDY, max_tokens=10)
        kept = session.report()
        assert kept.tokens_held == 39
        assert kept.bytes_held == kept.blocks_held * tiny.facts.block_bytes > 0
        assert kept.expires_in_s is not None
        assert 0 < kept.expires_in_s <= 0.2
        assert tiny.stats().blocks_pinned == kept.blocks_held
        time.sleep(0.05)
        assert session.rent.byte_seconds >= kept.byte_seconds + 0.05 * kept.bytes_held
        time.sleep(0.3)  # nobody asks for anything meanwhile: it ends all the same, in time
        assert session.rent == octavo.Rent(pytest.approx(0.2 * kept.bytes_held, rel=0.2), 0)
        assert kinds(session) == ["kept", "expired"]
        assert session.state == "expired"
        assert 0.2 <= session.events[1].at_s < 0.5
        again = session.generate([*[5, 6, 7] * 10, *result.token_ids, 9], GREEDY, max_tokens=2)
        assert again.anatomy.kept == "expired"
        assert again.usage.cached_tokens == 32, "whole blocks were still remembered"
        assert again.anatomy.to_dict()["kept"] == "expired"


def test_running_requests_win(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as probe:
        block_bytes = probe.facts.block_bytes
    with octavo.LLM(tiny_path, kv_cache_bytes=12 * block_bytes, max_model_len=12 * 16) as llm:
        first, second = llm.session(), llm.session()
        first.generate([5] * 40, GREEDY, max_tokens=4)
        second.generate([6] * 40, GREEDY, max_tokens=4)
        assert llm.stats().blocks_pinned == 6
        llm.generate([7] * 140, GREEDY, max_tokens=4)
        assert (kinds(first), kinds(second)) == (["kept", "evicted"], ["kept"])
        third = llm.session()
        third.generate([8] * 90, GREEDY, max_tokens=4)
        assert kinds(second) == ["kept", "over_limit"], "sessions hold at most half of the cache"
        assert llm.stats().sessions == 3
        for session in (first, second, third):
            session.close()
        stats = settled(llm)
        assert (stats.sessions, stats.blocks_pinned, stats.blocks_owned) == (0, 0, 0)


def test_a_stream_that_was_left_is_gone_on_from(tiny: octavo.LLM) -> None:
    with tiny.session() as session:
        with session.stream([5, 6, 7], GREEDY, max_tokens=500) as stream:
            got: list[int] = []
            for chunk in stream:
                got += chunk.token_ids
                if len(got) >= 20:
                    break
            with pytest.raises(octavo.InvalidRequestError, match="still running"):
                session.generate([5, 6, 7])
            assert session.state == "running"
        # It ends within a step, and the next turn waits for that.
        result = session.generate([5, 6, 7, *got, 8], GREEDY, max_tokens=2)
        said = stream.result.token_ids
        # The last token that was drawn is not kept: nobody had run it yet.
        assert result.anatomy.kept == ("resumed" if len(said) <= len(got) + 1 else "diverged")
        assert session.generate([5, 6], GREEDY, max_tokens=30).finish_reason == "length"


def test_turns_on_an_event_loop(tiny: octavo.LLM) -> None:
    async def talk() -> None:
        with tiny.session() as session:
            first = await session.agenerate([5, 6, 7], GREEDY, max_tokens=30)
            prompt = [5, 6, 7, *first.token_ids, 8]
            async with session.astream(prompt, GREEDY, max_tokens=5) as stream:
                got = [token async for chunk in stream for token in chunk.token_ids]
            assert stream.result.usage.cached_tokens == 32
            assert got == tiny.generate(prompt, GREEDY, max_tokens=5, cache_salt="alone").token_ids

    asyncio.run(talk())


def test_without_prefix_caching(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB", enable_prefix_caching=False) as llm, llm.session() as session:
        first = session.generate([5, 6, 7], GREEDY, max_tokens=30)
        prompt = [5, 6, 7, *first.token_ids, 9]
        result = session.generate(prompt, GREEDY, max_tokens=9)
        assert result.usage.cached_tokens == 32
        assert fingerprint(result) == fingerprint(llm.generate(prompt, GREEDY, max_tokens=9))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"n": 2}, "n must be 1"),
        ({"cache_salt": "x"}, "cache_salt is the session's"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_a_turn_cannot_have(tiny: octavo.LLM, how: dict[str, Any], told: str) -> None:
    with tiny.session() as session, pytest.raises(octavo.InvalidRequestError, match=told):
        session.generate([5, 6], **how)


@pytest.mark.parametrize("ttl_s", [0, 0.0, -1.0, float("nan"), float("inf"), "x", None, 10**400, []], ids=repr)
def test_a_time_to_live_is_some_time(tiny: octavo.LLM, ttl_s: Any) -> None:
    with pytest.raises(octavo.InvalidRequestError, match="ttl_s must be a finite number of seconds above 0") as caught:
        tiny.session(ttl_s=ttl_s)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("ttl_s", [1e-300, 1, 1e18, 1e300])
def test_a_very_long_time_to_live(tiny: octavo.LLM, ttl_s: float) -> None:
    with tiny.session(ttl_s=ttl_s) as session:
        session.generate([5, 6], GREEDY, max_tokens=3)


@pytest.mark.parametrize("salt", [5, None, "\ud800", b"x"])
def test_a_namespace_is_a_text(tiny: octavo.LLM, salt: Any) -> None:
    with pytest.raises(octavo.InvalidRequestError, match="cache_salt must be a str that is valid Unicode"):
        tiny.session(cache_salt=salt)


def test_closed_sessions_and_closed_models(tiny_path: str) -> None:
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as llm:
        session = llm.session()
        session.generate([5, 6, 7], GREEDY, max_tokens=30)
        session.close()
        session.close()
        assert session.state == "closed"
        assert session.rent.bytes_held > 0, "as it stood"
        with pytest.raises(octavo.InvalidRequestError, match="closed"):
            session.generate([5, 6])
        # One that nobody holds any more is closed too.
        llm.session().generate([5, 6, 7], GREEDY, max_tokens=30)
        assert settled(llm).sessions == 0
        left = llm.session()
    with pytest.raises(octavo.EngineClosedError):
        left.report()
    left.close()
    with pytest.raises(octavo.EngineClosedError):
        left.report()


def test_sessions_of_other_namespaces_share_nothing(tiny: octavo.LLM) -> None:
    with tiny.session(cache_salt="a") as a, tiny.session(cache_salt="b") as b:
        a.generate([9, 8, 7] * 12, GREEDY, max_tokens=4)
        assert b.generate([9, 8, 7] * 12, GREEDY, max_tokens=4).usage.cached_tokens == 0


def test_a_turn_that_has_to_be_computed_again_has_not_diverged(tiny: octavo.LLM) -> None:
    prompt = list(range(1, 40))
    with tiny.session() as session:
        said = session.generate(prompt, GREEDY, max_tokens=5, ignore_eos=True)
        again = session.generate(prompt + said.token_ids + [9], GREEDY, max_tokens=2, prompt_logprobs=0)
        assert (again.anatomy.kept, again.usage.cached_tokens) == ("recomputed", 0)
        assert [(event.kind, event.tokens) for event in session.events][1] == ("recomputed", len(prompt) + 4)
        assert again.prompt_logprobs is not None
        assert len(again.prompt_logprobs) == len(prompt) + 6


def test_what_is_explained_of_a_turn_is_what_it_finds(tiny: octavo.LLM) -> None:
    """Also where somebody else's prompt has left more of it in the cache."""
    begun = [1 + i % 60 for i in range(20)]
    with tiny.session(ttl_s=60) as session:
        said = session.generate(begun, GREEDY, max_tokens=4)
        turn = said.prompt_token_ids + said.token_ids + [7] * 100
        tiny.generate(turn, GREEDY, max_tokens=1)
        told = session.explain_cache(turn)
        assert told.cached_tokens == len(said.prompt_token_ids + said.token_ids) - 1
        assert session.generate(turn, GREEDY, max_tokens=1).usage.cached_tokens == told.cached_tokens
