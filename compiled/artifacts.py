"""A cache of compiled models that explains itself.

Two kinds of entry. A *recipe* is found by everything that is known before a model is looked at: its config, the
versions, this machine, our own code. A *piece* is found by what it computes and what it was compiled for, so
models of any depth, and all options that change no graph, share pieces. A start that finds both runs neither
Dynamo nor Inductor, and imports neither transformers nor a compiler. One that does not says which factor is
another one than last time. Entries hold text, shared libraries and safetensors: no pickle.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from compiled import inductor
from compiled.attention.base import AttentionSpec
from compiled.inductor import Call, Generated
from compiled.recipe import Attention, Constant, Fed, Held, ModelFacts, Parameter, PieceFacts, Recipe, Run
from compiled.store import Store, Unusable
from compiled.work import Polynomial, Work

Factors = Mapping[str, Any]
"""What an entry depends on, by name: JSON values, nested."""

_SOURCE, _RECIPE, _CONSTANTS, _LIBRARY = "piece.py", "recipe.json", "constants.safetensors", "kernels.so"
_MAKING = "making.json"
"""Kernels' sources and seconds: for a reader, and missing where nobody noted them."""

_SAYS_NOTHING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
"""Entries of a config that change no graph."""

_ELSEWHERE = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
"""Inductor's variables that change no code."""

_FEW_WORDS = 8
_CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model that is compiled: ``pieces`` and what was ``generated`` for them by their keys in the recipe, ``notes``
    as they were saved."""

    recipe: Recipe
    pieces: Mapping[str, Call]
    generated: Mapping[str, Generated]
    notes: Mapping[str, Any]


class Cache:
    """Compiled models in ``folder``, for ``where`` on this machine and ``threads`` compute threads. Any number of
    processes may use one folder. Nothing here raises because of what lies on the disk: it is logged, and made again."""

    def __init__(self, folder: Path, threads: int, where: torch.device = _CPU) -> None:
        self.store = Store(folder)
        self._machine = machine_factors(threads, where)
        self._where = where
        self._workshop: Path | None = None
        self._open = True
        if (fault := self.store.fault()) is not None:
            self._open = False
            log.warning("%s: compiled code is neither loaded from there nor saved", fault)

    def factors(self, config: Mapping[str, Any], **build: Any) -> Factors:
        """All that a recipe depends on: ``config`` is the model's config.json, ``build`` the options that change
        what is compiled."""
        told = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
        versions = {"transformers": metadata.version("transformers"), "streamengine's code": _code("**/*.py")}
        return {"config": told, **build, **versions, **self._machine}

    def load(self, model: str, factors: Factors) -> Loaded | None:
        """What was saved for ``factors``; None, and a line in the log that says why, where it has to be made."""
        found = self._look(factors)
        if isinstance(found, Loaded):
            return found
        if self._open:
            log.info("compiling %s, which is not in the cache: %s", model, found or self.nearest(model, factors))
        return None

    def explain(self, model: str, factors: Factors) -> str | None:
        """None for what would be loaded; else why it would not."""
        found = self._look(factors)
        return None if isinstance(found, Loaded) else found or self.nearest(model, factors)

    @property
    def workshop(self) -> Path:
        """Where Inductor may work: a folder that is this process's alone, and gone when this cache is."""
        if self._workshop is None:
            self._workshop = Path(tempfile.mkdtemp(prefix="streamengine-"))
            weakref.finalize(self, shutil.rmtree, self._workshop, ignore_errors=True)
        return self._workshop

    @property
    def triton(self) -> Path:
        """Where Triton keeps what it makes of the kernels in pieces for a GPU: beside the pieces."""
        return self.store.folder / "triton"

    def piece(self, key: str) -> tuple[Call, Generated] | None:
        """The piece that `compiled.split` calls ``key``, compiled for this machine; None where there is none."""
        try:
            return self._load_piece(key)
        except Unusable as error:
            log.warning("%s: it is compiled again", error)
        return None

    def save(self, model: str, factors: Factors, recipe: Recipe, pieces: Mapping[str, Generated], **notes: Any) -> None:
        """Keep ``recipe`` and those of its ``pieces`` that were compiled for it; ``notes`` are for the reader."""
        if not self._open:
            return
        runs = {call.key: call.name for call in recipe.calls if isinstance(call, Run)}
        head = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "model": model}
        try:
            for key, generated in pieces.items():
                about = {"kind": "piece", **head, "what": runs.get(key, ""), "graph": key, "factors": self._machine}
                self.store.write(self._piece_name(key), about, _piece_files(generated))
            what = f"{len(recipe.model.layers)} layers of {len(runs)} pieces"
            about = {"kind": "recipe", **head, "what": what, "notes": notes, "pieces": runs, "factors": factors}
            self.store.write(_recipe_name(factors), about, _recipe_files(recipe), replace=True)
        except OSError as error:
            log.warning("what was compiled is not saved: %s", error)

    def nearest(self, model: str, factors: Factors) -> str:
        """In which factors the entry differs that is most like one of ``factors``."""
        others = [
            entry.manifest["factors"]
            for entry in self.store.entries()
            if entry.manifest.get("kind") == "recipe"
            and (entry.manifest.get("model") == model or entry.manifest["factors"].get("config") == factors["config"])
        ]
        fewest: list[str] = min((list(differences(other, factors)) for other in others), key=len, default=[])
        # An equal one was there a moment ago: it is being written, or was just found to be unusable.
        return "; ".join(fewest) or "nothing is saved for it yet"

    def _look(self, factors: Factors) -> Loaded | str | None:
        """The saved model, why it cannot be used, or None where there is none."""
        if not self._open:
            return self.store.fault()
        try:
            entry = self.store.read(_recipe_name(factors))
            if entry is None:
                return None
            recipe = _recipe(entry.files)
            pieces = {call.key: self._load_piece(call.key) for call in recipe.calls if isinstance(call, Run)}
        except Unusable as error:
            return str(error)
        there = {key: found for key, found in pieces.items() if found is not None}
        for missing in pieces.keys() - there.keys():
            return f"{self._piece_name(missing)} is not there any more"
        calls = {key: call for key, (call, _) in there.items()}
        return Loaded(recipe, calls, {key: made for key, (_, made) in there.items()}, entry.manifest["notes"])

    def _load_piece(self, key: str) -> tuple[Call, Generated] | None:
        if not self._open or (entry := self.store.read(self._piece_name(key))) is None:
            return None
        try:
            library = entry.path / _LIBRARY if _LIBRARY in entry.files else None
            making = json.loads(entry.files.get(_MAKING, b"{}"))
            generated = Generated(entry.files[_SOURCE].decode(), library, _tensors(entry.files, self._where), **making)
            return inductor.load(generated, self.triton), generated
        except Exception as error:  # it is ours and whole: another libc, a full memory, a bug
            raise Unusable(f"{entry.path} does not load: {type(error).__name__}: {error}") from error

    def _piece_name(self, key: str) -> str:
        return f"piece-{_digest({'graph': key, **self._machine})}"


