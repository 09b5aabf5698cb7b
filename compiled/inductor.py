"""A graph → code that Inductor writes for it, as files that load again without Inductor and without Dynamo.

Inductor writes a Python module, whose ``call`` runs the graph, and C++ kernels; those of all pieces are compiled
together (see `compiled.kernels`). Of the module is kept what ``call`` needs and nothing else, so that loading it
imports torch alone: no compiler package (3 s), no pickle, no look-up in a cache that others could write. A fresh
piece and a stored one are loaded by the same function from the same text, so a warm start runs what the cold one
ran.

For a GPU Inductor writes kernels in Triton's language instead. Their text stays in the module, and what Triton makes
of it in a cache of Triton's own, which is kept beside ours; loading them needs Triton and Inductor's runtime.
"""

import ast
import builtins
import importlib.abc
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from compiled import kernels
from compiled.kernels import Kernel
from compiled.linear import op

Call = Callable[[list[Any]], Sequence[Any]]
"""Runs a piece: a list of its inputs, which is emptied so that each is freed after its last use → its outputs."""

OPTIONS: Mapping[str, Any] = {
    "fx_graph_cache": False,  # pickles, in a folder under /tmp; what is kept is kept by `compiled.artifacts`
    "compile_threads": 1,  # more are processes of their own, which import torch before they compile anything
    "cpp.vec_isa_ok": True,  # the CPU's flags are believed: trying each vector extension takes several seconds
    "size_asserts": False,  # twenty a piece, in every step; what a piece is given never changes its kind
}
"""Inductor's options: part of every piece's key."""


@dataclass(frozen=True)
class Generated:
    """What Inductor wrote: ``source`` defines ``call`` and asks for kernels of ``library`` (None: there are none), and
    for ``constants``, which are tensors by the names of the globals that they become. ``kernels`` are the sources of
    its own kernels by the names that ``source`` gives them, ``seconds`` tell what making it took, by stage; both are
    for a reader."""

    source: str
    library: Path | None
    constants: Mapping[str, Tensor]
    kernels: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """The same before its ``kernels``, by their names in ``source``, are compiled."""

    source: str
    kernels: Mapping[str, Kernel]
    constants: Mapping[str, Tensor]
    seconds: Mapping[str, float] = field(default_factory=dict)


_COMPILES = "= async_compile.triton("
_DISPATCHED = "torch.ops.streamengine.linear.default("


class NotPortable(Exception):
    """Inductor wrote something that runs in this process only. One line says what."""


def generate(graph: fx.GraphModule, inputs: Sequence[Any], folder: Path) -> Generated:
    """`write` and `build` for one graph."""
    return build({"": write(graph, inputs, folder)}, folder)[""]


def build(written: Mapping[str, Written], folder: Path) -> dict[str, Generated]:
    """Compile the kernels of all that was ``written``, as one library in ``folder``. Each is told the seconds of that
    run as ``cxx``, and how many have kernels in it as ``cxx_pieces``.

    Raises:
        NotCompiled: what the compiler says.
    """
    together = {kernel.symbol: kernel for one in written.values() for kernel in one.kernels.values()}
    started = time.perf_counter()
    with _working_in(folder):
        library = kernels.build(together, folder) if together else None
    seconds = {"cxx": time.perf_counter() - started, "cxx_pieces": sum(bool(one.kernels) for one in written.values())}
    return {
        name: Generated(
            one.source,
            library if one.kernels else None,
            one.constants,
            {name: kernel.source for name, kernel in one.kernels.items()},
            {**one.seconds, **(seconds if one.kernels else {})},
        )
        for name, one in written.items()
    }


def write(graph: fx.GraphModule, inputs: Sequence[Any], folder: Path) -> Written:
    """Code for ``graph`` and ``inputs``: fake tensors of one mode and symbolic sizes. ``graph`` is used up.

    ``folder`` is where Inductor works; see `compiled.artifacts.Cache.workshop`.

    Raises:
        NotPortable: its code cannot be kept as files.
    """
    # Compiling imports three seconds' worth of modules that a warm start does without.
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    results: list[Any] = []
    inner = 0.0

    def compile_inner(*arguments: Any, **options: Any) -> Any:
        nonlocal inner
        started = time.perf_counter()
        results.append(compile_fx_inner(*arguments, **options))
        inner += time.perf_counter() - started
        return results[-1]

    modes = {value.fake_mode for value in inputs if hasattr(value, "fake_mode")}
    (mode,) = modes
    context = torch._guards.TracingContext(mode)
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    started, before = time.perf_counter(), _codegen_seconds()
    with torch.no_grad(), torch._guards.tracing(context), no_cache, _working_in(folder):
        compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=dict(OPTIONS))
    if len(results) != 1:
        raise NotPortable(f"one graph became {len(results)}")
    whole, codegen = time.perf_counter() - started, _codegen_seconds() - before
    seconds = {"trace": whole - inner, "lower": inner - codegen, "codegen": codegen}
    return replace(_portable(results[0]), seconds=seconds)


def _codegen_seconds() -> float:
    """What Inductor has spent on writing code in this process, by torch's own count."""
    return sum(torch._dynamo.utils.compilation_time_metrics.get("GraphLowering.codegen", ()))


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Inductor's files, which would lie in a folder under /tmp that is its user's by name only. No compiler of its own
    runs: C++ kernels are only noted, vector extensions not tried, and Triton's kernels are compiled by `load`."""
    from torch._inductor.async_compile import AsyncCompile  # as above
    from torch._inductor.cpu_vec_isa import VecISA  # as above

    own = AsyncCompile.cpp_pybinding, AsyncCompile.triton, VecISA.check_build
    AsyncCompile.cpp_pybinding = lambda _, arguments, source: Kernel(tuple(arguments), source)
    AsyncCompile.triton = lambda *_, **__: None
    VecISA.check_build = kernels.believes_flags
    try:
        with _files_in(folder):
            yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.triton, VecISA.check_build = own


