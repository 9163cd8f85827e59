"""Paths as callers give them."""

from __future__ import annotations

import os
from typing import Any

from octavo._errors import InvalidRequestError


def checked_path(name: str, path: Any) -> str:
    """A path that a file can have, or an error that says what is none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidRequestError(f"{name} must be a path, not a {type(path).__name__}")
    text = os.fsdecode(path)
    if why := impossible(text):
        raise InvalidRequestError(f"{name} must be a path, and {why}")
    return text


def impossible(path: str) -> str | None:
    """Why no file can be there, whatever there is."""
    if not path:
        return "this is an empty text"
    if "\0" in path:
        return f"{path!r} has a NUL in it"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return f"{path!r} is not valid Unicode"
    return None
