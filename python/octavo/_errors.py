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

    #: Seconds until there will be room, as far as is known.
    retry_after: float | None = None


class DeadlineExceededError(OctavoError, TimeoutError):
    """``deadline_s`` passed before the answer was complete; ``partial`` holds what there was. Or it was certain at once
    that it would: requests that come first take longer. Then nothing ran, and the message says how long they take."""

    #: Seconds until it would be worth asking again, when the request was not taken at all.
    retry_after: float | None = None


class OutOfMemoryError(OctavoError, MemoryError):
    """The machine has no room; the message names the setting that would fit."""


class DeviceError(OctavoError):
    """The device is missing, or it failed; requests that ran on it then get this."""


class EngineClosedError(OctavoError):
    """The engine was closed, died of the reason given, or belongs to another process."""
