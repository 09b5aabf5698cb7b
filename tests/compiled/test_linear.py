"""A linear layer on packed weights against torch's, and the bits of one row among others."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compiled.linear import op
from compiled.linear.op import load_kernel, pack, packed_rows, packed_shape

SIZES = [(1, 1), (33, 7), (100, 65), (32, 2), (64, 576), (960, 64), (40, 5000)]
"""(N, K): whole panels and parts of one, odd K, K in one block and in several."""

linear = torch.ops.streamengine.linear


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    """``make asan`` has it built with other flags."""
    flags = os.environ.get("KERNEL_FLAGS")
    load_kernel(flags=tuple(flags.split())) if flags else load_kernel()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def normal(dtype: torch.dtype) -> Callable[..., Tensor]:
    random = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=random).to(dtype)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_exact_but_for_rounding(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Against float64; float32 sums of products have an error that grows with the length of the sum."""
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = functional.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    rounding = 2**-8 * exact.abs() if x.dtype == torch.bfloat16 else 0
    assert result.dtype == x.dtype
    assert result.shape == exact.shape
    assert (result.double() - exact).abs().le(rounding + 2**-20 * size).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 14, 15, 33, 300])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_it_is_torchs_linear(outputs: int, inputs: int, rows: int, normal: Callable[..., Tensor]) -> None:
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs), normal(outputs)
    packed = pack(weight)
    assert_exact_but_for_rounding(linear(x, packed, None, outputs), x, weight)
    assert_exact_but_for_rounding(linear(x, packed, bias, outputs), x, weight, bias)


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (33, 65), (64, 5000)])
def test_a_row_alone_has_the_same_bits_as_among_others(
    outputs: int, inputs: int, normal: Callable[..., Tensor]
) -> None:
    x, packed = normal(600, inputs), pack(normal(outputs, inputs))
    alone = [linear(x[row : row + 1], packed, None, outputs) for row in range(600)]
    for rows in (2, 7, 32, 100, 600):
        assert torch.equal(linear(x[:rows], packed, None, outputs), torch.cat(alone[:rows]))


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_the_number_of_threads_changes_no_bit(
    rows: int, normal: Callable[..., Tensor], threads: Callable[[int], None]
) -> None:
    x, packed, bias = normal(rows, 576), pack(normal(1000, 576)), normal(1000)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(linear(x, packed, bias, 1000))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_x_may_lie_in_any_way(normal: Callable[..., Tensor]) -> None:
    for inputs in (64, 7):
        weight = normal(50, inputs)
        packed = pack(weight)
        ways = {
            "leading dimensions": normal(2, 3, inputs),
            "one row without any": normal(inputs),
            "part of wider rows": normal(4, 3 * inputs)[:, inputs : 2 * inputs],
            "every other row": normal(8, inputs)[::2],
            "transposed": normal(inputs, 4).t(),
            "permuted": normal(3, 2, inputs).transpose(0, 1),
            "one row for all": normal(1, inputs).expand(5, inputs),
        }
        for way, x in ways.items():
            assert torch.equal(linear(x, packed, None, 50), linear(x.contiguous(), packed, None, 50)), way


def test_nothing_beside_a_row_is_read(normal: Callable[..., Tensor]) -> None:
    wide, weight = normal(6, 10), normal(8, 7)
    wide[:, 7:] = torch.nan
    assert_exact_but_for_rounding(linear(wide[:, :7], pack(weight), None, 8), wide[:, :7], weight)


def test_nan_and_infinity_stay_in_their_rows(normal: Callable[..., Tensor]) -> None:
    x, packed = normal(20, 64), pack(normal(40, 64))
    clean = linear(x, packed, None, 40)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    spoilt = linear(x, packed, None, 40)
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[[3, 17]].isfinite().any()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_of_the_packed_weight_are_those_of_the_plain_one(
    outputs: int, inputs: int, normal: Callable[..., Tensor]
) -> None:
    weight = normal(outputs, inputs)
    packed, rows = pack(weight), torch.arange(outputs).view(1, -1)
    assert packed.shape == packed_shape(outputs, inputs, weight.dtype)
    assert packed.numel() <= (outputs + 31) * (inputs + 1)
    assert torch.equal(packed_rows(packed, rows, inputs), functional.embedding(rows, weight))


def test_it_compiles_for_any_number_of_rows(normal: Callable[..., Tensor]) -> None:
    packed, bias = pack(normal(50, 64)), normal(50)

    @torch.compile(fullgraph=True, dynamic=True)
    def compiled(x: Tensor) -> Tensor:
        return linear(x * 2, packed, bias, 50).relu()

    for rows in (2, 5, 40):
        x = normal(rows, 64)
        assert torch.equal(compiled(x), linear(x * 2, packed, bias, 50).relu())


def test_its_schema_and_its_shapes_are_as_declared(normal: Callable[..., Tensor]) -> None:
    for x in (normal(3, 64), normal(1, 5, 64)):
        torch.library.opcheck(linear.default, (x, pack(normal(50, 64)), normal(50), 50))


@pytest.mark.parametrize("bias", [False, True])
def test_what_pieces_call_gives_the_operators_results(bias: bool, normal: Callable[..., Tensor]) -> None:
    wide = normal(70, 65)
    layouts = [normal(1, 64), normal(2, 3, 64), normal(64), normal(0, 64), wide[:, :64], wide[:64, :5].T, normal(4, 33)]
    for x in (*layouts, *(normal(*(1,) * dims, 64) for dims in (7, 8, 9))):
        for outputs in (1, 32, 50):
            packed, added = pack(normal(outputs, x.shape[-1])), normal(outputs) if bias else None
            result, expected = op.linear(x, packed, added, outputs), linear(x, packed, added, outputs)
            assert torch.equal(result, expected)
            assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)


@pytest.mark.parametrize("call", [linear, lambda *operands: op.linear(*operands)], ids=["operator", "function"])
def test_what_does_not_fit_is_refused(
    call: Callable[..., Tensor], normal: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    x, weight, bias = normal(3, 64), normal(50, 64), normal(50)
    packed = pack(weight)
    for operands, reason in [
        ((x.double(), packed, None, 50), "neither float32 nor bfloat16"),
        ((x.to({torch.float32: torch.bfloat16}.get(dtype, torch.float32)), packed, None, 50), "differ in dtype"),
        ((x, weight, None, 50), "not packed for 50 outputs of 64 inputs"),
        ((x, packed, None, 65), "not packed for 65 outputs"),
        ((x[:, :60], packed, None, 50), "of 60 inputs"),
        ((x, packed, bias[:49], 50), "bias does not fit"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            call(*operands)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-O2 -march=x86-64", "-O2 -march=x86-64-v3", "-O2 -march=x86-64-v4"])
@pytest.mark.skipif("KERNEL_FLAGS" in os.environ, reason="this is the process of other flags")
def test_the_kernel_for_smaller_cpus_passes_too(flags: str) -> None:
    """In a process of its own, because the operator has one kernel in a process."""
    these = "torchs_linear or the_same_bits or any_way or beside or stay_in_their_rows"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__, "-k", these]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "KERNEL_FLAGS": flags}
    )
    assert done.returncode == 0, done.stdout
