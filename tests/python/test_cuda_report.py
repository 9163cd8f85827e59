"""The quality of the GPU's kernels as far as the compiler's report shows it. Needs nvcc, not a GPU."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from conftest import ROOT

# What a model's speed hangs on, and what multiplies there.
CACHES = [
    f"{dtype}_{to}{width}" for dtype in ("bf16", "f16", "fp8_e4m3") for to in ("", "to_") for width in (64, 128, 256)
]
PRODUCTS = [f"linear_{rows}_{dtype}" for dtype in ("BF16", "F16") for rows in (8, 16, 64, "many")]
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
PRODUCTS += [f"linear8_{rows}_{dtype}" for dtype in QUANTISED for rows in (64, "many")]
TENSOR_CORES = [f"attention_{phase}_{cache}" for phase in ("decode", "prefill") for cache in CACHES]
TENSOR_CORES += [prefix + product for prefix in ("", "expert_") for product in PRODUCTS]
# A block of them takes a row of logits, so a multiprocessor has few: their warps must fill it.
DRAWS = ["adjust", "draw", "logprobs"]
BYTE_PRODUCTS = [f"{prefix}linear8_{dtype}" for prefix in ("", "expert_") for dtype in QUANTISED]


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
    everything = report.kernels(nvcc)
    # Local memory is looked for in the machine's code, where there is a tool that shows it.
    own_memory = {
        (kernel.architecture, kernel.name): (kernel.stack_bytes, kernel.spill_bytes, kernel.local_accesses)
        for kernel in everything
        if kernel.stack_bytes or kernel.spill_bytes or kernel.local_accesses
    }
    assert own_memory == {}
    for architecture in report.ARCHITECTURES:
        found = [kernel for kernel in everything if kernel.architecture == architecture]
        assert len(found) > 40
        assert {kernel.name for kernel in found if kernel.tensor_products and not kernel.wide_loads} == set()
        assert {kernel.name: kernel.occupancy for kernel in found if kernel.occupancy < 0.1} == {}
        by_name = {kernel.name: kernel for kernel in found}
        assert {name for name in TENSOR_CORES if not by_name[name].tensor_products} == set()
        assert {name for name in BYTE_PRODUCTS if not by_name[name].byte_products} == set()
        assert {name for name in TENSOR_CORES + BYTE_PRODUCTS if not by_name[name].wide_loads} == set()
        assert {name for name in DRAWS if by_name[name].occupancy < 0.5} == set()