def machine_factors(threads: int, where: torch.device = _CPU) -> Factors:
    """What machine code depends on. Threads: Inductor writes their number into its loops."""
    name, flags = _cpu()
    there = {key: value for key, value in os.environ.items() if key.startswith("TORCHINDUCTOR_")}
    return {
        "torch": torch.__version__,
        "python": sys.implementation.cache_tag,
        "cpu": name,
        "cpu flags": flags,
        "threads": threads,
        "inductor": dict(inductor.OPTIONS),
        "environment": {key: value for key, value in there.items() if key not in _ELSEWHERE},
        "operators": _code("linear/*.py", "inductor.py", "kernels.py"),
        "device": "cpu" if where.type == "cpu" else _gpu(where),
    }


def _gpu(where: torch.device) -> Factors:
    """What Triton's kernels depend on, and the choices that Inductor makes between them."""
    found = torch.cuda.get_device_properties(where)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
    }


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """``name: old → new`` for each value that is not the same; of long texts the words that came and went."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        before, after = (str(value).split() for value in (old, new))
        if min(len(before), len(after)) > _FEW_WORDS:
            words = (
                *(f"-{word}" for word in before if word not in after),
                *(f"+{w}" for w in after if w not in before),
            )
            yield f"{name}: {' '.join(words)}"
        else:
            yield f"{name}: {old} → {new}"


def _cpu() -> tuple[str, str]:
    """Name and features: what ``-march=native`` chooses by."""
    found = {"model name": platform.processor() or platform.machine(), "flags": ""}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().partition("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        found["flags" if key.strip() == "Features" else key.strip()] = value.strip()
    return found["model name"], found["flags"]


@cache
def _code(*patterns: str) -> str:
    """A digest of our own sources, as they were when this process first asked."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _digest(factors: Factors) -> str:
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:24]


def _recipe_name(factors: Factors) -> str:
    return f"recipe-{_digest(factors)}"


def _piece_files(generated: Generated) -> dict[str, bytes]:
    library = {} if generated.library is None else {_LIBRARY: generated.library.read_bytes()}
    making = json.dumps({"kernels": dict(generated.kernels), "seconds": dict(generated.seconds)}, indent=1).encode()
    return {_SOURCE: generated.source.encode(), **library, **_constants(generated.constants), _MAKING: making}


def _recipe_files(recipe: Recipe) -> dict[str, bytes]:
    tensors = {str(index): tensor for index, tensor in enumerate(recipe.constants)}
    told = {field.name: _encode(getattr(recipe, field.name)) for field in fields(recipe) if field.name != "constants"}
    return {_RECIPE: json.dumps(told, indent=1).encode(), **_constants(tensors)}


def _recipe(files: Mapping[str, bytes]) -> Recipe:
    """Raises Unusable for what no version of `_recipe_files` wrote."""
    tensors = _tensors(files)
    try:
        return Recipe(
            constants=tuple(tensors[str(i)] for i in range(len(tensors))), **_decode(json.loads(files[_RECIPE]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{_RECIPE} is no recipe: {type(error).__name__}: {error}") from error


def _constants(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    if not tensors:
        return {}
    return {_CONSTANTS: safetensors.torch.save({name: tensor.clone() for name, tensor in tensors.items()})}


def _tensors(files: Mapping[str, bytes], where: torch.device = _CPU) -> dict[str, Tensor]:
    tensors = safetensors.torch.load(files[_CONSTANTS]) if _CONSTANTS in files else {}
    return {name: tensor.to(where) for name, tensor in tensors.items()}


_VALUES = (Attention, AttentionSpec, Constant, Fed, Held, ModelFacts, Parameter, PieceFacts, Polynomial, Run, Work)
_TYPES = {kind.__name__: kind for kind in _VALUES}
_TYPE = "$type"
"""No name of a value begins with a dollar."""


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {_TYPE: type(value).__name__} | {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return [_encode(item) for item in value] if isinstance(value, tuple) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if isinstance(value, dict):
        told = {key: _decode(item) for key, item in value.items() if key != _TYPE}
        return _TYPES[value[_TYPE]](**told) if _TYPE in value else told
    return value
