"""Messages, and what goes with them into a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import octavo
from conftest import GREEDY, ORACLE

USER = [{"role": "user", "content": "Hello"}]
# Shows everything that it is given.
SHOWS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% for t in tools or [] %}tool {{ t.name }}\n{% endfor %}"
    "{% for d in documents or [] %}doc {{ d.title }}\n{% endfor %}"
    "{% if mood is defined %}mood {{ mood }}\n{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def adds_bos() -> Iterator[octavo.LLM]:
    """A model whose tokenizer puts BOS before every text."""
    with octavo.LLM(ORACLE / "tiny" / "llama-tied-rope3" / "f32", kv_cache_bytes="8MiB") as llm:
        yield llm


def test_everything_reaches_the_template_on_every_way(tiny: octavo.LLM) -> None:
    options: dict[str, Any] = {
        "chat_template": SHOWS,
        "tools": [{"name": "clock"}],
        "documents": [{"title": "Tides"}],
        "chat_template_kwargs": {"mood": "calm", "bos_token": ""},
    }
    text, ids = tiny.render(USER, **options)
    assert text == "[user] Hello\ntool clock\ndoc Tides\nmood calm\n[assistant]"
    assert tiny.generate(USER, GREEDY, max_tokens=1, **options).prompt_token_ids == ids
    assert [r.prompt_token_ids for r in tiny.generate([USER, USER], GREEDY, max_tokens=1, **options)] == [ids, ids]
    with tiny.stream(USER, GREEDY, max_tokens=1, **options) as stream:
        assert "".join(chunk.text for chunk in stream) == stream.result.text
        assert stream.result.prompt_token_ids == ids


def test_the_last_message_can_stay_open(llm: octavo.LLM) -> None:
    begun = [*USER, {"role": "assistant", "content": "Once upon a"}]
    text, ids = llm.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon a")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.generate(begun, GREEDY, max_tokens=2, **options).prompt_token_ids == ids
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Once upon a"}]}]
    assert llm.render(parts, **options) == (text, ids)
    with pytest.raises(octavo.InvalidRequestError, match="cannot both be true"):
        llm.render(begun, continue_final_message=True)
    with pytest.raises(octavo.InvalidRequestError, match="last message with text"):
        llm.render([{"role": "assistant", "content": None}], chat_template="x", **options)


def test_contents_may_be_lists_of_parts(llm: octavo.LLM, tiny: octavo.LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}]
    assert llm.render(parts) == llm.render([{"role": "user", "content": "Hello\nthere"}])
    with pytest.raises(octavo.InvalidRequestError, match=r"messages\[0\].content\[0\] is of type `image_url`"):
        llm.generate([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    walks = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}"
    assert tiny.render(parts, chat_template=walks)[0] == "<Hello><there>"
    as_it_is = tiny.render(parts, chat_template="{{ messages[0].content }}")
    joined = tiny.render(parts, chat_template="{{ messages[0].content }}", chat_template_content_format="auto")
    assert joined[0] == "Hello\nthere"
    assert as_it_is[0].startswith("[{'type': 'text', 'text': 'Hello'}")


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_bos_stands_once(adds_bos: octavo.LLM, template: str) -> None:
    bos = adds_bos.tokenize("").ids[0]
    name = adds_bos.detokenize([bos])
    for prompt in (f"{name}Hello", "Hello", [{"role": "user", "content": "Hello"}]):
        options = {"chat_template": template} if isinstance(prompt, list) else {}
        ids = adds_bos.generate(prompt, GREEDY, max_tokens=1, **options).prompt_token_ids
        assert ids[0] == bos
        assert ids.count(bos) == 1, prompt
    # What a user writes is no BOS, even where one would stand.
    ids = adds_bos.render([{"role": "user", "content": f"{name}Hello"}], chat_template=template)[1]
    assert ids.count(bos) == 1


def test_special_tokens_are_the_programs_to_write(llm: octavo.LLM) -> None:
    (end,) = llm.tokenize("<|im_end|>").ids
    template = "{{ messages[0].content }}{{ messages[0].name }}{{ tools[0].name }}{{ documents[0].title }}{{ word }}"
    everywhere: dict[str, Any] = {"tools": [{"name": "<|im_end|>"}], "documents": [{"title": "<|im_end|>"}]}
    message = {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}], "name": "<|im_end|>"}
    for word, count in (("", 0), ("<|im_end|>", 1)):
        text, ids = llm.render(
            [message],
            chat_template=template,
            chat_template_kwargs={"word": word},
            chat_template_content_format="string",
            **everywhere,
        )
        assert text == "<|im_end|>" * (4 + count)
        assert ids.count(end) == count


def test_hostile_templates_end_in_that_calls_error(tiny: octavo.LLM) -> None:
    doubles = "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}{{ n.l }}"
    for template, says in [
        (doubles, "beyond its limits"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "beyond its limits"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('not you') }}", "refuses: not you"),
        ("{% if %}", "does not compile"),
    ]:
        begun = time.monotonic()
        with pytest.raises(octavo.InvalidRequestError, match=says):
            tiny.generate(USER, chat_template=template)
        assert time.monotonic() - begun < 3
    assert len(tiny.generate([1], GREEDY, max_tokens=1).token_ids) == 1


def test_wrong_kinds_are_named(tiny: octavo.LLM) -> None:
    for options, says in [
        ({"documents": "x"}, "documents must be a list of mappings"),
        ({"chat_template": 5}, "chat_template must be the text of a template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_kwargs": {"a": {1, 2}}}, "chat_template_kwargs must be made of JSON values"),
        ({"chat_template_content_format": "html"}, "'auto', 'string' or 'openai'"),
        ({"continue_final_message": "yes"}, "continue_final_message must be True or False"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be True or False"),
    ]:
        with pytest.raises(octavo.InvalidRequestError, match=says):
            tiny.render(USER, **{"chat_template": "x", **options})  # type: ignore[arg-type]
    for name, value in [("documents", [{"a": 1}]), ("chat_template", "x"), ("continue_final_message", True)]:
        with pytest.raises(octavo.InvalidRequestError, match=f"{name} goes with messages"):
            tiny.generate("text", **{name: value})
    with pytest.raises(octavo.InvalidRequestError, match="messages must be a list"):
        tiny.render("text", chat_template="x")  # type: ignore[arg-type]
