"""GPUs as a user without one meets them: nothing is needed, and what is missing is said."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import octavo
from octavo import _octavo


def needed_libraries(path: Path) -> list[str]:
    """The shared libraries that an ELF file of 64 bits names in its dynamic section."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (first,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, first + i * size) for i in range(count)]
    (dynamic,) = [section for section in sections if section[1] == 6]
    offset, length, strings = dynamic[4], dynamic[5], sections[dynamic[6]][4]
    entries = [struct.unpack_from("<QQ", data, offset + i) for i in range(0, length, 16)]
    return [data[strings + at : data.index(b"\0", strings + at)].decode() for tag, at in entries if tag == 1]


def test_the_extension_needs_no_cuda_library() -> None:
    needed = needed_libraries(Path(_octavo.__file__))
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if any(word in name for word in ("cuda", "cudart", "cublas", "nvrtc"))]


def test_devices_say_what_runs_and_what_does_not() -> None:
    machine = _octavo.machine()
    cpu, *others = octavo.devices()
    assert (cpu.name, cpu.problem) == ("cpu", None)
    assert cpu.memory_bytes == machine.memory_bytes > 0
    assert others
    for device in others:
        assert device.name.startswith("cuda")
        assert (device.problem is None) == (machine.cuda_kernels and bool(machine.gpus))


def test_a_device_that_is_not_here_is_refused_with_the_reason(tiny_path: str) -> None:
    machine = _octavo.machine()
    if machine.cuda_kernels and machine.gpus:
        pytest.skip("there is a GPU here")
    with pytest.raises(octavo.DeviceError) as refused:
        octavo.LLM(tiny_path, device="cuda", progress=False)
    said = str(refused.value)
    assert "libcuda.so.1" in said or "nvcc" in said or "driver knows 0" in said
    with pytest.raises(octavo.DeviceError, match="'gpu'.*\"cuda\""):
        octavo.LLM(tiny_path, device="gpu")
