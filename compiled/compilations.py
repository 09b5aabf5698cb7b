"""What this process has compiled, so that a compile while requests wait is seen instead of felt.

A served step calls functions that are there already, so none of this ever runs then; where torch's compiler was
never imported there is not even anything to ask. Looking costs a microsecond and installs nothing in torch. Triton
tells a listener, where it is there: it compiles a kernel again for other strides or another alignment.
"""

import sys
from typing import Any

from compiled import native

_TIMED = {
    "_compile.compile_inner": "Dynamo traced",
    "compile_fx_inner": "Inductor compiled a graph",
    "compile_file": "Inductor ran the C++ compiler",
}
"""Keys of the table in which torch keeps the seconds of each such event."""


_by_triton: list[str] = []


class Watch:
    """Everything that is compiled in this process, in whichever thread, from its making on."""

    def __init__(self) -> None:
        _listen()
        self._seen = _counts()

    def look(self) -> list[str]:
        """What was compiled since the last look: a line each."""
        now = _counts()
        if now == self._seen:
            return []
        before, self._seen = self._seen, now
        lines = [
            f"{what}, {seconds:.1f} s"
            for (key, what), seen in zip(_TIMED.items(), before, strict=False)
            for seconds in _seconds(key)[seen if seen <= len(_seconds(key)) else 0 :]  # torch can be reset
        ]
        lines = _with_name(lines) + [f"{name} was built" for name in native.built[before[-2] :]]
        return lines + [f"Triton compiled {name}" for name in _by_triton[before[-1] :]]


def _counts() -> list[int]:
    return [*(len(_seconds(key)) for key in _TIMED), len(native.built), len(_by_triton)]


def _listen() -> None:
    compilation: Any = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
    if compilation is not None and compilation.listener is not _note:
        compilation.listener = _note


def _note(*, src: Any, **_: Any) -> None:
    _by_triton.append(str(getattr(src, "name", src)))


def _seconds(key: str) -> list[float]:
    table: dict[str, list[float]] = getattr(_dynamo(), "compilation_time_metrics", {})
    return table.get(key, [])


def _with_name(lines: list[str]) -> list[str]:
    """Dynamo notes which function it traced last."""
    noted: Any = getattr(_dynamo(), "get_compilation_metrics", list)()
    if lines and noted and lines[0].startswith(_TIMED["_compile.compile_inner"]):
        last = noted[-1]
        lines[0] += f": {last.co_name} of {last.co_filename}:{last.co_firstlineno}"
    return lines


def _dynamo() -> Any:
    return sys.modules.get("torch._dynamo.utils")
