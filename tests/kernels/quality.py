"""What can be said of the CUDA kernels without a GPU: reads the compiler's report and the code it made.

    python tests/kernels/quality.py

Compiles the kernels that a model's speed hangs on for an H100 or H200 and prints a table of registers, memory and
occupancy. Fails where one spills registers or keeps arrays in local memory, does not load 16 bytes at a time, or does
without tensor cores or integer products. Needs nvcc: $NVCC, $CUDA_HOME/bin/nvcc, $CUDA_PATH/bin/nvcc or on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "rust" / "octavo-kernels" / "cu"
LOADS = r"ld\.global(\.nc)?\.v4|cp\.async\.cg"
TENSOR_CORES = r"mma\.sync"
INTEGERS = r"dp4a"


@dataclass
class Hot:
    """A kernel that must be good: its threads, its dynamic shared memory, and what its code must hold."""

    file: str
    name: str
    threads: int
    dynamic_bytes: int
    wanted: tuple[str, ...]


def hot() -> list[Hot]:
    kernels = []
    for dtype in ("bf16", "f16"):
        for dim in (64, 128, 256):
            kernels.append(Hot("attention16", f"attention_{dtype}_{dim}", 32, 0, (LOADS, TENSOR_CORES)))
    for dtype in ("BF16", "F16"):
        # Few rows: the sums of the 16 slices of 4096 inputs. Others: four stages.
        forms = ((8, 128, 16 * 8 * 64), (16, 128, 16 * 16 * 64), (64, 128, 24576), ("many", 256, 65536))
        for rows, threads, dynamic in forms:
            kernels.append(Hot("linear16", f"linear_{rows}_{dtype}", threads, dynamic, (LOADS, TENSOR_CORES)))
    for dtype in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"):
        kernels.append(Hot("linear8", f"linear8_{dtype}", 64, 0, (LOADS, INTEGERS)))
    return kernels


@dataclass
class Report:
    registers: int
    shared_bytes: int
    spilled_bytes: int
    stack_bytes: int
    code: str

    def warps(self, kernel: Hot) -> int:
        """Warps of a multiprocessor of compute capability 9.0 at a time, at most 64."""
        of_block = kernel.threads // 32
        # A warp's registers are taken by the 256; a block's shared memory costs 1 KiB more.
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256) // of_block
        by_memory = 228 * 1024 // (self.shared_bytes + kernel.dynamic_bytes + 1024)
        return min(by_registers, by_memory, 32, 64 // of_block) * of_block


def find_nvcc() -> str | None:
    homes = [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    named = [Path(os.environ["NVCC"])] if "NVCC" in os.environ else []
    return next((str(path) for path in named + homes if path.is_file()), None) or shutil.which("nvcc")


def compile_file(nvcc: str, file: str) -> dict[str, Report]:
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-cubin", "-std=c++17", "-O3", "-fmad=false", "-arch=sm_90a", "-Xptxas", "-v"]
        command += ["--keep", "--keep-dir", folder, "-o", f"{folder}/out.cubin", str(SOURCES / f"{file}.cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        code = next(Path(folder).glob("*.ptx")).read_text()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", code, re.DOTALL))
    reports = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?Used .*?)\n", done.stderr, re.DOTALL):
        found = re.findall(r"(\d+) (bytes stack|bytes spill stores|registers|bytes smem)", text)
        numbers = {what: int(number) for number, what in found}
        reports[name] = Report(
            numbers["registers"],
            numbers.get("bytes smem", 0),
            numbers["bytes spill stores"],
            numbers["bytes stack"],
            bodies[name],
        )
    return reports


def check(nvcc: str) -> tuple[list[str], list[str]]:
    """The lines of the table, and what is wrong."""
    kernels = hot()
    files = {file: compile_file(nvcc, file) for file in dict.fromkeys(kernel.file for kernel in kernels)}
    table = ["kernel                 registers  shared spilled local warps 16 bytes  mma dp4a"]
    faults = []
    for kernel in kernels:
        report = files[kernel.file].get(kernel.name)
        if report is None:
            faults.append(f"{kernel.name}: there is no such kernel in {kernel.file}.cu")
            continue
        counts = [len(re.findall(what, report.code)) for what in (LOADS, TENSOR_CORES, INTEGERS)]
        shared = report.shared_bytes + kernel.dynamic_bytes
        table.append(
            f"{kernel.name:22} {report.registers:9} {shared:7} {report.spilled_bytes:7} {report.stack_bytes:5} "
            f"{report.warps(kernel):5} {counts[0]:8} {counts[1]:4} {counts[2]:4}"
        )
        if report.spilled_bytes or report.stack_bytes:
            faults.append(f"{kernel.name}: {report.spilled_bytes} bytes spilled, {report.stack_bytes} of local memory")
        if report.warps(kernel) < 8:
            faults.append(f"{kernel.name}: only {report.warps(kernel)} warps fit a multiprocessor")
        faults += [
            f"{kernel.name}: no {what} in its code" for what in kernel.wanted if not re.search(what, report.code)
        ]
    return table, faults


def main() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: no nvcc ($NVCC, $CUDA_HOME/bin/nvcc, $CUDA_PATH/bin/nvcc or nvcc on the path)")
        return 0
    table, faults = check(nvcc)
    print("\n".join(table + faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
