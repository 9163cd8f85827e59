"""What may be given as a prompt, and how each form reaches the engine."""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from octavo._errors import InvalidRequestError
from octavo._octavo import Chat


class IntArray(Protocol):
    """Any array of integers with a ``tolist``: numpy's, the standard library's."""

    def tolist(self) -> Any: ...


#: What ``for`` can walk over and gives token ids.
TokenIds: TypeAlias = "Sequence[int] | IntArray"
#: A conversation: each message has at least a ``role``.
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
#: Text, a conversation for the model's chat template, or token ids.
Prompt: TypeAlias = "str | Messages | TokenIds"

EnginePrompt: TypeAlias = "str | list[int] | Chat"

_FORMS = "a prompt is a str, a list of messages ({'role': …, 'content': …}), or token ids (a list or an integer array)"


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one prompt."""
    if not isinstance(prompt, (list, tuple)):
        # A two-dimensional array is a list of rows of token ids.
        return getattr(prompt, "ndim", 1) == 2
    return bool(prompt) and (isinstance(prompt[0], str) or _is_collection(prompt[0]))


def to_engine(prompt: Any, tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool) -> EnginePrompt:
    """One prompt in the form the engine takes. Token ids are checked there, by value."""
    if _is_messages(prompt):
        return _chat(prompt, tools, add_generation_prompt)
    if tools is not None and len(_mappings("tools", tools)):
        raise InvalidRequestError("tools go with messages: only a chat template can show them to the model")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidRequestError(f"the prompt is {type(prompt).__name__}; decode it to str first")
    if not _is_collection(prompt):
        raise InvalidRequestError(f"the prompt is {_described(prompt)}; {_FORMS}")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not isinstance(ids, list) or not ids:
        raise InvalidRequestError(f"the prompt is empty; {_FORMS}")
    return ids


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
) -> Chat:
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{i}] is {_described(message)}; a message is a mapping with a 'role' and usually a 'content'"
            )
    return Chat(
        _json("messages", [dict(message) for message in messages]),
        None if tools is None else _json("tools", _mappings("tools", tools)),
        add_generation_prompt,
        calendar.timegm(time.localtime()),
    )


def _mappings(name: str, values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequestError(f"{name} must be a list of mappings, not {_described(values)}")
    return [dict(value) for value in values]


def _json(name: str, values: list[dict[str, Any]]) -> str:
    parts = []
    for i, value in enumerate(values):
        try:
            part = json.dumps(value, ensure_ascii=False, allow_nan=False)
            part.encode()  # a lone surrogate is no text
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name}[{i}] must be made of JSON values: {error}") from None
        parts.append(part)
    return f"[{', '.join(parts)}]"


def _described(value: Any) -> str:
    """Kind of a value, never its contents: prompts do not belong in error messages."""
    return "None" if value is None else f"a {type(value).__name__}"
