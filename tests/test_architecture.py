"""Who may import whom, how large a file may be, and what is never called: the borders, held by AST.

A new module must be given a place in `BELOW`; a rule that is in the way is changed here, visibly.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"streamengine": ROOT, "compiled": ROOT, "streamengine_sdk": ROOT / "sdk"}
MAX_LINES = 400
MAX_TOTAL_LINES = 36_500

BELOW: dict[str, dict[str, set[str]]] = {
    # cli → server → session → compose → engine → {answer, stream} → choice → {intake, log, text} → tokenizer
    # child → compose → core → {link, scheduler} → kv → request → config → errors
    # engine and core meet in link only.
    "streamengine": {
        "__init__": {"compose"},
        "__main__": {"cli"},
        "cli": {
            "server",
            "guided",
            "bench",
            "chat",
            "doctor",
            "fleet",
            "kernels",
            "options",
            "planner",
            "precompile",
            "replay",
            "scenarios",
            "terminal",
        },
        "bench": {"child", "server"},
        "chat": {"terminal"},
        "doctor": {"compose"},
        "fleet": {"options", "serve_ray"},
        "serve_ray": {"scaling", "server"},
        "scaling": {"errors"},
        "precompile": {"options", "terminal"},
        "scenarios": {"options", "terminal"},
        "kernels": {"options", "terminal"},
        "options": {"sampling"},
        "terminal": {"compose"},
        "server": {"session"},
        "session": {"streams"},
        "streams": {"compose"},
        "child": {"compose"},
        "compose": {"engine", "core"},
        "engine": {"answer", "questions", "stream"},
        "questions": {"bell", "checks", "link"},
        "answer": {"choice", "histogram", "link"},
        "choice": {"intake", "log", "text"},
        "intake": {"generate", "tokenizer"},
        "generate": {"sampling"},
        "stream": {"bell", "log", "sampling"},
        "planner": {"options", "replay", "transfer"},
        "replay": {"assembly", "trace"},
        "core": {"assembly", "link", "profiling", "trace", "transfer"},
        "assembly": {"scheduler"},
        "transfer": {"frames", "landing"},
        "profiling": {"link"},
        "profile": {"errors", "histogram"},
        "scheduler": {"landing", "limits", "pace"},
        "landing": {"books"},
        "books": {"groups", "rows", "waiting"},
        "limits": {"groups"},
        "rows": {"groups"},
        "groups": {"kv"},
        "trace": {"request"},
        "histogram": set(),
        "pace": set(),
        "waiting": {"request"},
        "kv": {"prefix", "request"},
        "prefix": set(),
        "speculation": set(),
        "link": {"frames", "profile", "request"},
        "frames": set(),
        "sampling": {"request"},
        "bell": {"errors"},
        "log": {"request", "timing"},
        "timing": set(),
        "text": {"request"},
        "tokenizer": {"request"},
        "request": {"config", "guided", "prefix", "speculation"},
        "guided": {"calls"},
        "calls": {"checks"},
        "config": {"checks"},
        "checks": {"errors"},
        "errors": set(),
    },
    # runner → {allocation, gpu, stages} → {batch, build, sampler}
    # build → {cold, program} → artifacts → recipe → attention → step
    # cold → {unroll, pieces} → {outline, trace} → {skeleton, split} → model
    "compiled": {
        "__init__": set(),
        "runner": {"allocation", "backends", "gpu", "stages"},
        "stages": {"answers", "logprobs", "profiling", "sampler"},
        "answers": {"batch"},
        "profiling": {"clock", "linear", "program"},
        "clock": set(),
        "counting": {"split"},
        "provision": {"choices", "cold"},
        "gpu": {"answers", "ceilings", "compilations", "logprobs", "profiling", "rehearsal", "sampler", "selfcheck"},
        "allocation": {"build", "choices", "kv_store", "rehearsal"},
        "backends": {"choices", "kv_store", "weights"},
        "choices": {"attention", "parameters"},
        "rehearsal": {"step"},
        "build": {"bars", "cold", "parameters", "program", "selfcheck"},
        "cold": {"counting", "fuse", "move", "parameters", "pieces", "unroll"},
        "move": {"split"},
        "pieces": {"artifacts", "split"},
        "unroll": {"outline", "stopwatch", "trace"},
        "stopwatch": set(),
        "outline": {"skeleton", "split"},
        "trace": {"skeleton"},
        "skeleton": {"model"},
        "device": set(),
        "program": {"inductor", "linear", "recipe"},
        "parameters": {"recipe"},
        "facts": {"recipe", "weights"},
        "probe": {"attention"},
        "batch": {"kv_store", "sampling_batch"},
        "sampler": {"bars", "draw"},
        "bars": {"native"},
        "draw": {"sampling_batch"},
        "sampling_batch": {"philox", "step"},
        "philox": set(),
        "logprobs": {"step"},
        "ceilings": {"clock", "parameters"},
        "kv_store": {"device", "memory", "step"},
        "memory": set(),
        "split": {"recipe"},
        "artifacts": {"inductor", "recipe", "store"},
        "compilations": {"native"},
        "inductor": {"kernels", "linear"},
        "kernels": set(),
        "selfcheck": {"step"},
        "fuse": {"linear", "split"},
        "linear": {"native"},
        "store": set(),
        "recipe": {"attention", "timeline"},
        "timeline": {"work"},
        "work": set(),
        "model": {"facts", "kv_scales", "probe", "rope"},
        "kv_scales": {"parameters", "weights"},
        "rope": set(),
        "attention": {"device", "native", "weights"},
        "native": set(),
        "weights": {"step"},
        "step": set(),
    },
    # sync → client → {connection, request, stream} → protocol → feed → output → errors → events → wire
    "streamengine_sdk": {
        "__init__": {"sync"},
        "testing": {"transport"},
        "sync": {"client"},
        "client": {"connection", "request", "stream"},
        "connection": {"protocol", "transport"},
        "protocol": {"feed"},
        "stream": {"feed"},
        "request": {"output", "settings"},
        "feed": {"output", "settings"},
        "output": {"errors"},
        "transport": {"errors"},
        "settings": {"events"},
        "errors": {"events"},
        "events": {"wire"},
        "wire": {"strict_json"},
        "strict_json": set(),
    },
}
"""Module → what it may import, and with it everything below that."""

IMPORTS_INSIDE_FUNCTIONS = {"compose", "child", "cli", "chat", "doctor", "terminal", "__main__"}
"""Modules of ``streamengine`` where an import may wait until it is needed; elsewhere a comment says why."""

CONTRACT = {"step", "timeline"}
"""Modules of ``compiled`` that whoever schedules, serves or reports may import: values, and the standard library."""

NEVER_IMPORTED = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "sdk"}
NEVER_CALLED = {"eval", "exec", "torch.load"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool
    has_reason: bool


@dataclass(frozen=True)
class Module:
    """``part`` is the name right below the package: ``server`` for ``streamengine/server/http.py``."""

    package: str
    part: str
    path: Path
    tree: ast.Module
    lines: list[str]

    def imports(self) -> Iterator[Import]:
        functions = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # `from compiled import runner` imports a module, `from compiled.runner import Runner` does too.
                base = "." * node.level + (node.module or "")
                names = [f"{base}.{alias.name}" for alias in node.names] if base in PACKAGES else [base]
            else:
                continue
            for name in names:
                yield Import(name, node.lineno, id(node) in inside, self._has_reason(node))

    def _has_reason(self, node: ast.Import | ast.ImportFrom) -> bool:
        """A comment on the import's own lines, or right above the block of imports that it stands in."""
        first = node.lineno - 1
        if any("#" in line for line in self.lines[first : node.end_lineno]):
            return True
        while first > 0 and self.lines[first].lstrip().startswith(("import ", "from ")):
            first -= 1
        return self.lines[first].lstrip().startswith("#")

    def calls(self) -> Iterator[tuple[str, int]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node.lineno


def modules(packages: dict[str, Path]) -> Iterator[Module]:
    for package, root in packages.items():
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            part = path.relative_to(root / package).parts[0].removesuffix(".py")
            yield Module(package, part, path, ast.parse(text), text.splitlines())


def closure(package: str, part: str) -> set[str]:
    reached: set[str] = set()
    todo = [part]
    while todo:
        for below in BELOW[package].get(todo.pop(), set()) - reached:
            reached.add(below)
            todo.append(below)
    return reached


def violations(packages: dict[str, Path]) -> list[str]:
    """One line for everything that breaks a rule, with the place."""
    found: list[str] = []
    for module in modules(packages):
        where = f"{module.path.relative_to(packages[module.package])}"
        if module.part not in BELOW[module.package]:
            found.append(f"{where}: has no place among the layers")
        if len(module.lines) > MAX_LINES:
            found.append(f"{where}: {len(module.lines)} lines, at most {MAX_LINES}")
        for name, line in module.calls():
            if name in NEVER_CALLED:
                found.append(f"{where}:{line}: calls {name}")
        for imported in module.imports():
            found += [f"{where}:{imported.line}: {why}" for why in broken_rules(module, imported)]
    return found


def broken_rules(module: Module, imported: Import) -> Iterator[str]:
    name = imported.module
    root, _, rest = name.partition(".")
    if name.startswith("."):
        yield "a relative import"
        return
    if root in NEVER_IMPORTED:
        yield f"imports {root}"
    if root == "asyncio" and (module.package, module.part) != ("streamengine", "server"):
        yield "asyncio is for streamengine/server alone"
    if root == module.package:
        below = rest.partition(".")[0]
        if below in BELOW[root] and below != module.part and below not in closure(root, module.part):
            yield f"{module.part} may not import {below}"
    else:
        yield from PACKAGE_RULES[module.package](module, imported, root)
    if imported.in_function and not imported.has_reason:
        if module.package != "streamengine" or module.part not in IMPORTS_INSIDE_FUNCTIONS:
            yield f"imports {name} inside a function and does not say why"


def compiled_rules(module: Module, imported: Import, root: str) -> Iterator[str]:
    if root in {"streamengine", "streamengine_sdk", "anyio"}:
        yield f"compiled may not import {root}"
    if module.part in {*CONTRACT, "work", "__init__"} and root not in sys.stdlib_module_names:
        yield f"compiled.{module.part} may import the standard library only, not {root}"


def streamengine_rules(module: Module, imported: Import, root: str) -> Iterator[str]:
    if root in {"torch", "transformers"}:
        yield f"streamengine may not import {root}"
    if root == "compiled" and imported.module.split(".")[1:2] not in ([part] for part in CONTRACT):
        if module.part != "compose" or not imported.in_function:
            yield f"{imported.module} is for functions of compose alone"
    if root == "streamengine_sdk":
        part = imported.module.split(".")[1:2]
        if module.part not in {"session", "server"} or part not in (["wire"], ["strict_json"]):
            yield f"{imported.module}: only streamengine_sdk.wire and strict_json, only in session and server"
    if root in {"tokenizers", "jinja2"} and module.part != "tokenizer":
        yield f"{root} is for tokenizer alone"


def sdk_rules(module: Module, imported: Import, root: str) -> Iterator[str]:
    if root in {"streamengine", "compiled", "torch"}:
        yield f"the SDK may not import {root}"


PACKAGE_RULES = {"compiled": compiled_rules, "streamengine": streamengine_rules, "streamengine_sdk": sdk_rules}


def test_every_module_keeps_to_its_imports_its_size_and_the_banned_calls() -> None:
    assert violations(PACKAGES) == []


def test_the_three_packages_stay_small_enough_to_read() -> None:
    assert sum(len(module.lines) for module in modules(PACKAGES)) < MAX_TOTAL_LINES


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_names_no_module_that_is_gone(package: str) -> None:
    there = {module.part for module in modules({package: PACKAGES[package]})}
    named = BELOW[package].keys() | set().union(*BELOW[package].values())
    assert named - there == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_need_each_other(package: str) -> None:
    circular = [part for part in BELOW[package] if part in closure(package, part)]
    assert circular == []


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_no_torch(package: str) -> None:
    """Every module of it for ``streamengine`` and the SDK; of ``compiled`` the package and the contract."""
    script = f"""
import importlib, pkgutil, sys
import {package}
if {package != "compiled"}:
    for found in pkgutil.walk_packages({package}.__path__, "{package}."):
        if not found.name.endswith(("__main__", "serve_ray")):  # this one needs an extra
            importlib.import_module(found.name)
else:
    import compiled.step
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "transformers"}}))
"""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}", "PATH": "/usr/bin:/bin"}
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert (answer.stdout, answer.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("project", "packages"), [(ROOT, ["streamengine", "compiled"]), (ROOT / "sdk", ["streamengine_sdk"])]
)
def test_every_library_that_is_imported_is_a_declared_dependency(project: Path, packages: list[str]) -> None:
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = {name: wishes for name, wishes in declared.get("optional-dependencies", {}).items() if name != "dev"}
    groups = [declared["dependencies"], *extras.values()]
    names = {canonical(re.split(r"[^A-Za-z0-9._-]", wish)[0]) for group in groups for wish in group}
    roots = {
        imported.module.partition(".")[0]
        for module in modules({package: PACKAGES[package] for package in packages})
        for imported in module.imports()
    }
    # What only machines with a GPU have installed cannot say here who brings it.
    providers = {"flashinfer": ["flashinfer-python"], "triton": ["torch"]} | dict(metadata.packages_distributions())
    undeclared = {
        root
        for root in roots - sys.stdlib_module_names - PACKAGES.keys()
        if not names & {canonical(name) for name in providers.get(root, [root])}
    }
    assert undeclared == set()


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("compiled/runner.py", "import anyio", "compiled may not import anyio"),
        ("compiled/runner.py", "from streamengine.errors import StreamEngineError", "may not import streamengine"),
        ("compiled/step.py", "import torch", "standard library only"),
        ("compiled/step.py", "from compiled.runner import ModelRunner", "step may not import runner"),
        ("compiled/step.py", "from compiled import runner", "step may not import runner"),
        ("compiled/weights.py", "import pickle", "imports pickle"),
        ("compiled/weights.py", "import torch\ntorch.load('x')", "calls torch.load"),
        ("compiled/surprise.py", "", "no place among the layers"),
        ("streamengine/errors.py", "from streamengine.config import EngineConfig", "errors may not import config"),
        ("streamengine/engine.py", "from streamengine import core", "engine may not import core"),
        ("streamengine/core.py", "from streamengine.engine import Engine", "core may not import engine"),
        ("streamengine/engine.py", "import asyncio", "asyncio is for"),
        ("streamengine/engine.py", "if True:\n    import torch", "streamengine may not import torch"),
        ("streamengine/compose.py", "from compiled.runner import ModelRunner", "functions of compose alone"),
        ("streamengine/core.py", "def f():\n    import compiled.runner", "functions of compose alone"),
        ("streamengine/engine.py", "import streamengine_sdk.wire", "only in session and server"),
        ("streamengine/session.py", "from streamengine_sdk import client", "only streamengine_sdk.wire"),
        ("streamengine/engine.py", "def f():\n    import json", "inside a function"),
        ("streamengine/engine.py", "def f():\n    # a reason\n    x = 1\n    import json", "inside a function"),
        ("streamengine/engine.py", "from . import link", "relative"),
        ("streamengine/engine.py", "import jinja2", "tokenizer alone"),
        ("streamengine/text.py", "exec('1')", "calls exec"),
        ("streamengine/text.py", "\n" * 401, "401 lines"),
        ("streamengine_sdk/client.py", "from streamengine.errors import StreamEngineError", "SDK may not import"),
        ("streamengine_sdk/client.py", "async def f():\n    import asyncio", "asyncio is for"),
    ],
)
def test_a_broken_rule_is_reported(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in check_tree(tmp_path, {path: source}))


def test_what_the_rules_allow_is_not_reported(tmp_path: Path) -> None:
    tree = {
        "compiled/runner.py": "import torch\nfrom compiled.attention.base import Attention\nmodel.eval()",
        "compiled/weights.py": "def read():\n    import gguf  # slow to import, and few checkpoints need it",
        "compiled/model.py": "def load():\n    # slow, and seldom needed\n    import gguf\n    import safetensors",
        "streamengine/compose.py": "def build():\n    from compiled.runner import ModelRunner",
        "streamengine/core.py": "from compiled.step import Step\nfrom streamengine.errors import EngineFailure",
        "streamengine/server/run.py": "import asyncio\nfrom streamengine_sdk import wire\nimport streamengine.log",
        "streamengine/session.py": "from streamengine_sdk import wire",
    }
    assert check_tree(tmp_path, tree) == []


def check_tree(root: Path, files: dict[str, str]) -> list[str]:
    for path, source in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source)
    return violations(dict.fromkeys(PACKAGES, root))
