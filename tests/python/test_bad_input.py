"""Each mistake has its error, and the engine lives on."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import GREEDY, ORACLE


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ((), "empty"),
        (range(0), "empty"),
        (None, "None"),
        (5, "a int"),
        (b"bytes", "decode it to str"),
        ({"role": "user"}, "a dict"),
        ([1.5], r"prompt\[0\] must be a token id"),
        ([1, -1], r"prompt\[1\] must be a token id"),
        ([1, 2**40], r"prompt\[1\] must be a token id"),
        ([1, 10**6], r"prompt\[1\] is 1000000, the vocabulary has"),
        ([1, "two"], r"prompt\[1\] must be a token id"),
        ([1, True], r"prompt\[1\] must be a token id"),
        (np.array([True]), r"prompt\[0\] must be a token id"),
        (np.array(5), r"a ndarray of shape \(\)"),
        ("\ud800", "not valid Unicode"),
        ([{"content": "no role"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, "y"], r"messages\[1\]"),
        ([{"role": "user", "content": object()}], "JSON"),
        ([{"role": "user", "content": float("nan")}], "JSON"),
    ],
    ids=repr,
)
def test_impossible_prompts(llm: octavo.LLM, prompt: Any, says: str) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=says or None):
        llm.generate(prompt, max_tokens=1)
    assert len(llm.generate([1], GREEDY, max_tokens=1).token_ids) == 1


def test_an_empty_text(llm: octavo.LLM) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=r"empty|no tokens|at least one"):
        llm.generate("", max_tokens=1)


def test_prompts_longer_than_the_model_or_the_cache(tiny_path: str, tiny: octavo.LLM) -> None:
    with pytest.raises(octavo.InvalidRequestError, match=str(tiny.facts.max_model_len)):
        tiny.generate([1] * (tiny.facts.max_model_len + 1), max_tokens=1)
    with octavo.LLM(tiny_path, kv_cache_bytes=4 * tiny.facts.block_bytes, max_model_len=64) as small:
        assert small.facts.blocks == 4
        with pytest.raises(octavo.InvalidRequestError, match="64"):
            small.generate([1] * 65, max_tokens=1)
        result = small.generate([1] * 60, GREEDY, max_tokens=100)
        assert (result.finish_reason, len(result.prompt_token_ids) + len(result.token_ids)) == ("length", 64)


def test_tools_need_messages(tiny: octavo.LLM) -> None:
    with pytest.raises(octavo.InvalidRequestError, match="tools goes with messages"):
        tiny.generate([1], tools=[{"type": "function"}])


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"block_size": 7}, octavo.ModelLoadError),
        ({"block_size": -16}, octavo.ModelLoadError),
        ({"max_num_seqs": 0}, octavo.ModelLoadError),
        ({"max_num_seqs": "many"}, octavo.ModelLoadError),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, octavo.ModelLoadError),
        ({"max_model_len": 10**9}, octavo.ModelLoadError),
        ({"threads": 0}, octavo.ModelLoadError),
        ({"threads": -1}, octavo.ModelLoadError),
        ({"kv_cache_bytes": "much"}, octavo.ModelLoadError),
        ({"kv_cache_bytes": 0}, octavo.ModelLoadError),
        ({"kv_cache_dtype": "fp4"}, octavo.ModelLoadError),
        ({"kv_cache_dtype": "fp8_e4m3"}, octavo.ModelLoadError),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, octavo.ModelLoadError),
        ({"dtype": "f64"}, octavo.ModelLoadError),
        ({"seed": -1}, octavo.ModelLoadError),
        ({"kv_cache_bytes": 10}, octavo.OctavoError),
        ({"kv_cache_bytes": "100TB"}, octavo.OutOfMemoryError),
        ({"device": "cuda"}, octavo.DeviceError),
    ],
    ids=str,
)
def test_impossible_settings(tiny_path: str, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        octavo.LLM(tiny_path, **settings)
    assert next(iter(settings)) in str(caught.value)


# ---- files -------------------------------------------------------------------------------------------------------


def test_truncated_gguf(tiny_path: str, tmp_path: Path) -> None:
    whole = Path(tiny_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, 24, 25, 100, 1000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(octavo.ModelLoadError, match=r"cut\.gguf"):
            octavo.LLM(cut, kv_cache_bytes="4MiB")


def test_corrupt_gguf(tiny_path: str, tmp_path: Path) -> None:
    """Whatever byte of the header is wrong: it loads, or it is refused. It never crashes and never hangs."""
    whole = bytearray(Path(tiny_path).read_bytes())
    rng = random.Random(11)
    path = tmp_path / "corrupt.gguf"
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            broken[rng.randrange(min(len(whole), 6000))] = rng.randrange(256)
        path.write_bytes(broken)
        with suppress(octavo.OctavoError):
            octavo.LLM(path, kv_cache_bytes="4MiB", max_model_len=64).close()


def test_counts_beyond_the_file(tiny_path: str, tmp_path: Path) -> None:
    whole = bytearray(Path(tiny_path).read_bytes())
    path = tmp_path / "huge.gguf"
    for offset in (8, 16):  # numbers of tensors and of metadata entries
        for count in (2**63, 2**32, 10**6):
            broken = bytearray(whole)
            broken[offset : offset + 8] = struct.pack("<Q", count)
            path.write_bytes(broken)
            with pytest.raises(octavo.ModelLoadError, match=r"huge\.gguf"):
                octavo.LLM(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ORACLE / "tiny" / "llama-tied-rope3" / "f32", tmp_path / "model"))


def test_a_folder_without_a_part(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        moved = folder / name
        kept = moved.read_bytes()
        moved.unlink()
        with pytest.raises(octavo.ModelLoadError, match="tokenizer" if name == "tokenizer.json" else r"config|tensors"):
            octavo.LLM(folder)
        moved.write_bytes(kept)
    octavo.LLM(folder, kv_cache_bytes="4MiB").close()


def test_truncated_and_corrupt_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [0, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(octavo.ModelLoadError, match=r"model\.safetensors"):
            octavo.LLM(folder)
    path.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    with pytest.raises(octavo.ModelLoadError, match=r"model\.safetensors"):
        octavo.LLM(folder)


def test_unknown_architectures_are_named(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    with pytest.raises(octavo.ModelLoadError, match=r"(?i)mamba.*supported.*llama"):
        octavo.LLM(folder)
    path.write_text("{")
    with pytest.raises(octavo.ModelLoadError, match=r"config\.json"):
        octavo.LLM(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_none(folder: Path, file: str) -> None:
    path = folder / file
    config = json.loads(path.read_text())
    for junk in ("</s>", -1, 1.5, 10**6, [2, "x"], {"id": 2}, True):
        path.write_text(json.dumps({**config, "eos_token_id": junk}))
        with pytest.raises(octavo.ModelLoadError, match=f"{file}.*eos_token_id"):
            octavo.LLM(folder)
    for fine in (2, [2, 3], None):
        path.write_text(json.dumps({**config, "eos_token_id": fine}))
        octavo.LLM(folder, kv_cache_bytes="4MiB").close()


def test_a_template_that_raises(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for template, says in [
        ("{{ raise_exception('only cats may speak') }}", "only cats may speak"),
        ("{% for i in range(100000000) %}x{% endfor %}", ""),
        ("{{ messages.nothing.at.all }}", ""),
    ]:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path.write_text(json.dumps({**config, "chat_template": template}))
        with octavo.LLM(folder, kv_cache_bytes="4MiB") as llm:
            with pytest.raises(octavo.InvalidRequestError, match=says or None):
                llm.generate([{"role": "user", "content": "miau"}])
            assert len(llm.generate([1], GREEDY, max_tokens=1).token_ids) == 1


def test_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("not a model")
    for path in (tmp_path / "note.txt", tmp_path, tmp_path / "nothing", Path("/dev/null")):
        with pytest.raises(octavo.ModelLoadError, match=path.name):
            octavo.LLM(path)


@pytest.mark.parametrize(
    ("parameter", "value", "wanted"),
    [
        ("top_k", 2**62, r"a whole number from 0 to 2\*\*32 - 1"),
        ("max_tokens", -1, r"a whole number from 1 to 2\*\*64 - 1"),
        ("max_tokens", 10**30, r"a whole number from 1 to 2\*\*64 - 1"),
        ("max_tokens", 0, "at least 1"),
        ("n", -1, "a whole number from 1"),
        ("n", 0, "from 1 to max_num_seqs"),
        ("logprobs", -1, "a whole number from 0 to 64, or None"),
        ("logprobs", 65, "at most 64"),
        ("temperature", 10**400, "a number from 0 to 100"),
        ("top_p", "x", "a number above 0, and at most 1"),
        ("deadline_s", float("inf"), "a finite number of seconds from 0 up, or None"),
        ("deadline_s", float("nan"), "a finite number of seconds from 0 up, or None"),
        ("deadline_s", -1, "a finite number of seconds from 0 up, or None"),
        ("deadline_s", 10**400, "a finite number of seconds from 0 up, or None"),
        ("cache_salt", "\ud800", "a str that is valid Unicode"),
        ("user", "\ud800", "a str that is valid Unicode"),
        # Python counts with True and False; whoever gives one for a number means something else.
        *[(name, True, "a whole number") for name in ("max_tokens", "n", "seed", "priority", "logprobs", "top_k")],
        ("temperature", False, "a number from 0 to 100"),
        ("deadline_s", True, "a finite number of seconds"),
        ("stop", b"bytes", "a str or a sequence of str"),
        ("stop", {"a": 1}, "a str or a sequence of str"),
        (r"stop\[1\]", ["a", b"b"], "a str that is valid Unicode"),
        (r"choice\[0\]", [1], "a str that is valid Unicode"),
        ("choice", "text", "a sequence of str"),
        ("stop_token_ids", b"12", "a sequence of token ids"),
        (r"stop_token_ids\[1\]", [1, True], "a token id"),
        (r"bad_words\[0\]", [b"ab"], "a sequence of token ids"),
        ("a key of logit_bias", {"1": 1.0}, "a token id"),
        (r"logit_bias\[1\]", {1: "x"}, "a number"),
    ],
)
def test_what_is_wanted_is_told(tiny: octavo.LLM, parameter: str, value: Any, wanted: str) -> None:
    name = re.sub(r"^a key of |\\\[.*", "", parameter)
    with pytest.raises(octavo.InvalidRequestError, match=f"^{parameter} (must|may) be {wanted}") as caught:
        tiny.generate([1], **{name: value})
    assert len(str(caught.value)) < 250


def test_a_deadline_that_nobody_sees(tiny: octavo.LLM) -> None:
    assert len(tiny.generate([1], GREEDY, max_tokens=2, deadline_s=1e300).token_ids) == 2


def test_what_a_stranger_tries(tiny: octavo.LLM) -> None:
    """Wrong kinds of arguments: the documented error, with the argument's name."""
    user = {"role": "user", "content": "hi"}
    for call, says in [
        (lambda: tiny.generate("a", []), "params is an empty list"),
        (lambda: tiny.generate([user], tools=np.array([1, 2])), "tools must be a list of mappings"),
        (lambda: tiny.render([user], tools=["x"]), "tools must be a list of mappings"),
        (lambda: tiny.generate("a", bad_words=np.array(1)), "bad_words must be a list"),
        (lambda: tiny.generate([user, {"role": "user", "content": "\ud800"}]), r"messages\[1\]"),
        (lambda: tiny.tokenize(None), "text must be a str"),  # type: ignore[arg-type]
        (lambda: tiny.detokenize("12"), "token_ids must be a list"),
        (lambda: tiny.generate("x" * 50_000_000), "bytes, more than max_model_len"),
    ]:
        with pytest.raises(octavo.InvalidRequestError, match=says):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        tiny.generate("a", nope=1)
    with pytest.raises(octavo.ModelLoadError, match="kv_cache_bytes"):
        octavo.LLM("x.gguf", kv_cache_bytes="9" * 400)
    assert len(tiny.generate([1], GREEDY, max_tokens=1).token_ids) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_a_callers_own_code_raises_comes_through(tiny: octavo.LLM, error: type[BaseException]) -> None:
    class Ids:
        def __iter__(self) -> Any:
            yield 1
            raise error

    class Number:
        def __index__(self) -> int:
            raise error

    for parameter in ({"stop_token_ids": Ids()}, {"max_tokens": Number()}, {"allowed_token_ids": [1, Number()]}):
        with pytest.raises(error):
            tiny.generate([1], **parameter)


