"""What the compiler made of the kernels, without a GPU: registers, spills, stack, occupancy, wide loads, tensor cores.

    python rust/octavo-kernels/cu/report.py [WORD ...]      # kernels whose name contains a word; needs nvcc

For every architecture that the build makes machine code for. Instructions are counted in that code where there is
nvdisasm (beside nvcc, on the path or `$NVDISASM`; it comes with `pip install 'nvidia-cuda-nvdisasm==13.*'`), else in
the portable code. Occupancy is for the largest block, without dynamic shared memory.
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

FOLDER = Path(__file__).parent
# And the shared memory of a multiprocessor there.
ARCHITECTURES = {"sm_80": 164 << 10, "sm_90a": 228 << 10}
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-cubin", "-Xptxas=-v", "--keep"]
# Of a multiprocessor.
REGISTERS, WARPS, BLOCKS = 65536, 64, 32


@dataclass(frozen=True)
class Kernel:
    """One of them. Instructions count as often as they are written, those of unrolled loops many times."""

    name: str
    architecture: str
    threads: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    wide_loads: int
    tensor_products: int
    byte_products: int
    # To memory of a thread's own: what did not fit into registers. `None`: not looked for.
    local_accesses: int | None

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be there at a time."""
        warps = self.threads // 32
        by_registers = REGISTERS // (256 * -(-self.registers * 32 // 256)) // warps
        by_memory = ARCHITECTURES[self.architecture] // (self.shared_bytes + 1024)
        blocks = min(BLOCKS, WARPS // warps, by_registers, by_memory)
        return blocks * warps / WARPS


def find_nvcc() -> str | None:
    """Where the build looks."""
    return find("nvcc")


def find(tool: str) -> str | None:
    named = [os.environ.get(tool.upper())]
    named += [f"{os.environ[home]}/bin/{tool}" for home in ("CUDA_HOME", "CUDA_PATH") if home in os.environ]
    return next((path for path in named if path and Path(path).is_file()), shutil.which(tool))


def kernels(nvcc: str) -> list[Kernel]:
    """All of them, compiled."""
    sources = sorted(FOLDER.glob("*.cu"))
    return [kernel for source in sources for name in ARCHITECTURES for kernel in of_file(nvcc, source, name)]


def of_file(nvcc: str, source: Path, architecture: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        where = [f"--keep-dir={folder}", "-o", f"{folder}/out.cubin"]
        command = [nvcc, *FLAGS, f"-arch={architecture}", *where, str(source)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (portable,) = Path(folder).glob("*.ptx")
        bodies = portable.read_text().split(".entry ")[1:]
        machine = disassembled(f"{folder}/out.cubin")
    code = {re.match(r"\w+", body).group(): body for body in bodies}  # type: ignore[union-attr]
    reports = re.split(r"Compiling entry function '(\w+)'", said)[1:]
    pairs = zip(reports[::2], reports[1::2], strict=True)
    return [of_report(name, architecture, text, code[name], machine and machine[name]) for name, text in pairs]


def disassembled(cubin: str) -> dict[str, str] | None:
    """Each kernel's instructions, where there is a tool that shows them."""
    nvdisasm = find("nvdisasm")
    if nvdisasm is None:
        return None
    text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\.section\s+\.text\.(\w+)", text)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


def of_report(name: str, architecture: str, report: str, code: str, machine: str | None) -> Kernel:
    def number(pattern: str, text: str = report) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Kernel(
        name,
        architecture,
        threads=number(r"\.maxntid (\d+)", code),
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        **(in_portable(code) if machine is None else in_machine(machine)),
    )


def in_portable(code: str) -> dict[str, int | None]:
    return {
        "wide_loads": len(re.findall(r"ld\.global[.\w]*\.v(?:4\.[usbf]32|2\.[usbf]64)|cp\.async\.cg", code)),
        "tensor_products": len(re.findall(r"\bmma\.sync", code)),
        "byte_products": len(re.findall(r"\bdp4a\.", code)),
        "local_accesses": None,
    }


def in_machine(code: str) -> dict[str, int | None]:
    return {
        "wide_loads": len(re.findall(r"\bLDG(?:STS)?\.E[.\w]*\.128", code)),
        "tensor_products": len(re.findall(r"\b[HI]MMA\.", code)),
        "byte_products": len(re.findall(r"\bIDP\.4A", code)),
        "local_accesses": len(re.findall(r"\b(?:LDL|STL)\b", code)),
    }


def main() -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("there is no nvcc in $NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or on the path")
    if find("nvdisasm") is None:
        print("no nvdisasm: instructions are those of the portable code")
    print(f"{'':40}  threads  registers  shared  stack  spills  occupancy  128-bit loads  mma  dp4a  local")
    for kernel in kernels(nvcc):
        if len(sys.argv) == 1 or any(word in kernel.name for word in sys.argv[1:]):
            print(
                f"{kernel.architecture:8}{kernel.name:32}{kernel.threads:9}{kernel.registers:11}{kernel.shared_bytes:8}{kernel.stack_bytes:7}"
                f"{kernel.spill_bytes:8}{kernel.occupancy:10.0%}{kernel.wide_loads:15}{kernel.tensor_products:5}"
                f"{kernel.byte_products:6}{'?' if kernel.local_accesses is None else kernel.local_accesses:>7}"
            )


if __name__ == "__main__":
    main()
