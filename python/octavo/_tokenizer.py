"""Text and token ids, without a model's weights."""

from __future__ import annotations

import os
from typing import Any

from octavo import _models, _octavo
from octavo._errors import InvalidRequestError


class Tokenizer:
    """The tokenizer of a model. Its weights are not loaded, and a file or folder without any will do.

    Args:
        model: As for :class:`octavo.LLM`.

    Raises:
        ModelLoadError: The model cannot be found, or its tokenizer not be read.
    """

    def __init__(self, model: str | os.PathLike[str]) -> None:
        self._tokenizer = _octavo.Tokenizer.load(_models.resolve(model))

    def tokenize(self, text: str, *, special: bool = True, add_special_tokens: bool = True) -> _octavo.Encoding:
        """As :meth:`octavo.LLM.tokenize`."""
        return self._tokenizer.tokenize(
            checked_text(text), special=bool(special), add_special_tokens=bool(add_special_tokens)
        )

    def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """As :meth:`octavo.LLM.detokenize`."""
        return self._tokenizer.detokenize(checked_ids(token_ids), skip_special_tokens=bool(skip_special_tokens))

    def detokenize_bytes(self, token_ids: Any) -> bytes:
        """The bytes of token ids, special tokens included, be they UTF-8 or not."""
        return self._tokenizer.detokenize_bytes(checked_ids(token_ids))

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._tokenizer)


def checked_text(text: Any) -> str:
    """A text, or an error that says what is one."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"the text must be a str, not a {type(text).__name__}")
    return text


def checked_ids(token_ids: Any) -> list[int]:
    """A list of what may be token ids."""
    if isinstance(token_ids, (str, bytes, bytearray, memoryview)) or not hasattr(token_ids, "__iter__"):
        raise InvalidRequestError(f"token_ids must be a list or an array, not a {type(token_ids).__name__}")
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
