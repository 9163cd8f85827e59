"""Answers that are held to a schema, a regex, a grammar or choices: what comes out fits, and nobody else notices."""

from __future__ import annotations

import ast
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

import octavo
from conftest import GREEDY, ORACLE, fingerprint, settled
from octavo import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Zürich", "東京"]},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
CLOSED = {"additionalProperties": False}
SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, Any] = {
    "nested": PERSON,
    "text": json.dumps(PERSON),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"const": "x"}, {"type": "null"}], "items": False, "minItems": 2},
    "enum": {"enum": ["a", 'b"\\\n', 3, None, True, ["x", {"y": 1}], "é🙂"]},
    "const": {"const": {"a": [1, "two"], "b": None}},
    "any of": {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 5}, {"type": "array", "maxItems": 0}, SHORT]},
    "one of, told apart": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": SHORT}, "required": ["k", "v"]} | CLOSED,
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]} | CLOSED,
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 99}]},
    "bounds": {"type": "integer", "exclusiveMinimum": -1000, "exclusiveMaximum": 1000},
    "multiples": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "fractions": {"type": "number", "minimum": -1.5, "maximum": 1.5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,3}$"},
    "email": {"type": "string", "format": "email", "maxLength": 40},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "a linked list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "other properties": {
        "type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "pattern properties": {
        "type": "object", "patternProperties": {"^n[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
    },
}  # fmt: skip
REGEXES = [
    r"[0-9]{3}-[a-z]{2,5}", r"(yes|no)(, (yes|no)){0,3}\.", r"[^\x00-\x1f]{1,8}", r"a*b?", r"[é🙂文]{2,4}/", r" x ",
]  # fmt: skip
ARITHMETIC = """
start: term (("+" | "-" | "*") term)*
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
GGUF = ["gguf/llama-q8_0.gguf", "gguf/qwen2-q5_1.gguf", "gguf/gemma3-q8_0.gguf"]
MODELS = [*GGUF, "tiny/llama-tied-rope3/f32", "tiny/gemma3/bf16"]
SEEDS = [(seed, temperature) for seed in range(4) for temperature in (0.0, 0.7, 1.5)]


@pytest.fixture(scope="module", params=MODELS)
def nonsense(request: pytest.FixtureRequest) -> Iterator[octavo.LLM]:
    """Random weights over tokenizers of every kind: a grammar is all that gives their answers a form."""
    with octavo.LLM(ORACLE / request.param, kv_cache_bytes="32MiB") as llm:
        yield llm


def params_of(seed: int, temperature: float, **constraint: Any) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=temperature, max_tokens=120, **constraint)


def check_json(text: str, schema: Any) -> None:
    schema = json.loads(schema) if isinstance(schema, str) else schema
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def test_json_fits_its_schema(nonsense: octavo.LLM) -> None:
    cases = [(schema, *how) for schema in SCHEMAS.values() for how in SEEDS]
    params = [params_of(seed, temperature, json_schema=schema) for schema, seed, temperature in cases]
    finished = set()
    for (schema, *how), result in zip(cases, nonsense.generate([[3, 1, 4]] * len(cases), params), strict=True):
        assert result.finish_reason in ("stop", "length"), (schema, how)
        if result.finish_reason == "stop":
            finished.add(json.dumps(schema))
            check_json(result.text, schema)
    # A random model may never close a bracket; most answers are short all the same.
    assert len(finished) >= len(SCHEMAS) - 3, "too few schemas were ever completed"


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_real_model_answers_in_json(llm: octavo.LLM, schema: Any) -> None:
    prompt = [{"role": "user", "content": f"Answer in JSON, as short as you can. The schema: {json.dumps(schema)}"}]
    params = [params_of(*how, json_schema=schema) for how in [(0, 0.0), (1, 1.0), (2, 1.0)]]
    for result in llm.generate([prompt] * len(params), params):
        if result.finish_reason == "stop":
            check_json(result.text, schema)
        else:
            assert result.finish_reason == "length"


@pytest.mark.parametrize("schema", [{}, True, "{}"], ids=str)
def test_any_json(tiny: octavo.LLM, schema: Any) -> None:
    results = tiny.generate([[1, 2]] * 20, [params_of(seed, 1.0, json_schema=schema) for seed in range(20)])
    finished = [result.text for result in results if result.finish_reason == "stop"]
    assert [json.loads(text) for text in finished]


@pytest.mark.parametrize("regex", REGEXES)
def test_regexes_match_the_whole(nonsense: octavo.LLM, regex: str) -> None:
    results = nonsense.generate([[5]] * len(SEEDS), [params_of(*how, regex=regex) for how in SEEDS])
    finished = [result.text for result in results if result.finish_reason == "stop"]
    assert finished or regex == "a*b?"
    assert all(re.fullmatch(regex, text) for text in finished), finished


def test_choices(nonsense: octavo.LLM) -> None:
    choices = ["yes", "yes, please", " no", "é🙂", '"quoted"\n', "</s>", "<|im_end|>"]
    results = nonsense.generate([[7]] * 40, [params_of(seed, 2.0, choice=choices) for seed in range(40)])
    assert {result.finish_reason for result in results} == {"stop"}
    assert {result.text for result in results} <= set(choices)
    assert len({result.text for result in results}) > 1


def test_grammars(nonsense: octavo.LLM) -> None:
    results = nonsense.generate([[9]] * len(SEEDS), [params_of(*how, grammar=ARITHMETIC) for how in SEEDS])
    finished = [result.text for result in results if result.finish_reason == "stop"]
    assert finished
    for text in finished:
        assert re.fullmatch(r"[0-9()+*-]+", text)
        ast.parse(text, mode="eval")


def test_neighbours_are_not_touched(llm: octavo.LLM) -> None:
    """The answer does not depend on the batch: neither a free one's nor one that is held to something."""
    prompts = ["Once upon a time", "The capital of France is", "One, two,"] * 2
    held: list[dict[str, Any]] = [{"json_schema": PERSON}, {"regex": r"[a-z ]{10,40}\."}, {"grammar": ARITHMETIC}]
    held += [{}, {}, {}]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30, logprobs=2, **each) for i, each in enumerate(held)]
    alone = [fingerprint(llm.generate(prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    assert [fingerprint(result) for result in llm.generate(prompts, params)] == alone


def test_preemption_and_chunks_change_nothing(tiny_path: str) -> None:
    params = [params_of(seed, 1.0, json_schema=PERSON, logprobs=1) for seed in range(12)]
    prompts = [list(range(1, 40 + seed)) for seed in range(12)]
    with octavo.LLM(tiny_path, kv_cache_bytes="16MiB") as roomy:
        wanted = [fingerprint(result) for result in roomy.generate(prompts, params)]
        block_bytes = roomy.facts.block_bytes
    with octavo.LLM(
        tiny_path, kv_cache_bytes=24 * block_bytes, max_model_len=256, max_num_batched_tokens=16, max_num_seqs=12
    ) as tight:
        assert [fingerprint(result) for result in tight.generate(prompts, params)] == wanted
        assert tight.stats().preemptions > 0


def test_choices_of_n_and_streams(tiny: octavo.LLM) -> None:
    params = params_of(5, 1.0, regex="[a-f]{4,20}", n=4)
    result = tiny.generate([2, 3], params)
    assert all(re.fullmatch("[a-f]{4,20}", choice.text) for choice in result.choices)
    assert len({choice.text for choice in result.choices}) > 1
    with tiny.stream([2, 3], params) as stream:
        texts = [""] * 4
        for chunk in stream:
            texts[chunk.index] += chunk.text
    assert texts == [choice.text for choice in result.choices]


def test_how_it_ends(tiny: octavo.LLM) -> None:
    def answer(**keywords: Any) -> tuple[str, str, object]:
        result = tiny.generate([1, 2], temperature=0.0, **{"max_tokens": 50, **keywords})
        return result.text, result.finish_reason, result.stop_reason

    # Nothing can follow: it ends, whatever else was asked.
    ids = list(range(500))
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"stop": ["never"]}, {"allowed_token_ids": ids}):
        assert answer(regex="abc", **more) == ("abc", "stop", None), more
    # Something can: ends are drawn like other tokens, or not.
    assert re.fullmatch("a+", answer(regex="a+", ignore_eos=True, max_tokens=20)[0])
    assert answer(regex="a+", ignore_eos=True)[1] == "length"
    assert answer(regex="a+", min_tokens=10)[0].startswith("aaaaaaaaaa")
    # Tokens that were given to end it are ends too: only where the grammar may end, though here nothing is likelier.
    bos = tiny.tokenize("").ids[0]
    assert answer(regex="aab?", stop_token_ids=[bos], logit_bias={bos: 1000.0}) == ("aa", "stop", bos)
    # Cut off: not complete.
    assert answer(json_schema=PERSON, max_tokens=2)[1] == "length"
    assert answer(regex="[ab]{30}c", stop=["a", "b"])[1] == "stop"
    # What nothing can satisfy is that request's error alone.
    with pytest.raises(octavo.OctavoError, match="the grammar"):
        tiny.generate([1], regex="abc", allowed_token_ids=[tiny.tokenize("z", add_special_tokens=False).ids[-1]])
    assert len(tiny.generate([1], GREEDY, max_tokens=3).token_ids) == 3


def test_logprobs_are_the_models_own(tiny: octavo.LLM) -> None:
    free = tiny.generate([1, 2], temperature=0.0, max_tokens=1, logprobs=5)
    held = tiny.generate([1, 2], temperature=0.0, max_tokens=1, logprobs=5, regex="zzz")
    assert free.logprobs is not None
    assert held.logprobs is not None
    assert free.logprobs[0].top == held.logprobs[0].top
    assert held.logprobs[0].logprob <= free.logprobs[0].logprob


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema.*strin"),
        ({"json_schema": "{nope"}, "json_schema.*not JSON"),
        ({"json_schema": 5}, "json_schema must be"),
        ({"json_schema": [1]}, "json_schema must be"),
        ({"json_schema": {"a": object()}}, "json_schema must be made of JSON"),
        ({"json_schema": {"const": float("nan")}}, "json_schema must be made of JSON"),
        ({"json_schema": False}, "json_schema.*false"),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "json_schema.*minimum"),
        ({"json_schema": {"type": "integer", "minimum": -(10**30), "maximum": 10**30}}, "minimum is .*2.53"),
        ({"json_schema": {"type": "object", "minProperties": 2}}, "json_schema: minProperties is 2.*name more of them"),
        ({"json_schema": {"$ref": "other.json"}}, "json_schema: .*another document"),
        ({"json_schema": {"type": "integer", "multipleOf": 4294967291}}, "json_schema.*overflow"),
        ({"json_schema": {"$ref": "#"}}, "json_schema.*fits"),
        ({"json_schema": {"type": "object", "propertyNames": {"maxLength": 3}}}, "json_schema.*propertyNames"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "json_schema.*missing"),
        ({"json_schema": {"type": "number", "oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "oneOf.*use `anyOf`"),
        ({"json_schema": {"enum": [f"value {i}" for i in range(100_000)]}}, "json_schema has .* bytes"),
        ({"regex": "("}, "regex.*unclosed"),
        ({"regex": "(?=a)b"}, "regex.*look-around"),
        ({"regex": ""}, "regex is an empty"),
        ({"regex": 5}, "regex must be"),
        ({"grammar": "start: x"}, "grammar.*unknown name"),
        ({"grammar": 'start: "a" <|im_end|>'}, "grammar: <.im_end.>: special tokens cannot be written in a grammar"),
        ({"grammar": "start: <[2]>"}, "grammar: <.2.>: special tokens cannot be written in a grammar"),
        ({"grammar": "  "}, "grammar is an empty"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, r"choice\[1\] is an empty"),
        ({"choice": "abc"}, "choice must be"),
        ({"choice": [1]}, r"choice\[0\] must be"),
        ({"regex": "a", "choice": ["a"]}, "at most one of .* not regex and choice"),
        ({"json_schema": {}, "grammar": 'start: "a"'}, "at most one of"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_named(tiny: octavo.LLM, constraint: dict[str, Any], message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(octavo.InvalidRequestError, match=re.compile(message, re.DOTALL)):
        tiny.generate([1], max_tokens=5, **constraint)
    assert time.monotonic() - begun < 3
    assert len(tiny.generate([1], GREEDY, max_tokens=1).token_ids) == 1


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a{1,5000}){1,5000}"},
        {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
        {"json_schema": {"type": "string", "pattern": "^(a{1,5000}){1,5000}$"}},
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"json_schema": {"allOf": [{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(5)]} for i in range(12)]}},
        {"grammar": "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(40)) + '\nr40: "a"\nstart: r0'},
    ],
    ids=str,
)
def test_hostile_grammars_hurt_nobody_else(tiny: octavo.LLM, constraint: dict[str, Any]) -> None:
    wanted = tiny.generate([4, 2], GREEDY, max_tokens=60).token_ids
    with tiny.stream([4, 2], GREEDY, max_tokens=60) as stream:
        begun = time.monotonic()
        with suppress(octavo.OctavoError):
            tiny.generate([1], GREEDY, max_tokens=40, **constraint)
        assert time.monotonic() - begun < 10
        for _ in stream:
            pass
    assert stream.result.token_ids == wanted
    settled(tiny)


def test_giving_up_midway(tiny: octavo.LLM) -> None:
    before = settled(tiny)
    reasons = set()
    for _ in range(10):
        with tiny.stream([1], regex="a{1000}", max_tokens=1000) as stream:
            next(iter(stream))
        reasons.add(stream.result.finish_reason)
    assert "cancelled" in reasons  # it may once be done before this thread goes on
    assert settled(tiny).blocks_owned == before.blocks_owned


def test_many_threads_many_grammars(tiny: octavo.LLM) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(8):
                regex = f"x{number % 4}[a-c]{{2}}{i}"
                assert re.fullmatch(regex, tiny.generate([number], regex=regex, max_tokens=20, seed=i).text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
