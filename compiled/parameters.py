"""A checkpoint's tensors, by the names that the model's own code gives them.

They are read straight from the safetensors files, beside whatever else the process does, where every name is
found there as it is; whatever needs more (experts that are merged, keys that are renamed, files that are broken)
goes through transformers, which does it or says why not.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiled.recipe import Held
from compiled.step import LoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What weights may be cast to."""


def read_directly(folder: Path, held: Mapping[str, Held]) -> dict[str, Tensor] | None:
    """The tensors of ``held``; None where the folder's files do not have all of them by these names and of these
    shapes. A name may lack its first part, as in checkpoints of a model without its head.

    Raises:
        LoadError: two tensors that are one in this model differ.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)]
            tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: _tensor(tensors, name, one) for name, one in held.items()}
        except (OSError, ValueError, SafetensorError, MissingTensor):
            return None


class MissingTensor(Exception):
    """A tensor is not there, or not in this shape."""


def weight_files(folder: Path) -> list[Path]:
    """What transformers would read: one file, or all that the index names. Raises MissingTensor."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise MissingTensor
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / Path(name).name for name in sorted(names)]


def _tensor(files: Mapping[str, safe_open], name: str, held: Held) -> Tensor:
    found = _find(files, name)
    if found is None:
        raise MissingTensor
    tensor = files[found].get_tensor(found)
    if tuple(tensor.shape) != held.shape:
        raise MissingTensor
    for alias in held.aliases:
        other = _find(files, alias)
        if other is not None and not torch.equal(files[other].get_tensor(other), tensor):
            raise LoadError(
                f"the checkpoint is broken: its config says that {name} and {alias} are one, and they differ"
            )
    return tensor.to(getattr(torch, held.dtype))


def _find(files: Mapping[str, safe_open], name: str) -> str | None:
    return next((found for found in (name, name.partition(".")[2]) if found in files), None)
