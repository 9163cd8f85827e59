"""What the public API says, in the form that the oracle's ``check.py`` compares; and the oracle.

Expected values that public tools computed lie in ``../shared/oracle`` (or ``$OCTAVO_TEST_ORACLE``), with a ``check.py``
that compares. Where they do not, the project's own copies of what matters most (``tests/fixtures``) and the comparisons
below take their place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import octavo
from conftest import GREEDY, ROOT, assert_greedy, load_safetensors

SHARED = Path(os.environ.get("OCTAVO_TEST_ORACLE", ROOT.parent / "shared" / "oracle"))
FIXTURES = ROOT / "tests" / "fixtures"
IS_SHARED = (SHARED / "check.py").is_file()
USED = (
    f"expected values of {SHARED.name}, compared by its check.py" if IS_SHARED else "expected values of tests/fixtures"
)

Dump = dict[str, Any]


def folder(kind: str) -> Path:
    """Where the expected values of a kind (``tiny``, ``chat``, …) are."""
    if IS_SHARED:
        return SHARED / kind
    return FIXTURES / ("oracle" if kind in ("tiny", "gguf", "real") else "") / kind


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def check(what: str, fixture: Path, got: Dump, scratch: Path, *options: str) -> None:
    """Compares a dump with a fixture. Options as of ``check.py``."""
    if not IS_SHARED:
        _OWN[what](fixture, got, dict(zip(options[::2], options[1::2], strict=False)))
        return
    dump = scratch / "got.json"
    dump.write_text(json.dumps(got), encoding="utf-8")
    command = [sys.executable, str(SHARED / "check.py"), what, str(fixture), str(dump), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{USED}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
    assert not done.stdout.endswith("0 passed, 0 failed\n"), "nothing was compared"


# ---- tiny models -------------------------------------------------------------------------------------------------


def models() -> list[str]:
    """``gguf/NAME`` and ``tiny/NAME/DTYPE``, all there are."""
    files = [f"gguf/{path.stem}" for path in sorted(folder("gguf").glob("*.gguf"))]
    configs = sorted(folder("tiny").glob("*/*/config.json"))
    return files + [f"tiny/{path.parts[-3]}/{path.parts[-2]}" for path in configs]


class TinyModel:
    """A tiny model and what is expected of it."""

    def __init__(self, name: str) -> None:
        kind, self.name, *dtype = name.split("/")
        self.dtype = dtype[0] if dtype else "f32"
        self.fixture = folder(kind) / self.name if dtype else folder(kind) / f"{self.name}.json"
        self.path = self.fixture / self.dtype if dtype else self.fixture.with_suffix(".gguf")
        expected = read(self.fixture / "expected.json" if dtype else self.fixture)
        self.prompts: list[Any] = expected[self.dtype]["prompts"]
        # 8-bit activations are noise, whose largest value is a matter of luck: it may be this many times what the
        # oracle saw of llama.cpp on the same file. `None`: floats everywhere, held to the oracle's own tolerance.
        types = set(expected.get("tensor_types", ()))
        self.noise = (
            None if types <= {"F16", "F32"} else 1.5 * max(expected["llama_cpp"]["last_logits_max_abs"].values())
        )

    def loads(self) -> list[tuple[dict[str, Any], list[Any]]]:
        """Settings, and the prompts that hold for them. Factors of longrope are chosen by the longest context there may
        be, so short prompts need a short one."""
        config = read(self.path / "config.json") if self.path.is_dir() else {}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if "longrope" not in (rope.get("type"), rope.get("rope_type")):
            return [({}, self.prompts)]
        original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        short = [p for p in self.prompts if p["n"] + len(p["greedy"]["tokens"]) <= original]
        return [({"max_model_len": original}, short), ({}, [p for p in self.prompts if p not in short])]

    def dump(self, device: str) -> Dump:
        prompts: Dump = {}
        for settings, wanted in self.loads():
            with octavo.LLM(self.path, device=device, kv_cache_bytes="16MiB", **settings) as llm:
                prompts |= {prompt["id"]: self._dump_prompt(llm, prompt, device) for prompt in wanted}
        return {"prompts": prompts}

    def _dump_prompt(self, llm: octavo.LLM, prompt: Any, device: str) -> Dump:
        steps = len(prompt["greedy"]["tokens"])
        result = llm.generate(prompt["ids"], GREEDY, max_tokens=steps, logprobs=5, prompt_logprobs=0)
        dump: Dump = {"last_logits": llm.logits(prompt["ids"])[0].tolist(), "greedy": result.token_ids}
        if self.options(device) == ():
            dump["top5"] = [token.top for token in result.logprobs or ()]
        if "prompt_logprobs" in prompt:
            dump["prompt_logprobs"] = logprobs_of(result, prompt["ids"])
        return dump

    def options(self, device: str) -> tuple[str, ...]:
        """How exact the comparison is."""
        dtype = ("--dtype", self.dtype) if self.dtype != "f32" else ()
        if self.noise is None or device == "reference":
            return dtype
        return (*dtype, "--atol", str(self.noise), "--margin", "0.5")


def logprobs_of(result: octavo.Result, ids: list[int]) -> list[float]:
    """Of the prompt's tokens from the second on."""
    first, *rest = result.prompt_logprobs or [None]
    assert first is None
    assert [scored.token_id for scored in rest if scored] == ids[1:]
    return [scored.logprob for scored in rest if scored]


