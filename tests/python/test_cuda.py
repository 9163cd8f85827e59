"""GPUs: as a user without one meets them (nothing is needed, and what is missing is said), and the CUDA backend behind
the public API, on the CPU."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from conftest import ORACLE, ROOT, fingerprint
from octavo import _octavo


def needed_libraries(path: Path) -> list[str]:
    """The shared libraries that an ELF file of 64 bits names in its dynamic section."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (first,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, first + i * size) for i in range(count)]
    (dynamic,) = [section for section in sections if section[1] == 6]
    offset, length, strings = dynamic[4], dynamic[5], sections[dynamic[6]][4]
    entries = [struct.unpack_from("<QQ", data, offset + i) for i in range(0, length, 16)]
    return [data[strings + at : data.index(b"\0", strings + at)].decode() for tag, at in entries if tag == 1]


def test_the_extension_needs_no_cuda_library() -> None:
    needed = needed_libraries(Path(_octavo.__file__))
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if any(word in name for word in ("cuda", "cudart", "cublas", "nvrtc"))]


def test_the_shim_is_in_builds_that_were_asked_for_it_alone(tiny_path: str) -> None:
    try:
        octavo.LLM(tiny_path, device="cuda-shim", kv_cache_bytes="1MiB", progress=False).close()
        has_shim = True
    except octavo.DeviceError:
        has_shim = False
    # The name of a kernel that only the shim has, and that symbols which are stripped do not take away.
    assert (b"check_divergent_barrier" in Path(_octavo.__file__).read_bytes()) == has_shim


def test_devices_say_what_runs_and_what_does_not() -> None:
    machine = _octavo.machine()
    cpu, *others = octavo.devices()
    assert (cpu.name, cpu.problem) == ("cpu", None)
    assert cpu.memory_bytes == machine.memory_bytes > 0
    assert others
    for device in others:
        assert device.name.startswith("cuda")
        assert (device.problem is None) == (machine.cuda_kernels and bool(machine.gpus))


def test_a_device_that_is_not_here_is_refused_with_the_reason(tiny_path: str) -> None:
    machine = _octavo.machine()
    if machine.cuda_kernels and machine.gpus:
        pytest.skip("there is a GPU here")
    with pytest.raises(octavo.DeviceError) as refused:
        octavo.LLM(tiny_path, device="cuda", progress=False)
    said = str(refused.value)
    assert "libcuda.so.1" in said or "nvcc" in said or "CUDA_ERROR" in said or "driver knows 0" in said
    with pytest.raises(octavo.DeviceError, match=r'"gpu".*"cuda"'):
        octavo.LLM(tiny_path, device="gpu")


# Nothing is rounded where all is f32.
EXACT = "tiny/qwen3/f32"
MODELS = ["gguf/llama-q8_0.gguf", "gguf/gemma3-q8_0.gguf", "gguf/qwen3moe-f16.gguf"]
COMMON = {"max_tokens": 12, "ignore_eos": True}
# All that is done to logits before a token is drawn.
EVERY_STEP = [
    octavo.SamplingParams(temperature=0.0, **COMMON),
    octavo.SamplingParams(temperature=1.0, top_k=20, seed=3, **COMMON),
    octavo.SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=4, logit_bias={7: 2.0}, **COMMON),
    octavo.SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3, **COMMON),
    octavo.SamplingParams(temperature=1.0, seed=5, allowed_token_ids=list(range(5, 60, 3)), **COMMON),
    octavo.SamplingParams(temperature=1.0, seed=6, choice=["yes", "no"]),
]
PROMPTS = [[5 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 40, 70))]


