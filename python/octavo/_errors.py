"""Everything octavo raises on purpose. Each message says what was wanted, what was found and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo._octavo import Result


class OctavoError(Exception):
    """The root of octavo's errors."""

    #: What a request that failed had produced until then; ``None`` when it never ran.
    partial: Result | None = None


class ModelLoadError(OctavoError):
    """A model could not be found, downloaded, read or set up."""


class InvalidRequestError(OctavoError, ValueError):
    """A prompt or a parameter is impossible. Nothing was computed."""


class QueueFullError(OctavoError):
    """As many requests are running and waiting as may; try again later."""

    #: Seconds after which there will mostly be room: always a number above 0. Places that become free by then are kept
    #: for users who were refused and hold less than their share. Callers who share a name are told the same place.
    retry_after: float


class DeadlineExceededError(OctavoError, TimeoutError):
    """``deadline_s`` passed before the answer was complete: ``partial`` holds what there was, and the message says how
    far it got. Or the request was refused at once, as requests that come first take longer: then nothing ran."""

    #: Seconds until what comes first is expected to leave enough time, when the request was refused; else ``None``.
    retry_after: float | None = None


class OutOfMemoryError(OctavoError, MemoryError):
    """The machine has no room; the message names the setting that would fit."""


class DeviceError(OctavoError):
    """The device is missing, or it failed; requests that ran on it then get this."""


class EngineClosedError(OctavoError):
    """The engine was closed, died of the reason given, or belongs to another process."""
