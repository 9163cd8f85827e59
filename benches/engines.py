"""octavo and its peers behind one small interface. A package is imported where its engine is made, nowhere else."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TokenIds = list[int]

#: Tokens of a step, for engines that want to be told.
STEP_TOKENS = 2048


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._begun

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


@dataclass(frozen=True)
class Setup:
    """What an engine is made from."""

    model: Path  # a GGUF file
    threads: int
    #: Writes token ids as the text that is tokenized to just them, for engines that take nothing else.
    spell: Callable[[TokenIds], str]


@dataclass(frozen=True)
class Work:
    """Prompts, when each arrives (in seconds), and how many tokens each is answered with."""

    prompts: list[TokenIds]
    starts: list[float]
    tokens: int
    variant: str  # one of the engine's


class Engine(ABC):
    """A loaded model that answers greedily, every prompt with as many tokens as it is told, whatever they are."""

    #: Its distribution on PyPI.
    package: str
    #: Ways to run it, when which is the best depends on model and work; all are tried.
    variants: tuple[str, ...] = ("",)

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Load the model."""

    @abstractmethod
    def serve(self, work: Work) -> list[list[float]]:
        """When each token of each answer came, in seconds since the call."""

    def facts(self) -> dict[str, float]:
        """Bytes that bound how fast it can be, from an engine that knows them."""
        return {}


class Octavo(Engine):
    """What comes at once is one list, or a stream each. A list's tokens have come when it is answered."""

    package = "octavo"
    variants = ("a list", "streams")
    kv_cache_dtype = "auto"

    def __init__(self, setup: Setup) -> None:
        import octavo

        how = {"kv_cache_dtype": self.kv_cache_dtype, "threads": setup.threads}
        self._llm = octavo.LLM(setup.model, progress=False, **how)
        self._greedy = octavo.SamplingParams(temperature=0.0, ignore_eos=True)

    def serve(self, work: Work) -> list[list[float]]:
        clock = Clock()
        if work.variant == "a list" and len(work.prompts) > 1 and not any(work.starts):
            self._llm.generate(work.prompts, self._greedy, max_tokens=work.tokens)
            return [[clock()] * work.tokens for _ in work.prompts]

        async def one(prompt: TokenIds, start: float) -> list[float]:
            await asyncio.sleep(max(0.0, start - clock()))
            times: list[float] = []
            async for chunk in self._llm.astream(prompt, self._greedy, max_tokens=work.tokens):
                times += [clock()] * len(chunk.token_ids)
            return times

        async def everybody() -> list[list[float]]:
            return await asyncio.gather(*map(one, work.prompts, work.starts))

        return asyncio.run(everybody())

    def facts(self) -> dict[str, float]:
        facts = self._llm.facts
        return {"weights_bytes": facts.weights_bytes, "token_bytes": facts.block_bytes / facts.block_size}


class OctavoInt8(Octavo):
    """With a cache of integers, which OpenVINO has if it is not told otherwise."""

    kv_cache_dtype = "int8"


class LlamaCpp(Engine):
    """Through its C interface: continuous batching as its server does it."""

    package = "llama-cpp-python"
    variants = ("flash attention", "plain attention")

    def __init__(self, setup: Setup) -> None:
        from llama_cpp import llama_cpp

        self._llama: Any = llama_cpp
        self._threads = setup.threads
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(setup.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"{setup.model}: llama.cpp does not load it")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def serve(self, work: Work) -> list[list[float]]:
        llama = self._llama
        context = self._context(len(work.prompts), max(map(len, work.prompts)) + work.tokens, work.variant)
        batch = llama.llama_batch_init(STEP_TOKENS, 0, 1)
        pending = [list(prompt) for prompt in work.prompts]
        positions = [0] * len(work.prompts)
        times: list[list[float]] = [[] for _ in work.prompts]
        clock = Clock()
        while any(len(answer) < work.tokens for answer in times):
            waiting = [sequence for sequence, answer in enumerate(times) if len(answer) < work.tokens]
            clock.wait_until(min(work.starts[sequence] for sequence in waiting))
            batch.n_tokens = 0
            drawn: list[tuple[int, int]] = []
            # Who decodes has one pending token and comes first.
            for sequence in sorted(waiting, key=lambda sequence: len(pending[sequence])):
                room = STEP_TOKENS - batch.n_tokens
                if work.starts[sequence] > clock() or not room:
                    continue
                part, pending[sequence] = pending[sequence][:room], pending[sequence][room:]
                self._add(batch, part, positions[sequence], sequence, draw=not pending[sequence])
                positions[sequence] += len(part)
                if not pending[sequence]:
                    drawn.append((sequence, batch.n_tokens - 1))
            if code := llama.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode: {code}")
            for sequence, row in drawn:
                pending[sequence] = [self._likeliest(context, row)]
                times[sequence].append(clock())
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return times

    def _context(self, sequences: int, length: int, variant: str) -> Any:
        llama = self._llama
        params = llama.llama_context_default_params()
        # A stream for each sequence, or it would look at the others' keys; their lengths are multiples of 256.
        params.kv_unified = False
        params.n_seq_max, params.n_ctx = sequences, sequences * -(-length // 256) * 256
        params.n_batch, params.n_ubatch = STEP_TOKENS, 512
        params.n_threads = params.n_threads_batch = self._threads
        flash = variant == "flash attention"
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return llama.llama_init_from_model(self._model, params)

    @staticmethod
    def _add(batch: Any, part: TokenIds, position: int, sequence: int, *, draw: bool) -> None:
        for row, token in enumerate(part, batch.n_tokens):
            batch.token[row], batch.pos[row] = token, position + row - batch.n_tokens
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = 0
        batch.n_tokens += len(part)
        batch.logits[batch.n_tokens - 1] = int(draw)

    def _likeliest(self, context: Any, row: int) -> int:
        import numpy

        logits = self._llama.llama_get_logits_ith(context, row)
        return int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())


