"""The code that the compiler makes of the CUDA kernels, where there is a compiler."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def test_hot_kernels_spill_nothing_and_use_what_the_hardware_has() -> None:
    path = Path(__file__).parents[1] / "kernels" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    assert spec is not None
    assert spec.loader is not None
    quality = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = quality
    spec.loader.exec_module(quality)
    nvcc = quality.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    table, faults = quality.check(nvcc)
    assert not faults, "\n".join(table + faults)