def opened(name: str, device: str, kv_cache_dtype: str = "auto") -> octavo.LLM:
    dtype = "f32" if name == EXACT else kv_cache_dtype
    limits = {"kv_cache_bytes": "2MiB", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return octavo.LLM(ORACLE / name, device=device, kv_cache_dtype=dtype, progress=False, **limits)


@pytest.fixture(scope="module")
def cuda_device() -> str:
    """A GPU where there is one, else the CPU with a GPU's kernels."""
    gpus = [device.name for device in octavo.devices()[1:] if device.problem is None]
    if gpus:
        return gpus[0]
    try:
        opened(MODELS[0], "cuda-shim").close()
    except octavo.DeviceError as error:
        if os.environ.get("OCTAVO_TEST_CUDA_SHIM"):
            raise
        pytest.skip(f"the CUDA backend behind the public API: {error}")
    return "cuda-shim"


def test_the_cuda_backend_says_what_the_reference_says(cuda_device: str) -> None:
    with opened(EXACT, cuda_device) as cuda, opened(EXACT, "reference") as reference:
        for params in EVERY_STEP:
            answers = ([result.token_ids for result in llm.generate(PROMPTS, params)] for llm in (cuda, reference))
            assert next(answers) == next(answers), params


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [*((name, "auto") for name in MODELS), (MODELS[0], "fp8_e4m3")])
def test_an_answer_of_the_cuda_backend_does_not_depend_on_its_neighbours(
    name: str, kv_cache_dtype: str, cuda_device: str
) -> None:
    drawn = octavo.SamplingParams(temperature=0.7, seed=1, logprobs=2, ignore_eos=True, max_tokens=8)
    greedy = octavo.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
    with opened(name, cuda_device, kv_cache_dtype) as llm:
        assert kv_cache_dtype in ("auto", llm.facts.memory.split("KV cache")[1].split(",")[0].split()[-1])
        for params in (drawn, greedy):
            together = llm.generate(PROMPTS, params)
            alone = [llm.generate(prompt, params) for prompt in PROMPTS]
            assert [fingerprint(result) for result in together] == [fingerprint(result) for result in alone]
        # What is said about a token does not change it.
        with_logprobs = llm.generate(PROMPTS, dataclasses.replace(greedy, logprobs=0))
        assert [result.token_ids for result in with_logprobs] == [result.token_ids for result in together]


def test_a_device_that_is_too_small_says_what_would_fit(tiny_path: str, cuda_device: str) -> None:
    if cuda_device != "cuda-shim":
        pytest.skip("only of the pretended device it is known how small it is")
    asked = {"max_num_batched_tokens": 1 << 15, "max_num_seqs": 1 << 12, "kv_cache_bytes": 1 << 30}
    with pytest.raises(octavo.OutOfMemoryError, match=r"kv_cache_bytes=[0-9]+ would fit$") as refused:
        octavo.LLM(tiny_path, device=cuda_device, progress=False, **asked)
    fits = int(str(refused.value).rpartition("kv_cache_bytes=")[2].split()[0])
    with pytest.raises(octavo.OutOfMemoryError):
        octavo.LLM(tiny_path, device=cuda_device, progress=False, **(asked | {"kv_cache_bytes": fits + 1}))
    with octavo.LLM(tiny_path, device=cuda_device, progress=False, **(asked | {"kv_cache_bytes": fits})) as llm:
        assert llm.generate([5, 6, 7], octavo.SamplingParams(max_tokens=2, ignore_eos=True)).token_ids


def test_the_bench_for_devices_runs(cuda_device: str) -> None:
    bench = [sys.executable, ROOT / "benches" / "device.py", "qwen3-8b", "--tiny", "--device", cuda_device]
    done = subprocess.run(bench, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ms a step") == 4


def test_the_script_for_devices_goes_on_and_says_what_it_left_out(tmp_path: Path, cuda_device: str) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "DEVICE": cuda_device}
    script = ["bash", ROOT / "benches" / "device.sh"]

    def run(*parts: str, limit: int = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*script, *parts], env=environment | {"LIMIT": str(limit)}, capture_output=True, text=True, check=False
        )

    assert "pack" in run("--help").stdout
    assert run("everything").returncode == 2
    if cuda_device != "cuda-shim":
        pytest.skip("tried in full where it takes no time")
    models = run("models")
    assert models.returncode == 0, models.stdout
    assert (tmp_path / "models.txt").read_text().count("ms a step") == 3 * 4
    # No time for anything: all of it is told.
    late = run("models", "peers", limit=4)
    assert late.returncode == 1
    assert late.stdout.count("LEFT OUT") == 6