class OpenVino(Engine):
    package = "openvino-genai"

    def __init__(self, setup: Setup) -> None:
        import openvino
        import openvino_genai

        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = STEP_TOKENS
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(setup.model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )
        self._requests = 0

    def serve(self, work: Work) -> list[list[float]]:
        import numpy

        config = self._genai.GenerationConfig(max_new_tokens=work.tokens, ignore_eos=True, do_sample=False)
        tensors = [self._openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in work.prompts]
        handles: dict[int, Any] = {}
        times: list[list[float]] = [[] for _ in work.prompts]
        clock = Clock()
        while len(handles) < len(work.prompts) or self._pipeline.has_non_finished_requests():
            if not self._pipeline.has_non_finished_requests():
                clock.wait_until(min(start for index, start in enumerate(work.starts) if index not in handles))
            for index, start in enumerate(work.starts):
                if index not in handles and start <= clock():
                    handles[index] = self._pipeline.add_request(self._requests, tensors[index], config)
                    self._requests += 1
            self._pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        times[index] += [clock()] * len(output.generated_ids)
        return times


class MistralRs(Engine):
    package = "mistralrs"

    def __init__(self, setup: Setup) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(setup.threads)
        import mistralrs

        self._mistralrs: Any = mistralrs
        self._spell = setup.spell
        which = mistralrs.Which.GGUF(quantized_model_id=str(setup.model.parent), quantized_filename=setup.model.name)
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
            # Only chats are streamed; this one is the prompt and nothing else.
            template.write("{{ messages[0]['content'] }}")
            template.flush()
            self._runner = mistralrs.Runner(which, max_seqs=64, prefix_cache_n=0, jinja_explicit=template.name)

    def serve(self, work: Work) -> list[list[float]]:
        texts = [self._spell(prompt) for prompt in work.prompts]
        times: list[list[float]] = [[] for _ in work.prompts]
        # A step with several prompts fails (0.9.5, GGUF, CPU): each waits until the one before has its first token.
        turn = threading.Lock()
        clock = Clock()

        def one(index: int) -> None:
            request = self._mistralrs.ChatCompletionRequest(
                messages=texts[index], model="", max_tokens=work.tokens, temperature=0.0, ignore_eos=True, stream=True
            )
            clock.wait_until(work.starts[index])
            with turn:
                chunks = iter(self._runner.send_chat_completion_request(request))
                chunk = next(chunks)
                times[index].append(clock())
            for chunk in chunks:  # noqa: B007
                times[index].append(clock())
            if chunk.usage and chunk.usage.prompt_tokens != len(work.prompts[index]):
                raise RuntimeError(f"a prompt of {len(work.prompts[index])} tokens became {chunk.usage.prompt_tokens}")

        with ThreadPoolExecutor(len(work.prompts)) as callers:
            list(callers.map(one, range(len(work.prompts))))
        return times


class Transformers(Engine):
    """On weights decoded to bfloat16, which float32 was slower than in everything. Requests that wait when a batch is
    done are the next batch."""

    package = "transformers"

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            setup.model.parent, gguf_file=setup.model.name, dtype=torch.bfloat16
        ).eval()
        self._model.generation_config.eos_token_id = None

    def serve(self, work: Work) -> list[list[float]]:
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Moments(BaseStreamer):  # type: ignore[misc]
            """It is handed the prompts first, then each step's tokens."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, _: Any) -> None:
                self.times.append(clock())

            def end(self) -> None:
                pass

        times: list[list[float]] = [[] for _ in work.prompts]
        clock = Clock()
        while waiting := [index for index, answer in enumerate(times) if not answer]:
            clock.wait_until(min(work.starts[index] for index in waiting))
            together = [index for index in waiting if work.starts[index] <= clock()]
            ids = torch.tensor([work.prompts[index] for index in together])
            moments = Moments()
            with torch.inference_mode():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=work.tokens,
                    pad_token_id=0,
                    streamer=moments,
                )
            for index in together:
                times[index] = moments.times[1:]
        return times


ENGINES: dict[str, type[Engine]] = {
    "octavo": Octavo,
    "octavo_int8": OctavoInt8,
    "llama_cpp": LlamaCpp,
    "openvino_genai": OpenVino,
    "mistralrs": MistralRs,
    "transformers": Transformers,
}
