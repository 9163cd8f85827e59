"""numpy, for what comes back as an array. Nothing else needs it."""

from __future__ import annotations

from typing import Any


def numpy_for(what: str) -> Any:
    """numpy, or an error that says what needs it."""
    try:
        import numpy
    except ImportError:
        raise ImportError(f"{what} come back as a numpy array, and numpy is not installed: pip install numpy") from None
    return numpy
