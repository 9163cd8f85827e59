"""What others make of the shapes of ``device.py`` on a GPU, in the same units.

    python benches/device_peers.py qwen3-0.6b|llama-3.1-8b|qwen3-8b [--device cuda] [--tiny]

transformers decodes from a static cache with a CUDA graph of its step, which is the most that it is good for; its
cache is left empty, since what is in it takes no time. FlashInfer's attention for decoding is timed on its own, over
paged keys and values as large as a layer's. What is not installed, or fails, is told, and the rest goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

from device import SHAPES, TINY, Shape, told, work

PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else SHAPES[arguments.shape]
    batches, contexts, steps = work(arguments.tiny)
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing or arguments.device != "cuda":
        print(f"left out: {' and '.join(missing) or 'CUDA'} not here")
        return
    import torch

    print(f"{arguments.shape} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = []

    def attempt(what: str, measure: Callable[[], str]) -> None:
        try:
            print(measure(), flush=True)
        except Exception as error:  # whatever it is, the next may do better
            failed.append(what)
            print(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        torch.cuda.empty_cache()

    model: list[Any] = []

    def load() -> str:
        import transformers

        model.append(transformers_model(shape))
        return f"transformers {transformers.__version__}"

    with torch.inference_mode():
        attempt("transformers", load)
        for context in contexts if model else ():
            for batch in batches:
                what = f"transformers batch {batch} context {context}"
                attempt(what, lambda b=batch, c=context: transformers_line(model[0], shape, b, c, steps))
        model.clear()
        if importlib.util.find_spec("flashinfer") is None:
            print("left out: flashinfer not here")
        else:
            for context in contexts:
                for batch in batches:
                    what = f"flashinfer batch {batch} context {context}"
                    attempt(what, lambda b=batch, c=context: flashinfer_line(shape, b, c))
    sys.exit(1 if failed else 0)


def transformers_model(shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in shape.config().items() if name not in ("architectures", "model_type")}
    config = AutoConfig.for_model(shape.family, **settings)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def transformers_line(model: Any, shape: Shape, batch: int, context: int, steps: int) -> str:
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_batch_size=batch, max_cache_len=context + steps)
    ids = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
    place = torch.tensor([context + steps // 2], device="cuda")

    def step() -> None:
        model(ids, past_key_values=cache, cache_position=place, position_ids=place[None].expand(batch, 1))

    seconds = seconds_of_graph(step)
    prefill = None
    if batch == 1:  # prompts of a batch follow one another: none of them needs the others
        del cache
        prompt = torch.zeros((1, context), dtype=torch.long, device="cuda")
        prefill = seconds_of(lambda: model(prompt, use_cache=False, logits_to_keep=1))
    return told(shape, batch, context, prefill, seconds, steps)


def flashinfer_line(shape: Shape, batch: int, context: int) -> str:
    import flashinfer
    import torch

    pages = batch * context // PAGE
    kv = torch.zeros((pages, 2, PAGE, shape.kv_heads, shape.head_dim), device="cuda", dtype=torch.bfloat16)
    queries = torch.zeros((batch, shape.heads, shape.head_dim), device="cuda", dtype=torch.bfloat16)
    room = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    attention = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD")
    first = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * (context // PAGE)
    order = torch.randperm(pages, device="cuda").to(torch.int32)
    last = torch.full((batch,), PAGE, device="cuda", dtype=torch.int32)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    attention.plan(first, order, last, *heads, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    seconds = seconds_of(lambda: attention.run(queries, kv))
    rate = kv.numel() * kv.element_size() / seconds / 1e9
    return f"flashinfer batch {batch:3} context {context:5}: {1e6 * seconds:8.1f} µs a layer, {rate:6.0f} GB/s"


def seconds_of_graph(step: Callable[[], object]) -> float:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds_of(graph.replay)


def seconds_of(run: Callable[[], object]) -> float:
    """Of one run: the least over a few, each of several in a row."""
    import torch

    def once(times: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / times

    times = max(1, min(50, int(0.1 / max(once(1), 1e-6))))
    return min(once(times) for _ in range(3))


if __name__ == "__main__":
    main()
