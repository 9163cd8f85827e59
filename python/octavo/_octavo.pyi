"""The engine, written in Rust. `octavo` is the way in; what a user meets of this module is re-exported there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

from numpy import float64
from numpy.typing import NDArray
from typing_extensions import Self

from octavo._params import CallOptions, EngineConfig, SamplingParams

__version__: str

@final
class TokenLogprobs:
    """A token with its log-probability: the natural logarithm of the softmax of the raw logits, before any sampling
    step."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int:
        """How many tokens are likelier, plus 1."""
    @property
    def top(self) -> list[tuple[int, float]]:
        """The best tokens and their log-probabilities, best first; ties by the smaller id."""

@final
class Chunk:
    """The newest part of an answer. A reader that was slow gets several tokens in one."""

    @property
    def index(self) -> int:
        """Which of the ``n`` answers."""
    @property
    def text(self) -> str:
        """New text, always whole characters. May be empty: a token need not complete one."""
    @property
    def bytes(self) -> bytes:
        """The new text as UTF-8."""
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One per new token, when asked for."""
    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, with its last part."""

@final
class Preemption:
    """What it cost a request to lose its blocks."""

    @property
    def at_s(self) -> float:
        """When, in seconds since it arrived."""
    @property
    def lost_tokens(self) -> int:
        """Tokens whose keys and values were given up."""
    @property
    def recomputed_tokens(self) -> int:
        """Of these, those that were computed again; the others were still in the cache."""
    @property
    def lost_s(self) -> float:
        """Seconds until it had again what it had, or ended, or lost its blocks once more."""
    def to_dict(self) -> dict[str, object]: ...

@final
class Anatomy:
    """Where a request's time and memory went. The times are a partition of its life on one monotonic clock: exclusive,
    in whole nanoseconds, and their sum is the whole. ``print`` draws it."""

    @property
    def parts_ns(self) -> dict[str, int]:
        """Every part by name, in the order of the stages; the values sum to :attr:`total_ns`."""
    @property
    def total_ns(self) -> int: ...
    @property
    def total_s(self) -> float: ...
    @property
    def tokenize_s(self) -> float:
        """From the call to the queue: template, tokenizer, checks."""
    @property
    def queue_s(self) -> float:
        """Waiting for a sequence, for blocks, or for room in a step."""
    @property
    def prefill_s(self) -> float:
        """Until the first token."""
    @property
    def decode_s(self) -> float:
        """After the first token."""
    @property
    def stream_s(self) -> float:
        """From the last token until the reader had everything."""
    @property
    def ttft_s(self) -> float | None:
        """Time to first token: tokenize + queue + prefill."""
    @property
    def predicted_ttft_s(self) -> float:
        """What :attr:`ttft_s` was expected to be when the request was taken, from what there was to do and how fast the
        engine was lately. Requests that come later may come first: shorter ones, and those of users who were served
        less. Before its first step that is 1 ms for a token of a prompt, and 20 ms for a step."""
    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
    @property
    def inter_token_times(self) -> NDArray[float64]:
        """Seconds between one token and the next."""
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
    @property
    def computed_tokens(self) -> int:
        """Tokens that were run, those run again after a preemption included."""
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def chunks(self) -> int:
        """Steps that read a part of the prompt."""
    @property
    def steps(self) -> int: ...
    @property
    def preemptions(self) -> int:
        """How often its blocks were taken away."""
    @property
    def preempted(self) -> list[Preemption]:
        """What that cost, each time."""
    @property
    def neighbours(self) -> float:
        """Other sequences in its steps, on average."""
    @property
    def block_seconds(self) -> float:
        """The rent of the KV cache: blocks times how long they were held; a shared block is split among its holders."""
    @property
    def byte_seconds(self) -> float: ...
    @property
    def kept(self) -> str | None:
        """For a turn of a :class:`octavo.Session`: what became of what the turn before had left. ``resumed``: this one
        went on from it, and ``cached_tokens`` is how much it was; ``diverged``: it has other tokens, and only whole
        blocks were looked for; ``recomputed``: it has the same, and asked for ``prompt_logprobs``, which only computing
        all of them again tells; ``expired``, ``evicted``, ``over_limit``: it was given up before this turn came."""
    def to_dict(self) -> dict[str, object]: ...

