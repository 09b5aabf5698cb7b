"""One tiny piece, compiled for real, and a recipe that runs it: what the tests of the cache keep and find again."""

import sys
from pathlib import Path

import torch
from torch import Tensor, fx

from compiled import inductor
from compiled.artifacts import Cache, Loaded
from compiled.attention.base import AttentionSpec
from compiled.recipe import Attention, Constant, Fed, Held, ModelFacts, Parameter, Recipe, Run

CONFIG = {"model_type": "llama", "hidden_size": 8, "rope": {"theta": 10000.0}, "_name_or_path": "here"}
KEY = "0123456789abcdef"


def compute(rows: int, x: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor, int]:
    made = torch.nn.functional.silu(x @ weight.t()) * 2 + table
    return made, made.view(rows, 2, -1).transpose(0, 1), rows


def arguments(rows: int = 5) -> list[object]:
    torch.manual_seed(0)
    return [rows, torch.randn(rows, 8), torch.randn(8, 8), torch.arange(8.0)]


def generate(folder: Path) -> inductor.Generated:
    # Only who compiles imports the compiler: a process that loads must do without.
    import torch._dynamo
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    rows = shapes.create_symintnode(
        shapes.create_symbol(5, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC), hint=5
    )
    graph = fx.Graph()
    names = [graph.placeholder(name) for name in ("rows", "x", "weight", "table")]
    with mode:
        values = [rows, torch.empty(rows, 8), torch.empty(8, 8), torch.empty(8)]
    for node, value in zip(names, values, strict=True):
        node.meta["example_value"] = value
    made = graph.call_function(torch.ops.aten.linear.default, (names[1], names[2]))
    made = graph.call_function(torch.nn.functional.silu, (made,))
    made = graph.call_function(torch.ops.aten.mul.Tensor, (made, 2))
    made = graph.call_function(torch.ops.aten.add.Tensor, (made, names[3]))
    view = graph.call_method("view", (made, names[0], 2, -1))
    graph.output((made, graph.call_method("transpose", (view, 0, 1)), names[0]))
    return inductor.generate(fx.GraphModule({}, graph), values, folder)


RECIPE = Recipe(
    calls=(Run("layers.0: norm+qkv", KEY, ("ids", "w", "c"), ("y",)), Attention(0, "y", "y", "y", "o", "s")),
    sources={"ids": Fed("ids"), "w": Parameter(("q.weight", "k.weight"), packed=True), "c": Constant(0)},
    constants=(torch.arange(8.0),),
    held={"q.weight": Held((4, 8), "float32", ("tied",)), "k.weight": Held((4, 8), "float32")},
    output="o",
    model=ModelFacts(
        "LlamaForCausalLM", 97, None, (2,), (AttentionSpec(4, 2, 16, 0.3, window=7),), {"weights_bytes": 8.0}, True
    ),
)


def open_cache(folder: Path, threads: int = 1) -> Cache:
    return Cache(folder, threads)


def fill(cache: Cache, made: inductor.Generated) -> None:
    cache.save("tiny", cache.factors(CONFIG, dtype="float32"), RECIPE, {KEY: made}, selfcheck=0.5)


def find(cache: Cache, **changes: object) -> Loaded | None:
    return cache.load("tiny", cache.factors(CONFIG, **{"dtype": "float32", **changes}))


def main() -> None:
    """``find FOLDER`` or ``fill FOLDER``: what is found in the cache, which is filled before."""
    cache = open_cache(Path(sys.argv[2]))
    if sys.argv[1] == "fill":
        fill(cache, generate(cache.workshop))
    loaded = find(cache)
    assert loaded is not None
    made, view, rows = loaded.pieces[KEY](arguments())
    heavy = sorted({".".join(name.split(".")[:2]) for name in sys.modules} & {"torch._dynamo", "torch._inductor"})
    sys.stdout.write(f"{made.numpy().tobytes().hex()} {tuple(view.shape)} {rows} {heavy}\n")


if __name__ == "__main__":
    main()
