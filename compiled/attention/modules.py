"""FlashInfer's compiled modules: which ones a model's attention needs, and which of them are there.

FlashInfer compiles a module the first time that one is asked for, which takes minutes. So a start asks for all that
it will ever need (`prepare`), and from then on nothing may be compiled (`seal`). Names and flags are FlashInfer's own:
its getters are asked, and what they would build is looked at in place of being built.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compiled.attention.base import AttentionSpec
from compiled.attention.flashinfer import FlashInferAttention
from compiled.step import LoadError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
DISABLE = "FLASHINFER_DISABLE_JIT"
"""While this is in the environment FlashInfer raises, and names the module, where it would compile one."""

_OURS = "set by streamengine"

BUILT = "built.json"
"""Beside a module that `compiled.attention.prebuild` has built: by which FlashInfer, for which GPU."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Module:
    """What decides which compiled module attention runs in; dtypes by their names in torch. Prefill and decode of
    all layers that agree in it are one module: tensor-core decode is prefill with one query token."""

    head_dim: int
    dtype: str
    kv_dtype: str
    window: bool = False
    soft_cap: bool = False


def needed(specs: Iterable[AttentionSpec], dtype: str, kv_dtype: str) -> tuple[Module, ...]:
    """The modules that layers of ``specs`` run in.

    Raises:
        LoadError: FlashInfer's kernels cannot compute such a layer; the field and its value.
    """
    for name, given, known in (("dtype", dtype, DTYPES), ("kv_dtype", kv_dtype, KV_DTYPES)):
        if given not in known:
            raise LoadError(f"FlashInfer has no attention for {name} {given}, only for {', '.join(known)}")
    found = set()
    for spec in specs:
        if missing := FlashInferAttention.lacks(spec, DTYPES[dtype], KV_DTYPES[kv_dtype]):
            raise LoadError(f"FlashInfer's attention has no {missing}")
        found.add(Module(spec.head_dim, dtype, kv_dtype, spec.window is not None, spec.soft_cap is not None))
    return tuple(sorted(found))


def installed() -> tuple[str, Path]:
    """The version of FlashInfer, and the folder in which it looks for modules that were built before; imports nothing.

    Raises:
        LoadError: it is not installed.
    """
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        raise LoadError("flashinfer is not installed; get it with: pip install 'streamengine[cuda]'")
    return importlib.metadata.version("flashinfer-python"), Path(found.origin).parent / "data" / "aot"


@dataclass(frozen=True)
class Built:
    """What is known of a module that was built ahead. None: nobody has written it down."""

    flashinfer: str | None = None
    arch: str | None = None

    @classmethod
    def read(cls, library: Path) -> "Built":
        """From beside ``library``."""
        try:
            told = json.loads((library.parent / BUILT).read_text())
            return cls(str(told["flashinfer"]), str(told["arch"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, library: Path) -> None:
        (library.parent / BUILT).write_text(json.dumps(asdict(self)))


def list_built(folder: Path) -> list[tuple[Path, Built]]:
    """The modules in ``folder``, laid out as FlashInfer looks for them: ``NAME/NAME.so``."""
    libraries = (entry / f"{entry.name}.so" for entry in sorted(folder.glob("*/")))
    return [(library, Built.read(library)) for library in libraries if library.is_file()]


class _Asked(BaseException):
    """Thrown out of FlashInfer's getter with what it was about to build. Not an Exception: nobody may catch it."""


def spec_of(module: Module) -> Any:
    """FlashInfer's ``JitSpec`` of ``module``: its name, whether it was built, and how to.

    Imports FlashInfer, which needs a GPU or ``FLASHINFER_CUDA_ARCH_LIST`` in the environment.
    """
    # Optional: for machines with a GPU, and for builds of their images.
    from flashinfer.jit import core
    from flashinfer.prefill import get_batch_prefill_module

    def ask(spec: Any) -> None:
        raise _Asked(spec)

    dtype = DTYPES[module.dtype]
    formula = (0, module.window, module.soft_cap, False)  # no rotation within attention, float32 sums
    dtypes = (dtype, KV_DTYPES[module.kv_dtype], dtype, torch.int32)
    build_and_load, core.JitSpec.build_and_load = core.JitSpec.build_and_load, ask
    try:
        get_batch_prefill_module("fa2", *dtypes, module.head_dim, module.head_dim, *formula)
    except _Asked as asked:
        return asked.args[0]
    finally:
        core.JitSpec.build_and_load = build_and_load
    raise LoadError(f"flashinfer {installed()[0]} does not say which modules it builds; 0.6.18 to 0.7.4 do")


def prepare(modules: Iterable[Module], *, how: str) -> list[str]:
    """See that all ``modules`` are there, compiling what is missing; the names of those compiled. ``how`` is the
    command that builds them ahead, for messages. Before a start's warm-up, on a machine with a GPU.

    Raises:
        LoadError: one is missing and cannot be compiled here, or was built for another FlashInfer or GPU.
    """
    version, _ = installed()
    if os.environ.get(DISABLE) == _OURS:
        del os.environ[DISABLE]
    compiled = []
    for module in modules:
        spec = spec_of(module)
        if spec.is_aot:
            _check(Path(spec.aot_path), version)
            continue
        if not os.environ.get(DISABLE):
            log.warning("compiling %s, which takes minutes; ahead of a start: %s", spec.name, how)
        try:
            spec.build_and_load()
        except (RuntimeError, OSError) as error:
            why = next((line for line in str(error).splitlines() if "error" in line.lower()), str(error)[:200])
            raise LoadError(f"{spec.name} is missing and cannot be compiled here ({why}); build it: {how}") from error
        compiled.append(str(spec.name))
    return compiled


def _check(library: Path, version: str) -> None:
    built = Built.read(library)
    if built.flashinfer not in (None, version):
        raise LoadError(f"{library} was built by flashinfer {built.flashinfer}, {version} is installed; build it again")
    capability = torch.cuda.get_device_capability()
    if built.arch is not None and not fits(built.arch, capability):
        here = ".".join(map(str, capability))
        raise LoadError(f"{library} was built for {built.arch}, this GPU is {here}; build it again")


def fits(archs: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for one of ``archs`` (``9.0a 12.0``) runs on a GPU of compute ``capability``: that of its
    own major version and no later minor one, and with a letter behind it (``f``: of the family) on exactly its own."""
    for arch in archs.split():
        major, minor = (int(part.rstrip("af")) for part in arch.split("."))
        exact = arch.endswith("a")
        if major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
            return True
    return False


def seal() -> None:
    """From here on FlashInfer raises where it would compile. After the warm-up, which loads what `prepare` saw to."""
    os.environ.setdefault(DISABLE, _OURS)
