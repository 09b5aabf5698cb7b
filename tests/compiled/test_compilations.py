"""What is compiled is noticed, whoever compiles it."""

import sys
from types import SimpleNamespace

import pytest

from compiled import native
from compiled.compilations import Watch


def test_a_library_that_is_built_and_a_kernel_that_triton_compiles_are_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilation = SimpleNamespace(listener=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=compilation)))
    watch = Watch()
    assert watch.look() == []
    native.built.append("kernel-1.so")
    compilation.listener(src=SimpleNamespace(name="write"), metadata={}, cache_hit=False)
    assert watch.look() == ["kernel-1.so was built", "Triton compiled write"]
    assert watch.look() == []
    again = Watch()
    compilation.listener(src=SimpleNamespace(name="write"), metadata={}, cache_hit=True)
    assert again.look() == watch.look() == ["Triton compiled write"]
    native.built.remove("kernel-1.so")