# ---- real models -------------------------------------------------------------------------------------------------


def model_file(bytes_: int) -> Path | None:
    """A real model's file, known by its size, in ``$OCTAVO_TEST_MODELS``."""
    where = os.environ.get("OCTAVO_TEST_MODELS")
    files = Path(where).glob("**/*.gguf") if where else ()
    return next((path for path in files if path.stat().st_size == bytes_), None)


def dump_real(llm: octavo.LLM, prompts: list[Any]) -> Dump:
    return {"prompts": {prompt["id"]: _dump_real_prompt(llm, prompt) for prompt in prompts}}


def _dump_real_prompt(llm: octavo.LLM, prompt: Any) -> Dump:
    ids, path = prompt["ids"], prompt["greedy"]["tokens"]
    encoding = llm.tokenize(prompt["text"], special=prompt["parse_special"], add_special_tokens=prompt["add_special"])
    result = llm.generate(ids, GREEDY, max_tokens=len(path), prompt_logprobs=0)
    forced = llm.generate(ids + path, GREEDY, max_tokens=1, prompt_logprobs=0)
    return {
        "ids": encoding.ids,
        "prompt_logprobs": logprobs_of(result, ids),
        "forced_logprobs": logprobs_of(forced, ids + path)[len(ids) - 1 :],
        "greedy": result.token_ids,
    }


# ---- text --------------------------------------------------------------------------------------------------------


def tokenizers() -> dict[str, Path | str | None]:
    """Fixtures by name, and where their tokenizer is: a file, a folder, a reference, or nowhere."""
    root = folder("tokenizer")
    found: dict[str, Path | str | None] = {
        f"tiny/{path.stem}": root / "tiny" / path.stem for path in _json(root / "tiny")
    }
    sizes = {read(path)["model"]: read(path)["bytes"] for path in _json(folder("real"))}
    for path in _json(root / "gguf"):
        file = read(path)["file"]
        vocabulary = root / "gguf" / "vocab" / file
        found[f"gguf/{path.stem}"] = vocabulary if vocabulary.exists() else model_file(sizes.get(file, -1))
    return found


def _json(where: Path) -> list[Path]:
    return sorted(where.glob("*.json"))


def dump_tokenizer(tokenizer: octavo.Tokenizer, expected: Any) -> Dump:
    of_folder = "folder" in expected

    def case(case: Any) -> Dump:
        text = case["text"]
        ids = tokenizer.tokenize(text, special=False, add_special_tokens=False).ids
        parsed = tokenizer.tokenize(text, add_special_tokens=False).ids
        full = tokenizer.tokenize(text).ids
        decoded = tokenizer.detokenize(case["ids_parsed" if of_folder else "ids"])
        return {"ids": ids, "ids_parsed": parsed, "ids_full": full, "decoded": decoded}

    def decode(ids: list[int]) -> str:
        return tokenizer.detokenize(ids) if of_folder else tokenizer.detokenize_bytes(ids).hex()

    cases = {str(each["i"]): case(each) for each in expected["cases"]}
    return {"cases": cases, "decode": [decode(each["ids"]) for each in expected["decode"]]}


def dump_chat(llm: octavo.LLM) -> Dump:
    """Every template with every conversation that there is for it; transformers' clock and its way with parts."""
    root = folder("chat")
    inputs = read(root / "inputs.json")
    micro = read(root / "micro.json")
    dump = {"micro": [_rendered(llm, inputs, {**micro, **case}, case["template"]) for case in micro["cases"]]}
    for path in _json(root / "expected"):
        expected = read(path)
        template = (root / expected["template"]).read_text(encoding="utf-8")
        dump[path.stem] = [_rendered(llm, inputs, {**expected, **case}, template) for case in expected["cases"]]
    return dump


def _rendered(llm: octavo.LLM, inputs: Any, case: Any, template: str) -> dict[str, str]:
    now = time.strptime(inputs["now"], "%Y-%m-%dT%H:%M:%S")
    clock = SimpleNamespace(localtime=lambda: now)
    tokens = {"bos_token": case["bos_token"], "eos_token": case["eos_token"]}
    try:
        with mock.patch("octavo._prompts.time", clock):
            text, _ = llm.render(
                inputs["conversations"][case["conversation"]],
                tools=inputs["tools"][case["tools"]] if case["tools"] else None,
                add_generation_prompt=case["add_generation_prompt"],
                chat_template=template,
                chat_template_kwargs={**tokens, **case.get("variables", {})},
            )
    except octavo.InvalidRequestError as error:
        return {"error": str(error)}
    return {"text": text}


