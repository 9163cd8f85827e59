"""The quality of the GPU's kernels as far as the compiler's report shows it. Needs nvcc, not a GPU."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from conftest import ROOT

# Their cosines and sines reduce large angles through an array.
WITH_STACK = {"rope_angles"}


def test_no_kernel_spills_and_every_one_fills_its_multiprocessor() -> None:
    path = ROOT / "rust" / "octavo-kernels" / "cu" / "report.py"
    spec = importlib.util.spec_from_file_location("cuda_report", path)
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = report
    spec.loader.exec_module(report)
    nvcc = report.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: what it makes of the kernels is not looked at")
    found = report.kernels(nvcc)
    assert len(found) > 40
    assert {kernel.name for kernel in found if kernel.spill_bytes} == set()
    assert {kernel.name for kernel in found if kernel.stack_bytes} <= WITH_STACK
    assert {kernel.name for kernel in found if kernel.tensor_products and not kernel.wide_loads} == set()
    assert {kernel.name: kernel.occupancy for kernel in found if kernel.occupancy < 0.1} == {}
