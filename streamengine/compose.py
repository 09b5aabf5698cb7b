"""The composition root: the only place that builds a runner, a tokenizer and an engine from a config."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.to_thread

from compiled.step import LoadError, Runner
from streamengine.config import DEFAULT_MODEL, EngineConfig
from streamengine.engine import Engine
from streamengine.errors import StartupError
from streamengine.link import CoreLink, FrontLink, Progress, link_pair
from streamengine.profile.hardware import usable_cores
from streamengine.tokenizer import load_tokenizer

OBITUARY_S = 1.0
"""How long to wait for the exit status of a core whose link is closed."""

GOODBYE_S = 10.0
"""How long a core that was told to stop may take before it is killed (or, in a thread, left behind)."""


def open_engine(
    config: EngineConfig | None = None,
    *,
    process: bool = True,
    restart: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> AbstractAsyncContextManager[Engine]:
    """An engine that is ready when the ``async with`` block begins and gone when it ends.

    Args:
        config: what to serve and how; the default model as it is.
        process: run the core in a process of its own. False runs it in a thread of this one, for
            tests, notebooks and profiling; whatever else this process does then slows it.
        restart: start a new core when one dies, instead of failing for good. What was running on the
            dead one ends in `EngineFailure` either way.
        progress: is called with each start-up message, from the event loop.

    Raises:
        StartupError: the model is unknown, broken or of an unsupported kind, or does not fit; or pages are to move
            within this process, and the core would not be in it.

    Example::

        async with open_engine(EngineConfig(model="smollm2-135m")) as engine:
            async for delta in engine.stream(prompt="The capital of France is"):
                print(delta.text, end="", flush=True)
    """
    config = config or EngineConfig()
    if process and config.transfer is not None and config.transfer.kv_transport == "in_process":
        raise StartupError(
            "kv_transport in_process is for cores that are threads of one process, and this one would have a process "
            "of its own: open_engine(process=False) is without, and shared_memory moves pages between processes",
            param="kv_transport",
        )
    connect = core_process if process else core_thread
    return Engine(config, connect, load_tokenizer, restart=restart, progress=progress)


def build_runner(config: EngineConfig, report: Callable[[Progress], None]) -> Runner:
    """The runner that ``config`` describes. Imports torch, so it is called where the core runs.

    Raises:
        LoadError, StartupError: why the model cannot be served, in one line.
    """
    began = time.perf_counter()
    from compiled.runner import build_runner as build

    imported = time.perf_counter() - began
    # Read here once, though only the front uses it: a broken one is to be known before anything is compiled.
    runner = build(_runner_options(config), _report(report), check=load_tokenizer)
    runner.note(import_seconds=imported)
    return runner


def model_folder(config: EngineConfig, report: Callable[[Progress], None]) -> str:
    """The folder of the model that ``config`` names, converted or downloaded if need be. Raises StartupError."""
    from compiled.weights import resolve

    with _startup_errors():
        return str(resolve(config.model, offline=config.offline, report=_report(report)))


def _runner_options(config: EngineConfig) -> Any:
    from compiled.runner import RunnerOptions

    names = RunnerOptions.__dataclass_fields__.keys() - {"threads", "graphs", "shared_kv"}
    shared = {name: getattr(config, name) for name in names}
    shared_kv = config.transfer is not None and config.transfer.kv_transport == "shared_memory"
    return RunnerOptions(threads=config.threads or default_threads(), shared_kv=shared_kv, **shared)


def _report(report: Callable[[Progress], None]) -> Callable[[str, float, float], None]:
    return lambda phase, done, total: report(Progress(phase, done, total))


def compile_model(config: EngineConfig, report: Callable[[Progress], None]) -> bool:
    """Do what a first start with ``config`` compiles; False where it is done already. See `compiled.runner.precompile`.

    Raises:
        StartupError: why the model cannot be served, in one line.
    """
    from compiled.runner import precompile

    with _startup_errors():
        return precompile(_runner_options(config), _report(report))


def explain_cache(config: EngineConfig) -> str | None:
    """Why a start with ``config`` would compile; None if it would not. Raises StartupError."""
    from compiled.runner import explain

    with _startup_errors():
        return explain(_runner_options(config), lambda *_: None)


def list_cache() -> list[dict[str, Any]]:
    """What was compiled, the last used first. Imports no torch."""
    return [entry.told() for entry in _cache_store().entries()]


def clear_cache() -> int:
    """Remove what was compiled; how many bytes that were."""
    return int(_cache_store().clear())


def cache_place() -> str:
    """The folder in which compiled models are kept."""
    return str(_cache_store().folder)


def build_kernels(config: EngineConfig, arch: str, out: str | None, progress: Callable[[Progress], None]) -> Any:
    """See `compiled.provision.build`. Raises StartupError."""
    from compiled.provision import build

    with _startup_errors():
        return build(_runner_options(config), arch, out, _report(progress))


def look_for_kernels(config: EngineConfig) -> Any:
    """See `compiled.provision.look`. Raises StartupError."""
    from compiled.provision import look

    with _startup_errors():
        return look(_runner_options(config), lambda *_: None)


def _cache_store() -> Any:
    from compiled.store import Store
    from compiled.weights import cache_folder

    return Store(cache_folder() / "compiled")


@contextmanager
def _startup_errors() -> Iterator[None]:
    try:
        yield
    except LoadError as error:
        raise StartupError(str(error)) from error


def default_threads() -> int:
    """``OMP_NUM_THREADS``, or all usable cores but one, which is the event loop's and its clients': threads that spin
    at a barrier while somebody else holds the core they wait for are slow. Of two cores both: half of the machine is
    more than what the waiting costs (profiles/LOG.md)."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked):
        return int(asked)
    return max(usable_cores() - 1, min(usable_cores(), 2))


