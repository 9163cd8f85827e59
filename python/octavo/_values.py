"""How the values that the engine makes are copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn


def settle(classes: Iterable[type]) -> None:
    """Teaches classes whose values never change, or stand for something outside of Python, what copying and pickling
    them comes to: a copy is the value itself, and whoever pickles one is told what to send instead."""
    for cls in classes:
        for name, method in (("__copy__", _itself), ("__deepcopy__", _itself), ("__reduce__", _stays)):
            setattr(cls, name, method)


def _itself(value: Any, _memo: Any = None) -> Any:
    return value


def _stays(value: Any) -> NoReturn:
    raise TypeError(
        f"octavo's {type(value).__name__} objects stay in the process that made them and cannot be pickled; send what "
        "you need of one, such as result.text, result.token_ids or result.anatomy.to_dict()"
    )
