"""Progress of what takes long: a bar on a terminal, or a callable of the caller's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from octavo._errors import ModelLoadError
from octavo._sizes import format_bytes

#: Gets ``(stage, done, total)``.
Listener: TypeAlias = Callable[[str, int, int], object]
#: ``None``: a bar on a terminal. ``False``: nothing. Or a callable.
Progress: TypeAlias = "Literal[False] | Listener | None"

# What is over sooner needs no bar.
_PATIENCE_S = 1.0
_REDRAW_S = 0.1
_WIDTH = 28


def checked_progress(progress: Progress) -> Progress:
    """What a caller gave, or an error that says what there is."""
    if not (progress is None or progress is False or callable(progress)):
        raise ModelLoadError(f"progress must be None (a bar on a terminal), False or a callable, not {progress!r}")
    return progress


@contextmanager
def bar_on_terminal(stage: str, progress: Progress, *, unit: str) -> Iterator[Callable[..., None] | None]:
    """Yields what is to be called as ``report(done, total, note="")``; ``None`` when nobody looks."""
    if callable(progress):
        yield lambda done, total, _note="": _tell(progress, stage, done, total)
    elif progress is None and sys.stderr is not None and sys.stderr.isatty():
        bar = _Bar(stage, unit)
        try:
            yield bar
        finally:
            bar.clear()
    else:
        yield None


def _tell(listener: Listener, stage: str, done: int, total: int) -> None:
    listener(stage, done, total)


class _Bar:
    def __init__(self, stage: str, unit: str) -> None:
        self._stage, self._unit = stage, unit
        self._next_draw = time.monotonic() + _PATIENCE_S
        self._drawn = False

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now < self._next_draw:
            return
        self._next_draw = now + _REDRAW_S
        filled = _WIDTH * done // max(total, 1)
        if self._unit == "B":
            count = f"{format_bytes(done)} of {format_bytes(total)}"
        else:
            count = f"{done}/{total} {self._unit}"
        line = f"{self._stage} {'━' * filled}{'─' * (_WIDTH - filled)} {count}" + (f" · {note}" if note else "")
        self._write(f"\r\x1b[K{line}")
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        # A terminal that cannot show the bar must not stop the work.
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