# ---- the sampler -------------------------------------------------------------------------------------------------


def dump_sampler(draws: int, every: int) -> Dump:
    """Probabilities of every case; of one in ``every`` also counts of ``draws``."""
    cases = read(folder("sampler") / "sampler.json")["cases"]
    arrays = load_safetensors(folder("sampler") / "sampler.safetensors")
    dump: Dump = {}
    for n, case in enumerate(cases):
        bias = {int(token): value for token, value in case["params"].get("logit_bias", {}).items()}
        params = octavo.SamplingParams(**{**case["params"], "logit_bias": bias}, seed=n)
        history = {"prompt_token_ids": case["prompt_ids"], "output_token_ids": case["output_ids"]}
        logits = arrays[case["id"] + ".logits"]
        found = dump[case["id"]] = {"probs": octavo.sampling_probabilities(logits, params, **history).tolist()}
        if n % every == 0:
            drawn = octavo.sample(logits, params, draws=draws, **history)
            found["counts"] = np.bincount(drawn, minlength=len(logits)).tolist()
    return dump


# ---- comparisons where there is no check.py ----------------------------------------------------------------------


def _own_tiny(fixture: Path, got: Dump, options: dict[str, str]) -> None:
    expected = read(fixture / "expected.json" if fixture.is_dir() else fixture)
    arrays = load_safetensors((fixture if fixture.is_dir() else fixture.parent) / expected["arrays"])
    expected = expected[options.get("--dtype", "f32")]
    atol = max(float(options.get("--atol", 1e-4)), expected.get("suggested_atol", 0.0))
    margin = float(options.get("--margin", 1e-4))
    for prompt in expected["prompts"]:
        found = got["prompts"][prompt["id"]]
        assert np.abs(np.array(found["last_logits"]) - arrays[prompt["logits"]]).max() <= atol, prompt["id"]
        assert_greedy(found["greedy"], prompt["greedy"], margin)
        if "prompt_logprobs" in prompt:
            wanted = arrays[prompt["prompt_logprobs"]]
            assert np.abs(np.array(found["prompt_logprobs"]) - wanted).max() <= atol, prompt["id"]


def _own_real(fixture: Path, got: Dump, _: dict[str, str]) -> None:
    for prompt in read(fixture)["prompts"]:
        found = got["prompts"][prompt["id"]]
        assert found["ids"] == prompt["ids"]
        assert_greedy(found["greedy"], prompt["greedy"], margin=0.5)
        scored, wanted = np.array(found["prompt_logprobs"]), np.array(prompt["prompt_logprobs"])
        assert np.abs(scored - wanted).mean() <= 0.25
        assert abs(scored.mean() - wanted.mean()) <= 0.2
        reference = np.array([step[0][1] for step in prompt["greedy"]["top10"]])
        assert np.abs(np.array(found["forced_logprobs"]) - reference).mean() <= 0.25


def _own_tokenizer(fixture: Path, got: Dump, _: dict[str, str]) -> None:
    expected = read(fixture)
    for case in expected["cases"]:
        found = got["cases"][str(case["i"])]
        lead = case["ids_full"][: len(case["ids_full"]) - len(case["ids_parsed"])]
        for key, other in (("ids", "_plain"), ("ids_parsed", ""), ("ids_full", "")):
            disputed = case.get(f"original_definition_ids{other}")
            accepted = [case[key]] + ([] if disputed is None else [lead + disputed if key == "ids_full" else disputed])
            assert found[key] in accepted, (case["text"], key)
        assert found["decoded"] == case["decoded"]
    for found, case in zip(got["decode"], expected["decode"], strict=True):
        assert found == case.get("decoded", case.get("bytes_hex")), case["ids"]


def _own_chat(root: Path, got: Dump, _: dict[str, str]) -> None:
    for found, case in zip(got["micro"], read(root / "micro.json")["cases"], strict=True):
        if "expected" in case:
            assert found.get("text") == case["expected"], (case["id"], found)
        elif case["error_type"] == "raise_exception":
            assert case["error"] in found["error"]


def _own_sampler(fixture: Path, got: Dump, _: dict[str, str]) -> None:
    arrays = load_safetensors(fixture.with_suffix(".safetensors"))
    for case in read(fixture)["cases"]:
        found = np.array(got[case["id"]]["probs"])
        wanted = arrays[case["id"] + (".probs" if case["profiles"] == "any" else ".probs.vllm")]
        if case.get("ties"):
            found, wanted = np.sort(found), np.sort(wanted)
        assert np.abs(found - wanted).max() <= 1e-6, case
        assert ((found > 0) == (wanted > 0)).all(), case


_OWN: dict[str, Callable[[Path, Dump, dict[str, str]], None]] = {
    "tiny": _own_tiny,
    "real": _own_real,
    "tokenizer": _own_tokenizer,
    "chat": _own_chat,
    "sampler": _own_sampler,
}
