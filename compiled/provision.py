"""What a model needs of a machine with a GPU before its first start there: FlashInfer's modules, built or missing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compiled.attention import modules, prebuild
from compiled.choices import RunnerOptions, pick_dtype, pick_kv_dtype
from compiled.step import LoadError
from compiled.weights import Report, resolve


def needed(options: RunnerOptions, report: Report) -> tuple[modules.Module, ...]:
    """The modules of the model's attention. Its folder needs a config and no weights. Raises LoadError."""
    dtype = pick_dtype(options.dtype, "cuda")
    names = [str(one).removeprefix("torch.") for one in (dtype, pick_kv_dtype(options.kv_dtype, dtype))]
    modules.needed((), *names)  # before anything slow
    folder = resolve(options.model, offline=options.offline, report=report, weights=False)
    from compiled.cold import describe  # transformers is slow to import, and the doctor does without

    return modules.needed(describe(folder, dtype, options.max_model_len).facts.layers, *names)


def build(options: RunnerOptions, archs: str, out: str | None, report: Report) -> list[dict[str, Any]]:
    """Build what the model needs for GPUs of ``archs``: name, library and seconds of each; see `prebuild.build`."""
    modules.installed()
    prebuild.Toolchain.find().check(archs)
    wanted = needed(options, report)
    built = prebuild.build(wanted, archs, None if out is None else Path(out).expanduser(), report)
    return [asdict(answer) for answer in built]


def look(options: RunnerOptions, report: Report) -> list[dict[str, Any]]:
    """Of each module that the model needs: its name, its library, and where that is None ``at_start``: what a start
    would do about it, in words. Raises LoadError."""
    found = [asdict(answer) for answer in prebuild.look(needed(options, report))]
    for told in found:
        told.pop("seconds")
        told["at_start"] = None if told["library"] else at_start()
    return found


def at_start() -> str:
    """What becomes of a module that is missing."""
    try:
        tools = prebuild.Toolchain.find()
    except LoadError as error:
        return f"the start fails: {error}"
    return f"it is compiled by {tools.cuda_home}/bin/nvcc, which takes minutes"


def describe_gpu() -> dict[str, Any]:
    """For `streamengine doctor`: the GPU, FlashInfer, its compiler, and the modules that are there."""
    facts: dict[str, Any] = {"device": "none: torch sees no CUDA device"}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        arch = ".".join(map(str, torch.cuda.get_device_capability()))
        facts = {"device": torch.cuda.get_device_name(), "arch": arch, "memory_bytes": total, "free_bytes": free}
    try:
        version, folder = modules.installed()
    except LoadError as error:
        return facts | {"flashinfer": f"missing: {error}"}
    try:
        compiler = str(prebuild.Toolchain.find().cuda_home)
    except LoadError as error:
        compiler = f"missing: {error}"
    built = [
        f"{library.stem} (flashinfer {known.flashinfer or 'of unknown version'}, {known.arch or 'unknown GPU'})"
        for library, known in modules.list_built(folder)
    ]
    return facts | {"flashinfer": version, "compiler": compiler, "modules": ", ".join(built) or f"none in {folder}"}
