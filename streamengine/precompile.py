"""`streamengine compile` and `streamengine cache`: what is compiled ahead of a start, and what was."""

import time
from typing import Annotated

import msgspec
import typer

from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.options import ENGINE, takes
from streamengine.terminal import StartupProgress

app = typer.Typer(name="cache", help="Compiled models on this disk: list, explain, clear.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@takes(ENGINE)
def compile_model(config: EngineConfig, *, as_json: AsJson = False) -> None:
    """Compile a model ahead of its first start, for an image. Its folder needs a config.json, and no weights."""
    started = time.perf_counter()
    with StartupProgress() as progress:
        compiled = compose.compile_model(config, progress)
    seconds = time.perf_counter() - started
    if as_json:
        told = {"model": config.model, "compiled": compiled, "seconds": seconds, "folder": compose.cache_place()}
        typer.echo(msgspec.json.encode(told).decode())
    else:
        done = f"was compiled in {seconds:.1f} s" if compiled else "had been compiled before"
        typer.echo(f"{config.model} {done}; see {compose.cache_place()}")


@app.command("ls")
def list_entries(as_json: AsJson = False) -> None:
    """Entries, the last used first: kind, size, days since the last use, model, and what it is."""
    entries = compose.list_cache()
    if as_json:
        typer.echo(msgspec.json.encode({"folder": compose.cache_place(), "entries": entries}).decode())
        return
    for entry in entries:
        days = (time.time() - entry["used"]) / 86400
        size = f"{entry['size_bytes'] / 1024:,.0f} KiB"
        typer.echo(f"{entry['kind']:<7} {size:>11} {days:5.0f} d  {entry['model']}  {entry['what']}")
    total = sum(entry["size_bytes"] for entry in entries)
    typer.echo(f"{len(entries)} entries, {total / 2**20:,.1f} MiB in {compose.cache_place()}", err=True)


@app.command()
@takes(ENGINE)
def explain(config: EngineConfig, *, as_json: AsJson = False) -> None:
    """Whether a start with these options would find the model compiled, and if not, which factor differs."""
    reason = compose.explain_cache(config)
    if as_json:
        typer.echo(msgspec.json.encode({"model": config.model, "hit": reason is None, "reason": reason}).decode())
    else:
        typer.echo(f"{config.model} is compiled" if reason is None else f"{config.model} would be compiled: {reason}")


@app.command()
def clear() -> None:
    """Remove every compiled model. The next start of each compiles it again."""
    typer.echo(f"{compose.clear_cache() / 2**20:,.1f} MiB removed from {compose.cache_place()}")
