"""What models can run on here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Something that models run on, or the reason why they cannot."""

    name: str
    """As ``LLM(device=...)`` takes it."""
    description: str
    """What it is."""
    memory_bytes: int
    """Its memory; 0 where it is not known."""
    problem: str | None = None
    """Why models cannot run on it; ``None``: they can."""


def devices() -> list[Device]:
    """What models can run on here: the CPU, then NVIDIA GPUs in the driver's order.

    Where there is no driver, or no kernels for GPUs in this build, the entry of ``"cuda"`` says so.
    """
    from octavo import _octavo

    machine = _octavo.machine()
    cpu = Device("cpu", machine.isa or "", machine.memory_bytes, machine.isa_error)
    if machine.gpu_error is not None:
        return [cpu, Device("cuda", "NVIDIA GPUs", 0, machine.gpu_error)]
    problem = None if machine.cuda_kernels else "this build of octavo has no CUDA kernels: it was built without nvcc"
    gpus = [
        Device(f"cuda:{i}", f"{name}, compute capability {major}.{minor}", memory, problem)
        for i, (name, (major, minor), memory) in enumerate(machine.gpus)
    ]
    return [cpu, *(gpus or [Device("cuda", "NVIDIA GPUs", 0, "the driver knows no device")])]
