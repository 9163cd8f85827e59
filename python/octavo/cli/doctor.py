"""``octavo doctor``: what this machine offers, and what octavo will use of it."""

from __future__ import annotations

import argparse
import ctypes
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
                ("GPU driver", _gpu()),
                ("CUDA kernels", "not in this build: models run on the CPU"),
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


def _gpu() -> str:
    """What the NVIDIA driver says about itself. Never fails: a broken driver is one of the things to find out here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none (libcuda.so.1 not found)"
    try:
        status = driver.cuInit(0)
        if status != 0:
            return f"found, but cuInit failed with {status}"
        version, count = ctypes.c_int(), ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(version))
        driver.cuDeviceGetCount(ctypes.byref(count))
        names = []
        for i in range(count.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
            driver.cuDeviceGet(ctypes.byref(device), i)
            driver.cuDeviceGetName(name, len(name), device)
            names.append(name.value.decode(errors="replace"))
        return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {', '.join(names) or 'no device'}"
    except (OSError, AttributeError) as error:
        return f"found, but unusable: {error}"
