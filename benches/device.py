"""Prefill and decode of a model with random weights, in the shape of a real one, on a GPU.

    python benches/device.py qwen3-0.6b|llama-3.1-8b|qwen3-8b [--device cuda] [--tiny]

Weights are bf16, written to a folder that is removed. Decode is held against the bytes that a step must read: all
weights but the embedding, and the keys and values of every sequence. A batch that fails is told, and the others go on.
``--tiny`` is for tests: a small model, short runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import octavo

TOKENIZER = Path(__file__).parents[1] / "tests" / "fixtures" / "oracle" / "tiny" / "qwen3" / "f32"


@dataclass(frozen=True)
class Shape:
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    head_dim: int = 128

    def config(self) -> dict[str, object]:
        name = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[self.family]
        return {
            "architectures": [name],
            "model_type": self.family,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 16384,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            found |= {
                f"{layer}input_layernorm.weight": (hidden,),
                f"{layer}post_attention_layernorm.weight": (hidden,),
                f"{layer}self_attn.q_proj.weight": (query, hidden),
                f"{layer}self_attn.k_proj.weight": (kv, hidden),
                f"{layer}self_attn.v_proj.weight": (kv, hidden),
                f"{layer}self_attn.o_proj.weight": (hidden, query),
                f"{layer}mlp.gate_proj.weight": (self.intermediate, hidden),
                f"{layer}mlp.up_proj.weight": (self.intermediate, hidden),
                f"{layer}mlp.down_proj.weight": (hidden, self.intermediate),
            }
            if self.family == "qwen3":
                found[f"{layer}self_attn.q_norm.weight"] = (self.head_dim,)
                found[f"{layer}self_attn.k_norm.weight"] = (self.head_dim,)
        found["model.norm.weight"] = (hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, hidden)
        return found

    def read_bytes(self) -> int:
        """Of weights, in a step: an embedding that is no head is not read but for some rows."""
        names = self.tensors().items()
        return sum(2 * int(np.prod(shape)) for name, shape in names if self.tied or "embed_tokens" not in name)

    def token_bytes(self) -> int:
        """Keys and values of a position in two bytes."""
        return 4 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128256),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 151936),
}
TINY = Shape("qwen3", 2, 64, 96, 4, 2, 576, head_dim=32)


def work(tiny: bool) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Batches, contexts, and the tokens that are decoded."""
    return ((1, 2), (20, 40), 4) if tiny else ((1, 8, 64), (1024, 8192), 64)


def told(shape: Shape, batch: int, context: int, prefill: float | None, step: float | None, tokens: int) -> str:
    """A line about seconds of a whole prefill and of a step of decoding, whichever there is."""
    said = []
    if prefill is not None:
        rate, operations = batch * context / prefill, shape.read_bytes() * batch * context / prefill
        said.append(f"prefill {rate:9.0f} tok/s, {operations / 1e12:6.1f} Top/s in products")
    if step is not None:
        read = shape.read_bytes() + batch * (context + tokens / 2) * shape.token_bytes()
        rates = f"{batch / step:8.0f} tok/s, {1000 * step:7.3f} ms a step, {read / step / 1e9:6.0f} GB/s read"
        said.append(f"decode {rates}")
    return f"batch {batch:3} context {context:5}: {'; '.join(said)}"


def write(shape: Shape, folder: Path) -> None:
    """The model's files. A matrix is the same few million random numbers again and again: none of them is special."""
    generator = np.random.default_rng(1)
    some = generator.standard_normal(4 << 20, dtype=np.float32) * 0.02
    some_bytes = (some.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    ones = np.full(1 << 16, 0x3F80, np.uint16).tobytes()
    header, end = {}, 0
    tensors = shape.tensors()
    for name, dims in tensors.items():
        begin, end = end, end + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dims in tensors.values():
            source, left = (ones if len(dims) == 1 else some_bytes), 2 * int(np.prod(dims))
            while left > 0:
                left -= file.write(source[:left])
    (folder / "config.json").write_text(json.dumps(shape.config()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else SHAPES[arguments.shape]
    batches, contexts, steps = work(arguments.tiny)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="octavo-device-") as name:
        write(shape, Path(name))
        begun = time.perf_counter()
        options = {
            "device": arguments.device,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": 64 if arguments.tiny else 4096,
            "max_model_len": max(contexts) + 2 * steps,
        }
        with octavo.LLM(name, progress=False, **options) as llm:
            print(f"{arguments.shape} on {llm.facts.device}, loaded in {time.perf_counter() - begun:.1f} s")
            print(llm.facts.memory, flush=True)
            for context in contexts:
                for batch in batches:
                    try:
                        print(measure(llm, shape, batch, context, steps), flush=True)
                    except octavo.OctavoError as error:
                        failed += 1
                        print(f"batch {batch:3} context {context:5}: {error}", flush=True)
    sys.exit(1 if failed else 0)


def measure(llm: octavo.LLM, shape: Shape, batch: int, context: int, steps: int) -> str:
    draw = random.Random(batch * context)
    prompts = [[draw.randrange(5, 500) for _ in range(context)] for _ in range(batch)]

    def seconds(tokens: int) -> float:
        begun = time.perf_counter()
        llm.generate(prompts, octavo.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens))
        return time.perf_counter() - begun

    prefill = seconds(1)
    # From here on the prompts are in the cache.
    once = min(seconds(1) for _ in range(2))
    step = (min(seconds(1 + steps) for _ in range(2)) - once) / steps
    return told(shape, batch, context, prefill, step, steps)


if __name__ == "__main__":
    main()
