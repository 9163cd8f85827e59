"""What may be given as a prompt, and how each form reaches the engine."""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What goes into a chat template besides messages. The meaning of each is told at :meth:`octavo.LLM.render`."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    chat_template_content_format: str | None = None


_DEFAULTS = ChatOptions()


def chat_options(where: str, keywords: Mapping[str, Any]) -> ChatOptions:
    """The keywords of a function that takes these options and no others."""
    for name in keywords:
        if name not in ChatOptions.__slots__:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")
    return ChatOptions(**keywords)


def to_engine(prompt: Any, options: ChatOptions = _DEFAULTS) -> EnginePrompt:
    """One prompt in the form the engine takes. Token ids are checked there, by value."""
    if _is_messages(prompt):
        return to_chat(prompt, options)
    for name in ChatOptions.__slots__:
        value = getattr(options, name)
        if value is False if getattr(_DEFAULTS, name) is True else value:
            raise InvalidRequestError(f"{name} goes with messages: only a chat template can show it to the model")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidRequestError(f"the prompt is {type(prompt).__name__}; decode it to str first")
    if not _is_collection(prompt) or getattr(prompt, "ndim", 1) != 1:
        raise InvalidRequestError(f"the prompt is {_described(prompt)}; {_FORMS}")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not ids:
        raise InvalidRequestError(f"the prompt is empty; {_FORMS}")
    return ids


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def to_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> Chat:
    """A conversation in the form the engine takes."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"messages must be a list ([{{'role': …, 'content': …}}]), not {_described(messages)}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{i}] is {_described(message)}; a message is a mapping with a 'role' and usually a 'content'"
            )
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(getattr(options, name), bool):
            raise InvalidRequestError(f"{name} must be True or False, not {getattr(options, name)!r}")
    template, variables = options.chat_template, options.chat_template_kwargs
    if not isinstance(template, (str, type(None))):
        raise InvalidRequestError(f"chat_template must be the text of a template, not {_described(template)}")
    if not isinstance(variables, (Mapping, type(None))):
        raise InvalidRequestError(f"chat_template_kwargs must be a mapping, not {_described(variables)}")
    return Chat(
        _json_list("messages", [dict(message) for message in messages]),
        calendar.timegm(time.localtime()),
        tools_json=None if options.tools is None else _json_list("tools", _mappings("tools", options.tools)),
        documents_json=(
            None if options.documents is None else _json_list("documents", _mappings("documents", options.documents))
        ),
        variables_json=None if variables is None else _json("chat_template_kwargs", dict(variables)),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        chat_template=template,
        content_format=_content_format(options),
    )


def _content_format(options: ChatOptions) -> str:
    form = options.chat_template_content_format
    if form is None:
        return "auto" if options.chat_template is None else "openai"
    if form not in ("auto", "string", "openai"):
        raise InvalidRequestError(f"chat_template_content_format must be 'auto', 'string' or 'openai', not {form!r}")
    return form


def _mappings(name: str, values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequestError(f"{name} must be a list of mappings, not {_described(values)}")
    return [dict(value) for value in values]


def _json_list(name: str, values: list[dict[str, Any]]) -> str:
    return f"[{', '.join(_json(f'{name}[{i}]', value) for i, value in enumerate(values))}]"


def _json(name: str, value: dict[str, Any]) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate is no text
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} must be made of JSON values: {error}") from None
    return text


def _described(value: Any) -> str:
    """Kind of a value, never its contents: prompts do not belong in error messages."""
    shape = f" of shape {value.shape}" if getattr(value, "ndim", 1) != 1 else ""
    return "None" if value is None else f"a {type(value).__name__}{shape}"
