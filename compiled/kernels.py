"""The C++ kernels that Inductor writes for all pieces of a model → one shared library, compiled once.

Inductor compiles each kernel by itself, and nine tenths of that time go into torch's vector headers, again and
again: eleven kernels took fourteen seconds, and their precompiled header nine more. Together they take as long
as one. The flags are Inductor's own.
"""

import hashlib
import importlib.machinery
import importlib.util
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

MODULE = "kernels"


@dataclass(frozen=True)
class Kernel:
    """A C++ function ``kernel`` as Inductor writes it: the types of its arguments, and its source."""

    arguments: tuple[str, ...]
    source: str

    @property
    def symbol(self) -> str:
        """Its name in a library: equal kernels have one."""
        return f"k{hashlib.sha256(repr((self.arguments, self.source)).encode()).hexdigest()[:16]}"


class NotCompiled(Exception):
    """The compiler refuses. One line says what it says."""


def build(kernels: Mapping[str, Kernel], folder: Path) -> Path:
    """A library in ``folder`` with ``kernels``, which are its functions by their symbols. Raises NotCompiled."""
    # Compiling imports seconds' worth of modules that a warm start does without.
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    text = _text(kernels)
    source = folder / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    source.write_text(text, encoding="utf-8")
    flags = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False)
    builder = CppBuilder(source.stem, str(source), flags, str(folder))
    try:
        builder.build()
    except Exception as error:  # torch's own kinds, with all that the compiler printed
        lines = [line for line in str(error).splitlines() if "error" in line] or [str(error)]
        raise NotCompiled(lines[0]) from error
    return Path(builder.get_target_file_path())


def load(path: Path) -> ModuleType:
    """The library at ``path``. Raises ImportError where it does not load here."""
    loader = importlib.machinery.ExtensionFileLoader(f"{path.stem}.{MODULE}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    # How a kernel finds a tensor's data, because it is compiled without torch's own headers.
    module.use(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)
    return module


def believes_flags(isa: object, _: str) -> bool:
    """In place of Inductor's test of a vector extension, which compiles and loads a program: the CPU has been asked
    already, and whether the compiler knows the flags it says at once."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # as above

    flags = isa.build_arch_flags().split()  # type: ignore[attr-defined]
    command = [get_cpp_compiler(), *flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _text(kernels: Mapping[str, Kernel]) -> str:
    includes: dict[str, None] = {"#define PY_SSIZE_T_CLEAN": None, "#include <Python.h>": None}
    bodies, calls, methods = [], [], []
    for symbol, kernel in kernels.items():
        lines = kernel.source.splitlines()
        includes |= {line.strip(): None for line in lines if line.strip().startswith("#include")}
        body = "\n".join(line for line in lines if not line.strip().startswith("#include"))
        # Each has its own name, and helpers of its own.
        bodies.append(f"#define kernel {symbol}\nnamespace in_{symbol} {{\n{body}\n}}\n#undef kernel\n")
        types = (kind.replace("const ", "") for kind in kernel.arguments)
        arguments = ", ".join(f"argument<{kind}>(given[{number}])" for number, kind in enumerate(types))
        call = f"in_{symbol}::{symbol}({arguments})"
        calls.append(f"CALL(call_{symbol}, {len(kernel.arguments)}, ({call}))")
        methods.append(f'{{"{symbol}", (PyCFunction)(void*)call_{symbol}, METH_FASTCALL, nullptr}},')
    return _TEMPLATE.format(
        includes="\n".join(includes),
        bodies="\n".join(bodies),
        calls="\n".join(calls),
        methods="\n    ".join(methods),
        module=MODULE,
    )


_TEMPLATE = """{includes}

{bodies}
static void* (*data_of)(PyObject*) = nullptr;

template <typename T>
static T argument(PyObject* given) {{
    if constexpr (std::is_pointer_v<T>) {{
        return static_cast<T>(data_of(given));
    }} else if constexpr (std::is_floating_point_v<T>) {{
        return static_cast<T>(PyFloat_AsDouble(given));
    }} else {{
        return static_cast<T>(PyLong_AsSsize_t(given));
    }}
}}

#define CALL(name, count, call) \\
    static PyObject* name(PyObject*, PyObject* const* given, Py_ssize_t size) {{ \\
        if (size != count) return PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", count, size); \\
        try {{ \\
            call; \\
        }} catch (const std::exception& error) {{ \\
            return PyErr_Format(PyExc_RuntimeError, "%s", error.what()); \\
        }} \\
        if (PyErr_Occurred()) return nullptr; \\
        Py_RETURN_NONE; \\
    }}

{calls}

static PyObject* use(PyObject*, PyObject* address) {{
    data_of = reinterpret_cast<void* (*)(PyObject*)>(PyLong_AsVoidPtr(address));
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}}

static PyMethodDef methods[] = {{
    {{"use", use, METH_O, nullptr}},
    {methods}
    {{nullptr, nullptr, 0, nullptr}},
}};

static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, -1, methods}};

PyMODINIT_FUNC PyInit_{module}() {{
    return PyModule_Create(&definition);
}}
"""