@final
class Usage:
    """How many tokens a request took."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int:
        """Over all choices."""

@final
class Choice:
    """One of the ``n`` answers."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]:
        """Every token that was drawn, the one that ended it included."""
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def finish_reason(self) -> str:
        """``stop``, ``length``, ``cancelled``; in ``error.partial`` also ``deadline``, ``rejected``, ``error``."""
    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it; ``None`` for the model's own end."""
    @property
    def seed(self) -> int:
        """Of its coins, also when the request brought none: a request with this seed (and ``n=1``) gives it again."""
    @property
    def request_id(self) -> int:
        """Its name inside the engine, as in :class:`octavo.Event`."""
    @property
    def anatomy(self) -> Anatomy: ...

@final
class Result:
    """A finished request. ``text``, ``token_ids``, ``logprobs``, ``finish_reason``, ``stop_reason`` and ``anatomy`` are
    those of the first choice."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def anatomy(self) -> Anatomy: ...
    @property
    def choices(self) -> list[Choice]: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One per token of the prompt, when asked for; the first is ``None``."""
    @property
    def usage(self) -> Usage: ...

@final
class Encoding:
    """Token ids of a text."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def pieces(self) -> list[bytes]:
        """The bytes each token stands for."""
    @property
    def offsets(self) -> list[tuple[int, int]]:
        """For each token its bytes in the UTF-8 of the text, as ``(start, end)``; empty for tokens that were added. Of
        tokens that share a character each has its own bytes of it; where the tokenizer normalises the character to
        another one first, each has all of it."""
    @property
    def char_offsets(self) -> list[tuple[int, int]]:
        """For each token its characters: ``text[start:end]``. A character that several tokens share belongs to each."""
    def __len__(self) -> int: ...

@final
class Tokenizer:
    """The tokenizer of a model file or folder."""

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tokenizer: ...
    def tokenize(self, text: str, *, special: bool, add_special_tokens: bool) -> Encoding: ...
    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def detokenize_bytes(self, token_ids: list[int]) -> bytes: ...
    def __len__(self) -> int: ...

@final
class Facts:
    """What was fixed when the model was loaded."""

    @property
    def architecture(self) -> str: ...
    @property
    def device(self) -> str:
        """Device, instruction set, threads."""
    @property
    def vocab(self) -> int:
        """Logits per row."""
    @property
    def weights_bytes(self) -> int: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def memory(self) -> str:
        """How the memory was divided, as text."""
    @property
    def notices(self) -> list[str]:
        """What nobody asked for and everybody should know; :class:`octavo.LLM` warns of each."""

@final
class Stats:
    """Counts, now and since the model was loaded."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def blocks(self) -> int:
        """Blocks of the KV cache: ``blocks_free + blocks_remembered + blocks_owned``."""
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_remembered(self) -> int:
        """Blocks that nobody holds and whose contents a new prompt may still find."""
    @property
    def blocks_owned(self) -> int:
        """Blocks that running sequences and sessions hold."""
    @property
    def blocks_pinned(self) -> int:
        """Blocks that sessions hold between turns, at most half of all; one that several hold counts for each."""
    @property
    def sessions(self) -> int:
        """Sessions that are open."""
    @property
    def steps(self) -> int: ...
    @property
    def tokens_computed(self) -> int: ...
    @property
    def tokens_cached(self) -> int: ...
    @property
    def tokens_generated(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def steps_s(self) -> float:
        """Seconds that all steps took, from planning to the last token handed out."""
    @property
    def executor_s(self) -> float:
        """Of these, seconds in the executor: the model's operations, and drawing tokens."""

@final
class Chat:
    """Messages and what else goes into a chat template, as JSON texts; and what its clock shows, in seconds since 1970
    with the zone's offset added."""

    def __new__(
        cls,
        messages_json: str,
        wall_clock_s: int,
        *,
        tools_json: str | None = None,
        documents_json: str | None = None,
        variables_json: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        content_format: Literal["auto", "string", "openai"] | str = "auto",
    ) -> Chat: ...

@final
class Waker:
    """A pipe that an event loop watches. Any number of calls may share one."""

    def __new__(cls) -> Waker: ...
    def fileno(self) -> int: ...
    def clear(self) -> None:
        """To be called when it is readable, before looking into mailboxes: what arrives afterwards wakes again."""

@final
class Ticket:
    """A call in flight. Dropping it gives it up."""

    def next(self, patience_s: float | None = None) -> Chunk | None:
        """The next piece, waiting up to ``patience_s`` (``None``: for ever); ``None`` when there is none yet, or, when
        ``ended``, any more."""
    def wait(self, patience_s: float | None = None) -> bool:
        """Whether it has finished; waits for it."""
    def result(self) -> Result:
        """The outcome, once, after it has finished. Raises what the request failed with."""
    def scores(self) -> list[TokenLogprobs]: ...
    def logits(self) -> bytearray:
        """Like ``result``, for a call that wanted logits: float32, little-endian, rows of the vocabulary."""
    def cancel(self) -> None: ...
    @property
    def call(self) -> int:
        """The call that it is of: what other prompts of the same list go on with."""
    @property
    def ended(self) -> bool:
        """Whether everything has been read."""
    @property
    def expires_in_s(self) -> float | None:
        """Seconds until its deadline; ``None``: it has none."""
    @property
    def tokens(self) -> int:
        """How many have arrived, over all choices."""
    @property
    def prompt_token_ids(self) -> list[int]: ...

class Chunks:
    """The pieces of an answer, one after another. The class that extends it has a method ``_ended``, which is called
    after the last and raises what the call failed with."""

    def __new__(cls, ticket: Ticket) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Chunk: ...

@final
class SessionEvent:
    """Something that has happened to what a session keeps."""

    @property
    def at_s(self) -> float:
        """Seconds after the session was opened."""
    @property
    def kind(self) -> str:
        """``kept``: a turn ended; ``resumed``: the next one went on from what was kept; ``diverged``: it did not, for
        it has other tokens; ``recomputed``: it has the same, and asked for what only computing them tells
        (``prompt_logprobs``); ``expired``: ``ttl_s`` passed; ``evicted``: somebody needed the blocks; ``over_limit``:
        all sessions together held more than half of the cache, or this one alone; ``replaced``: by another turn;
        ``lost``: the turn failed; ``closed``."""
    @property
    def tokens(self) -> int:
        """How many tokens it kept; of ``diverged`` and ``recomputed`` how many of them the turn has too."""
    @property
    def blocks(self) -> int: ...

@final
class SessionReport:
    """A session as it stands."""

    @property
    def tokens_held(self) -> int: ...
    @property
    def blocks_held(self) -> int: ...
    @property
    def bytes_held(self) -> int:
        """Bytes of the KV cache that it holds now, while no turn runs."""
    @property
    def byte_seconds(self) -> float:
        """What it cost so far: bytes times how long it held them between turns; what several hold is split."""
    @property
    def expires_in_s(self) -> float | None:
        """Until what it holds is given up; ``None``: it holds nothing."""
    @property
    def events(self) -> list[SessionEvent]:
        """What has happened, oldest first; the latest 64."""
    @property
    def forgotten_events(self) -> int:
        """How many there were before these."""

@final
class SessionHandle:
    """A session of an engine. Dropping it closes it."""

    def report(self) -> SessionReport | None:
        """``None``: it is closed."""
    @property
    def id(self) -> int: ...
    @property
    def running(self) -> bool:
        """Whether a turn is."""
    def close(self) -> None: ...

@final
class CacheExplanation:
    """What a prompt would find in the cache, and why not more. ``print`` says it in a sentence."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """How many of them would be found. The last is always computed: its logits choose the next token."""
    @property
    def lost_tokens(self) -> int:
        """How many are to be computed, but for the last."""
    @property
    def lost_ms(self) -> float | None:
        """About how long that takes, from what prompts took lately; ``None``: none was read yet."""
    @property
    def reason(self) -> str:
        """``complete``: nothing is lost; ``differs``: what is cached goes on otherwise, see ``differs_at``;
        ``evicted``: it was there, see ``evicted_s_ago``; ``not_yet_filled``: a running request is computing it;
        ``shorter_than_block``: what is left, but for the last token, does not fill a block; ``never_seen``: nothing
        that is cached goes on like this; ``empty_namespace``: nothing is cached under this ``cache_salt``;
        ``disabled``: prefix caching is off."""
    @property
    def differs_at(self) -> int | None:
        """The first token that differs."""
    @property
    def prompt_text(self) -> str | None:
        """The prompt's text from the character on in which that token stands, as far as ``cached_text`` goes."""
    @property
    def cached_text(self) -> str | None:
        """What is cached instead, to the end of a block. A character that the block's end cuts off is left out of both;
        where nothing else differs both are bytes, written ``b"\\xf0\\x9f"``."""
    @property
    def evicted_s_ago(self) -> float | None: ...
    @property
    def block_size(self) -> int: ...

@final
class Engine:
    """A loaded model and the thread that runs it."""

    @staticmethod
    def load(
        path: str | os.PathLike[str], settings: EngineConfig, progress: Callable[[int, int], object] | None
    ) -> Engine: ...
    @property
    def facts(self) -> Facts: ...
    def submit(
        self,
        prompt: str | list[int] | Chat,
        params: SamplingParams,
        options: CallOptions,
        *,
        wanted: Literal["tokens", "last_logits", "all_logits", "scores"] | str = "tokens",
        score_from: int | None = None,
        every_token: bool = False,
        waker: Waker | None = None,
        session: SessionHandle | None = None,
        call: int | None = None,
        more: bool = False,
    ) -> Ticket:
        """``call``: the :attr:`Ticket.call` that it goes on with, as prompts of one list do. ``more``: another follows
        at once, for which an engine that has nothing to do waits."""
    def submit_again(self, result: Result, choice: int) -> Ticket:
        """Asks for one choice of a finished request again, with its seed and without sharing anything."""
    def made_otherwise(self, result: Result) -> list[tuple[str, str, str]]:
        """What a result was made with that this model has not: a name, how it was there, and how it is here."""
    def open_session(self, ttl_s: float, cache_salt: str) -> SessionHandle: ...
    def explain(
        self, prompt: str | list[int] | Chat, cache_salt: str, session: SessionHandle | None
    ) -> CacheExplanation: ...
    def token_ids(self, prompt: str | list[int] | Chat) -> list[int]: ...
    def tokenize(self, text: str, *, special: bool, add_special_tokens: bool) -> Encoding: ...
    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def render(self, chat: Chat) -> tuple[str, list[int]]: ...
    def stats(self) -> Stats: ...
    def record(self, path: str | os.PathLike[str]) -> Recording: ...
    def events(self, capacity: int) -> Events: ...
    def close(self) -> None: ...

@final
class Event:
    """Something that happened in an engine.

    ``type`` is ``queued``, ``admitted``, ``first_token``, ``preempted`` or ``finished`` of a request; ``session`` of
    what a session keeps; or ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared`` of the prefix cache, in the
    words of vLLM's KV events.
    """

    @property
    def type(self) -> str: ...
    @property
    def sequence_number(self) -> int:
        """Counts all events of the engine since somebody first read: what lies between two, this reader has lost."""
    @property
    def time_ns(self) -> int:
        """When, on the engine's clock (nanoseconds since it was loaded); to the edge of a step."""
    @property
    def request_id(self) -> int | None:
        """Whose, as in :attr:`Choice.request_id`."""
    def to_dict(self) -> dict[str, Any]:
        """``type`` and all that belongs to it: ``request_id``, ``user``, ``prompt_tokens``, ``cached_tokens``,
        ``computed_tokens``, ``completion_tokens``, ``finish_reason``; ``session_id``, and ``kind``, ``tokens``,
        ``blocks`` as in :class:`SessionEvent`; ``block_hashes`` (64 bits of a hash over all
        tokens up to the block's end and the ``cache_salt``), ``parent_block_hash``, ``token_ids``, ``block_size``,
        ``group_idx`` (of layers that see equally far back), ``medium``."""

@final
class Events:
    """A reader of an engine's events. Iterating waits for the next one, and ends when the engine or the reader is
    closed."""

    def __iter__(self) -> Events: ...
    def __next__(self) -> Event: ...
    def next(self, patience_s: float | None = None) -> Event | None:
        """The next event, waiting up to ``patience_s`` for it (``None`` or infinity: for ever); ``None``: there is
        none, yet or any more."""
    def take(self) -> list[Event]:
        """All that are there."""
    @property
    def dropped(self) -> int:
        """Events that were lost, the oldest first, because there were more than ``capacity`` unread ones."""
    def close(self) -> None:
        """Ends the telling; what is there can still be read."""
    def __enter__(self) -> Events: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Recording:
    """A recording under way, or ended. It goes on until :meth:`close`, the end of its ``with`` block, or of the
    engine, also when nobody holds it: :attr:`octavo.LLM.recording` is still there."""

    @property
    def path(self) -> Path: ...
    @property
    def entries(self) -> int:
        """Entries so far."""
    @property
    def lost(self) -> int:
        """Entries that the disk was too slow for: a replay ends where the first of them would be."""
    @property
    def ended(self) -> bool:
        """Whether it has ended, and all is in the file, or cannot be."""
    def close(self) -> None:
        """Ends it, and returns when all is in the file. Warns (:class:`UserWarning`) if entries were lost.

        Raises:
            OSError: The file could not be written.
        """
    def __enter__(self) -> Recording: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Replay:
    """What a replay has found. True if all that the log has came out again; ``print`` says so, or the first
    difference."""

    @property
    def model(self) -> Path:
        """Where the model was."""
    @property
    def recorded_on(self) -> str:
        """Device, instruction set, threads."""
    @property
    def replayed_on(self) -> str | None:
        """Likewise; ``None``: the log's own tokens were taken."""
    @property
    def requests(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def span_s(self) -> float:
        """From the log's first entry to its last."""
    @property
    def difference(self) -> str | None:
        """Step, request, what the log has and what was found."""
    @property
    def incomplete(self) -> str | None:
        """Why the log has no more than this, if it is not complete."""
    def __bool__(self) -> bool: ...

def replay(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None,
    schedule_only: bool,
    threads: int | None,
    check: bool,
) -> Replay: ...
def sampling_probabilities(
    logits: bytes, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
) -> bytearray:
    """float32 in, float32 out, little-endian."""

def sample(
    logits: bytes, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int], draws: int
) -> bytearray:
    """float32 in, uint32 out, little-endian."""

@final
class Inspection:
    """What is in a model file."""

    @property
    def architecture(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def experts(self) -> tuple[int, int] | None:
        """Experts of a sparse layer, and how many of them a token goes to."""
    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def tensor_types(self) -> list[tuple[str, int, int, str | None]]:
        """Type, number of tensors, bytes, and the type that they are run as; ``None``: they cannot be run."""
    @property
    def tokenizer(self) -> str: ...
    @property
    def pre_tokenizer(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...

def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Reads what is in a model file, without loading it."""

@final
class Machine:
    """What octavo found out about this machine."""

    @property
    def isa(self) -> str | None:
        """The instruction set that would be used; ``None``: see ``isa_error``."""

    @property
    def isa_error(self) -> str | None:
        """Why the one that was asked for cannot be used."""

    @property
    def isa_available(self) -> list[str]: ...
    @property
    def threads(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def free_memory_bytes(self) -> int:
        """What an engine would find free: what the system has available, within this process's limits."""

    @property
    def cuda_kernels(self) -> bool:
        """Whether this build has kernels for NVIDIA GPUs."""

    @property
    def gpus(self) -> list[tuple[str, tuple[int, int], int]]:
        """Name, compute capability and bytes of memory of every GPU that NVIDIA's driver knows."""

    @property
    def gpu_error(self) -> str | None:
        """Why there is no driver: what was looked for, and where."""

def machine() -> Machine:
    """What this machine offers, and what octavo would use of it."""