@asynccontextmanager
async def core_process(entry: str = "streamengine.child") -> AsyncIterator[FrontLink]:
    """A core in a fresh interpreter that inherits one socket and nothing else; ``entry`` is its main module."""
    front, core = link_pair()
    with core:
        process = await anyio.open_process(
            [sys.executable, "-m", entry, str(core.fileno())],
            pass_fds=(core.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the front's answers
            stderr=None,
            # Signals of the terminal and of process managers are for the front: it drains, then stops the core.
            start_new_session=True,
        )
    link = await FrontLink.open(front)

    async def obituary() -> str:
        with anyio.move_on_after(OBITUARY_S):
            status = await process.wait()
            return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return "it closed its link"

    link.obituary = obituary
    try:
        yield link
    finally:
        with anyio.CancelScope(shield=True):
            await link.aclose()
            with anyio.move_on_after(GOODBYE_S):
                await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it has started
            await process.aclose()


@asynccontextmanager
async def core_thread() -> AsyncIterator[FrontLink]:
    """A core in a thread of this process. One thread for its whole life: torch's state belongs to threads."""
    front, core = link_pair()
    thread = threading.Thread(target=_run_in_thread, args=(core,), name="streamengine-core", daemon=True)
    thread.start()
    link = await FrontLink.open(front)
    try:
        yield link
    finally:
        with anyio.CancelScope(shield=True):
            await link.aclose()
            await anyio.to_thread.run_sync(thread.join, GOODBYE_S)


def _run_in_thread(core: socket.socket) -> None:
    from streamengine.core import run_core

    link = CoreLink(core)
    try:
        run_core(link, build_runner)
    finally:
        link.close()


def describe_gpu() -> dict[str, Any]:
    """See `compiled.provision.describe_gpu`. Imports torch."""
    from compiled.provision import describe_gpu as describe

    return describe()


def describe_machine() -> dict[str, Any]:
    """What an engine with the default config would find and choose here. Imports torch."""
    from compiled.allocation import free_for_pages
    from compiled.choices import pick_attention, pick_device, pick_dtype
    from compiled.weights import bundled_file, cache_folder

    try:
        model, hint = str(bundled_file(DEFAULT_MODEL)), ""
    except LoadError as error:
        model, hint = "", str(error)
    device = pick_device("auto")
    attention, reason = pick_attention("auto", cache_folder() / "kernels", device)
    return {
        "device": device,
        "cores": usable_cores(),
        "threads": default_threads(),
        "dtype": str(pick_dtype("auto", device)).removeprefix("torch."),
        "attention": attention,
        "attention_reason": reason,
        "attention_modules": _modules() if attention == "flashinfer" and model else "",
        **free_for_pages(device),
        "cache_folder": str(cache_folder()),
        "default_model": DEFAULT_MODEL,
        "default_model_file": model,
        "default_model_hint": hint,
    }


def _modules() -> str:
    """Those that the default model needs, and what a start would do about the missing ones."""
    try:
        found = look_for_kernels(EngineConfig())
    except StartupError as error:
        return error.message
    return ", ".join(
        f"{one['name']} {'is there' if one['library'] else 'is missing: ' + one['at_start']}" for one in found
    )
