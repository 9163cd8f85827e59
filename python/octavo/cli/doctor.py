"""``octavo doctor``: what this machine offers, and what octavo will use of it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo._models import cache_folder
from octavo._sizes import format_bytes
from octavo.cli._show import table

if TYPE_CHECKING:
    from octavo._octavo import Machine


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="what this machine offers and what octavo will use", description=__doc__
    )
    parser.set_defaults(command=_run)


def _run(_: argparse.Namespace) -> int:
    from octavo import _octavo

    machine = _octavo.machine()
    print(
        table(
            [
                ("octavo", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
                ("instruction sets", ", ".join(machine.isa_available) or "portable"),
                ("  will use", _isa(machine)),
                ("cores", _cores()),
                ("  will use", f"{machine.threads} threads"),
                ("memory", f"{format_bytes(machine.memory_bytes)}{_memory_limit()}"),
                ("  free", format_bytes(machine.free_memory_bytes)),
                ("GPU driver", _gpu(machine)),
                ("CUDA kernels", _kernels(machine)),
                ("models", f"{cache_folder()} (OCTAVO_CACHE moves it)"),
            ]
        )
    )
    return 0 if machine.isa_error is None else 1


def _isa(machine: Machine) -> str:
    if machine.isa_error is not None:
        return f"NOTHING, no model can be loaded: {machine.isa_error}"
    return f"{machine.isa} (OCTAVO_CPU_ISA overrides)"


def _cores() -> str:
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    text = f"{os.cpu_count()}, of which this process may use {allowed}"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        text += f", with a quota of {int(quota[0]) / int(quota[1]):.3g}"
    return text


def _memory_limit() -> str:
    limit = _read("/sys/fs/cgroup/memory.max")
    return f" (limit of this container {format_bytes(int(limit))})" if limit.isdigit() else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _kernels(machine: Machine) -> str:
    if not machine.cuda_kernels:
        return "not in this build (it was built without nvcc): models run on the CPU"
    return "in this build: device=\"cuda\" runs models on a GPU"


def _gpu(machine: Machine) -> str:
    if machine.gpu_error is not None:
        return machine.gpu_error
    found = [
        f"{name}, compute capability {major}.{minor}, {format_bytes(memory)}"
        for name, (major, minor), memory in machine.gpus
    ]
    return "; ".join(found) or "found, but it knows no device"
