"""octavo runs language models inside a Python process.

    import octavo

    llm = octavo.LLM("smollm2")
    print(llm.generate("Once upon a time", max_tokens=32).text)

A Rust engine owns the paged KV cache, the batch scheduler and the decode loop; this package is the thin way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo._devices import Device, devices
    from octavo._errors import (
        DeadlineExceededError,
        DeviceError,
        EngineClosedError,
        InvalidRequestError,
        ModelLoadError,
        OctavoError,
        OutOfMemoryError,
        QueueFullError,
    )
    from octavo._lint import PromptLint, lint_prompts
    from octavo._llm import LLM
    from octavo._models import resolve
    from octavo._octavo import (
        Anatomy,
        CacheExplanation,
        Choice,
        Chunk,
        Encoding,
        Event,
        Events,
        Recording,
        Replay,
        Result,
        SessionEvent,
        SessionReport,
        Stats,
        TokenLogprobs,
        Usage,
        __version__,
    )
    from octavo._params import SamplingParams
    from octavo._replay import replay
    from octavo._sampling import sample, sampling_probabilities
    from octavo._score import Score
    from octavo._session import Rent, Session
    from octavo._stream import AsyncStream, Stream
    from octavo._tokenizer import Tokenizer
    from octavo._verify import Difference, Verification

# Where each public name lives. A module is imported when its first name is asked for, so `import octavo` costs nothing.
_HOMES = {
    "_devices": ("Device", "devices"),
    "_errors": (
        "OctavoError",
        "ModelLoadError",
        "InvalidRequestError",
        "QueueFullError",
        "DeadlineExceededError",
        "OutOfMemoryError",
        "DeviceError",
        "EngineClosedError",
    ),
    "_llm": ("LLM",),
    "_models": ("resolve",),
    "_lint": ("PromptLint", "lint_prompts"),
    "_octavo": (
        "Anatomy",
        "CacheExplanation",
        "Choice",
        "Chunk",
        "Encoding",
        "Event",
        "Events",
        "Recording",
        "Replay",
        "Result",
        "SessionEvent",
        "SessionReport",
        "Stats",
        "TokenLogprobs",
        "Usage",
        "__version__",
    ),
    "_params": ("SamplingParams",),
    "_replay": ("replay",),
    "_sampling": ("sample", "sampling_probabilities"),
    "_score": ("Score",),
    "_session": ("Rent", "Session"),
    "_stream": ("AsyncStream", "Stream"),
    "_tokenizer": ("Tokenizer",),
    "_verify": ("Difference", "Verification"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Anatomy",
    "AsyncStream",
    "CacheExplanation",
    "Choice",
    "Chunk",
    "DeadlineExceededError",
    "Device",
    "DeviceError",
    "Difference",
    "Encoding",
    "EngineClosedError",
    "Event",
    "Events",
    "InvalidRequestError",
    "ModelLoadError",
    "OctavoError",
    "OutOfMemoryError",
    "PromptLint",
    "QueueFullError",
    "Recording",
    "Rent",
    "Replay",
    "Result",
    "SamplingParams",
    "Score",
    "Session",
    "SessionEvent",
    "SessionReport",
    "Stats",
    "Stream",
    "TokenLogprobs",
    "Tokenizer",
    "Usage",
    "Verification",
    "__version__",
    "devices",
    "lint_prompts",
    "replay",
    "resolve",
    "sample",
    "sampling_probabilities",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"octavo.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
