"""Plays a recording again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo import _models, _octavo
from octavo._errors import InvalidRequestError
from octavo._paths import checked_path

if TYPE_CHECKING:
    from octavo._octavo import Replay


def replay(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    schedule_only: bool = False,
    threads: int | None = None,
    check: bool = False,
) -> Replay:
    """Play a log of :meth:`octavo.LLM.record` again: the same scheduler gets the same requests at the same moments, and
    has to make the same steps; the model has to draw the same tokens.

    Args:
        path: The log.
        model: Where the model is; ``None``: where it was when the log was made. It has to be the same one.
        schedule_only: Take the log's own tokens; no model is loaded.
        threads: Worker threads; ``None``: as many as then. They change nothing but the time.
        check: Also prove the scheduler's invariants after every entry. Takes time in the number of blocks.

    Raises:
        InvalidRequestError: An argument is impossible, or a model or threads are given for the schedule alone.
        OctavoError: The file is no log, or is damaged (the message says at which byte); or the model is another one.
        ModelLoadError: The model cannot be loaded, or ``threads`` is impossible.
        OSError: The file cannot be read, or is no regular one; a :class:`FileNotFoundError` and so on, as ``open``
            raises.
    """
    path = checked_path("path", path)
    for name, value in (("model", model), ("threads", threads)):
        if schedule_only is True and value is not None:
            raise InvalidRequestError(f"schedule_only runs no model, so {name} has no part in it")
    where = None if model is None else _models.resolve(model)
    return _octavo.replay(path, model=where, schedule_only=schedule_only, threads=threads, check=check)