def test_mappings_and_numbers_of_other_libraries(tiny: octavo.LLM) -> None:
    wanted = tiny.generate([1], GREEDY, max_tokens=4, logit_bias={7: 100.0}, seed=3).token_ids
    assert wanted == [7] * 4
    bias = MappingProxyType({np.int64(7): np.float32(100)})
    assert tiny.generate(np.array([1]), GREEDY, max_tokens=np.int32(4), logit_bias=bias).token_ids == wanted


def test_strangers_second_try(tiny: octavo.LLM, tiny_path: str) -> None:
    user = {"role": "user", "content": "hi"}
    params = octavo.SamplingParams(max_tokens=1)
    for call, says in [
        (lambda: tiny.generate([1], [params, params]), "params is a list of 2, and the prompt is one"),
        (lambda: tiny.stream([1], [params]), "params is a list of 1, and the prompt is one"),
        (lambda: tiny.render([user], chat_template="\ud800"), "chat_template is not valid Unicode"),
        (lambda: tiny.render([user], chat_template_content_format=5), "chat_template_content_format must be"),
        (lambda: tiny.generate("x", add_generation_prompt=False), "add_generation_prompt goes with messages"),
        (lambda: tiny.detokenize([10**6]), r"token_ids\[0\] is 1000000, the vocabulary has"),
        (lambda: tiny.detokenize(bytearray(b"a")), "token_ids must be a list"),
        (lambda: tiny.logits([1], ["last"]), "positions must be 'last' or 'all'"),
        (lambda: tiny.session(ttl_s=True), "ttl_s must be"),
        (lambda: tiny.events(True), "capacity must be"),
        (lambda: octavo.sample("x"), "logits must be one row of numbers"),
        (lambda: octavo.sample([0.0, 1e39]), "logit of token 1 is inf"),
        (lambda: octavo.sample([0.0], prompt_token_ids=[0.5]), r"prompt_token_ids\[0\] must be a token id"),
        (lambda: octavo.sample([0.0], output_token_ids="0"), "token_ids must be a list"),
        (lambda: octavo.sample([0.0], draws=2**40), "draws must be a whole number from 0 to 16777216"),
        (lambda: octavo.replay("x", schedule_only=1), "schedule_only must be True or False"),
        (lambda: octavo.replay("x", schedule_only=True, model="y"), "model has no part in it"),
    ]:
        with pytest.raises(octavo.InvalidRequestError, match=says):
            call()
    for setting in ({"progress": True}, {"threads": True}, {"kv_cache_bytes": 1e9}):
        with pytest.raises(octavo.ModelLoadError, match=f"{next(iter(setting))} must be"):
            octavo.LLM(tiny_path, **setting)
    assert list(octavo.sample([0.0, 9.0], octavo.SamplingParams(temperature=0, json_schema={}), draws=2)) == [1, 1]
