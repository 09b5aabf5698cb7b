"""`streamengine kernels`: FlashInfer's modules for a GPU, built where there is none, for the image of a machine."""

from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.options import ENGINE, takes
from streamengine.terminal import StartupProgress

app = typer.Typer(name="kernels", help="Attention kernels for a GPU: build ahead, list.", no_args_is_help=True)

DECISIVE = ("model", "dtype", "kv_dtype", "max_model_len", "offline")
MODEL = replace(ENGINE, help={name: ENGINE.help[name] for name in DECISIVE})
"""Only what decides which kernels there must be."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@takes(MODEL)
def build(
    config: EngineConfig,
    *,
    arch: Annotated[str, typer.Option("--arch", help="Compute capability, 9.0a for an H100 or H200; or several.")],
    out: Annotated[str | None, typer.Option("--out", help="By default where the installed FlashInfer looks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile what a model's attention needs, in minutes, without a GPU: nvcc and ninja do. Weights are not needed."""
    with StartupProgress() as progress:
        built = compose.build_kernels(config, arch, out, progress)
    if as_json:
        typer.echo(msgspec.json.encode({"model": config.model, "arch": arch, "modules": built}).decode())
        return
    for module in built:
        done = f"in {module['seconds']:.0f} s" if module["seconds"] else "before"
        typer.echo(f"{module['library']} was built {done}")
    if out is not None:
        typer.echo("The folder belongs, as it is, into flashinfer/data/aot of the machine with the GPU.", err=True)


@app.command("ls")
@takes(MODEL)
def list_needed(config: EngineConfig, *, as_json: AsJson = False) -> None:
    """The modules that a model needs: where each one is, or what a start would do about it."""
    found = compose.look_for_kernels(config)
    if as_json:
        typer.echo(msgspec.json.encode({"model": config.model, "modules": found}).decode())
        return
    for module in found:
        typer.echo(f"{module['name']}  {module['library'] or 'missing: ' + module['at_start']}")
