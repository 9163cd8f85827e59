"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from operator import index

from octavo._errors import ModelLoadError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power


def parse_bytes(name: str, size: int | str) -> int:
    """``"2GiB"``, ``"512 MB"`` or a number, in bytes."""
    if hasattr(size, "__index__") and not isinstance(size, bool):
        count = index(size)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ModelLoadError(f"{name} must be a number of bytes or a size such as '2GiB', not {size!r}")
        count = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if not 0 < count < 1 << 63:
        raise ModelLoadError(f"{name} must be above 0 and below 2**63 bytes, not {size!r}")
    return count


def format_bytes(count: float) -> str:
    """``98 MB``: decimal units, two or three figures."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.1f} {unit}" if count < 9.95 and unit != "B" else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