@contextmanager
def _files_in(folder: Path) -> Iterator[None]:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(variable)
    os.environ[variable] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def load(generated: Generated, folder: Path) -> Call:
    """The piece's function. ``folder`` is where Triton keeps what it compiles, if the piece needs that. Raises
    ImportError or OSError for a kernel that does not load here."""
    module = ModuleType("compiled_piece")
    module.__dict__.update(generated.constants)
    if generated.library is not None:
        module.__dict__["kernel"] = vars(kernels.load(generated.library)).__getitem__
    module.__dict__["op"] = op
    with _triton(module, folder) if _COMPILES in generated.source else nullcontext():
        _Text(generated.source.replace(_DISPATCHED, "op.linear(")).exec_module(module)
    call: Call = module.__dict__["call"]
    return call


@contextmanager
def _triton(module: ModuleType, folder: Path) -> Iterator[None]:
    """What a module needs to compile its kernels, here and now, or to find them in ``folder``."""
    # Slow to import, and on a CPU nothing needs it.
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    module.__dict__["async_compile"] = AsyncCompile()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _files_in(folder), config.patch(compile_threads=1):
        yield


class _Text(importlib.abc.InspectLoader):
    """Runs a module from text at hand: Python's own loader would leave bytecode beside it and trust it later."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source


_ALIGN = """
import torch
_call = call
def call(args):
    for i in {numbers}:
        if args[i].data_ptr() % 16:
            given, args[i] = args[i], None
            there = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            args[i] = there.copy_(given)
            del given, there
    return _call(args)
"""
"""Copies inputs that do not lie at 16 bytes, which a GPU's kernels were compiled for."""


def _portable(result: Any) -> Written:
    """``result`` is Inductor's ``CompiledFxGraph``."""
    if result.torchbind_constants or result.opaque_value_type_classes or result.frozen_param_names:
        raise NotPortable("it holds objects that are no tensors")
    call, aligned = result.current_callable, tuple[int, ...]()
    if not hasattr(call, "__func__"):  # torch 2.11 wraps what cannot read misaligned inputs, later ones say it in text
        call, aligned = inspect.getclosurevars(call).nonlocals["model"], tuple(result.inputs_to_check)
    noted = {name: value for name, value in call.__func__.__globals__.items() if isinstance(value, Kernel)}
    symbols = {name: kernel.symbol for name, kernel in noted.items()}
    source = prune(result.source_code, result.constants, symbols)
    if aligned:
        source += _ALIGN.format(numbers=aligned)
    return Written(source, noted, result.constants)


def prune(source: str, constants: Mapping[str, Tensor], symbols: Mapping[str, str]) -> str:
    """``source`` without what ``call`` does not need, and with its C++ kernels taken from a library that has them by
    ``symbols``.

    Raises:
        NotPortable: it needs something that is neither in it nor in ``constants``.
    """
    statements = ast.parse(source).body
    kept = [statement for statement in _needed(statements, "call") if not _bound(statement) & constants.keys()]
    names = {name for statement in kept for name in _bound(statement)}
    missing = {n for s in kept for n in _free(s)} - names - constants.keys() - set(dir(builtins)) - {"async_compile"}
    if missing:
        raise NotPortable(f"it needs {', '.join(sorted(missing))}")
    lines, text = source.splitlines(), []
    for statement in kept:
        if _calls(statement, "async_compile.cpp_pybinding"):
            (name,) = _bound(statement)
            text.append(f"{name} = kernel({symbols[name]!r})")
        elif "extern_kernels" in _bound(statement) and _are_torchs(kept):
            text.append("import torch as extern_kernels")
        elif "async_compile" in _free(statement) and not _calls(statement, "async_compile.triton"):
            raise NotPortable(f"it compiles when it is loaded: {ast.unparse(statement)[:80]}")
        else:
            text += lines[statement.lineno - 1 : statement.end_lineno]
    return "\n".join(text) + "\n"


def _needed(statements: list[ast.stmt], root: str) -> list[ast.stmt]:
    """The statements that bind ``root`` and, in turn, what those use, in order."""
    needed: set[int] = set()
    todo, seen = [root], {root, "async_compile"}
    while todo:
        name = todo.pop()
        for number, statement in enumerate(statements):
            if number not in needed and name in _bound(statement):
                needed.add(number)
                todo += _free(statement) - seen
                seen |= _free(statement)
    return [statement for number, statement in enumerate(statements) if number in needed]


def _bound(statement: ast.stmt) -> set[str]:
    """Names that ``statement`` gives to the module."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def _free(statement: ast.stmt) -> set[str]:
    """Names that ``statement`` takes from the module (or from Python)."""
    nodes = list(ast.walk(statement))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.Assign):
        return loaded
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return loaded - own - {node.arg for node in nodes if isinstance(node, ast.arg)}


def _calls(statement: ast.stmt, function: str) -> bool:
    """``name = function(…)``."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == function


def _are_torchs(statements: list[ast.stmt]) -> bool:
    """Whether each ``extern_kernels.f`` is ``torch.f``: then a module that takes four seconds is not imported."""
    # It is there, because the code was written in this process.
    from torch._inductor.select_algorithm import extern_kernels

    used = set(_attributes(statements, "extern_kernels"))
    return all(getattr(torch, name, None) is getattr(extern_kernels, name) for name in used)


def _attributes(statements: list[ast.stmt], name: str) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
                yield node.attr
