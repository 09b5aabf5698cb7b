"""How far a simulation of one engine is from that engine: serve a load, simulate the same arrivals, compare.

``python -m profiles.plan_check --rate 0.5 --seconds 60``. The step times are fitted to the steps of the same run, so
that it does not matter how busy the machine was beside it: what is compared is everything but the steps, that is, what
waits for what. Simulated once in phase, slow when the machine was slow, and, to see how much chance there is in the
figures, with machines that are slow at other times. The last line is JSON. Clients are tasks of the process that
owns the engine; the core has a process of its own.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec

from streamengine import EngineConfig, SamplingParams, open_engine
from streamengine.engine import Engine
from streamengine.planner import times
from streamengine.planner.command import engine_of
from streamengine.planner.fleet import Fleet
from streamengine.planner.report import Latency, Outcome, Targets
from streamengine.planner.state import Plan
from streamengine.planner.workload import Job, Load, Workload, recorded
from streamengine.replay import read, sessions
from streamengine.trace import Landed, Line, Opened, Submitted

VOCABULARY = 40_000
SETTLE_S = 2.0
SEEDS = 20

Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="A file for the trace.")
    chosen = parser.parse_args()
    load = Load(
        rate=chosen.rate, seconds=chosen.seconds, prompt_tokens=160, prompt_cv=0.8, answer_tokens=48, answer_cv=0.5,
        shared_tokens=32, prefixes=4, seed=chosen.seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trace = chosen.keep or str(Path(folder) / "trace")
        config = EngineConfig(model=chosen.model, threads=chosen.threads, trace=trace)
        seen = anyio.run(_serve, config, load)
        opened, lines = sessions(read(trace))[-1]
    print(json.dumps(_compare(config, opened, lines, seen)))


async def _serve(config: EngineConfig, load: Load) -> list[Outcome]:
    """What each client saw; times since the first one was due."""
    async with open_engine(config) as engine:
        await engine.generate(token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4, ignore_eos=True))
        begin = anyio.current_time() + SETTLE_S
        seen: list[Outcome] = []
        async with anyio.create_task_group() as clients:
            for job in load.open().jobs:
                seen.append(Outcome(job.at))
                await anyio.sleep_until(begin + job.at)
                clients.start_soon(_ask, engine, job, seen[-1], begin)
    return seen


async def _ask(engine: Engine, job: Job, outcome: Outcome, begin: float) -> None:
    outcome.at = anyio.current_time() - begin
    tokens = [token % VOCABULARY + 1 for token in job.request.prompt]
    sampling = SamplingParams(max_tokens=job.request.max_tokens, ignore_eos=True, temperature=0)
    async with engine.stream(token_ids=tokens, sampling=sampling) as stream:
        async for delta in stream:
            outcome.told(anyio.current_time() - begin, len(delta.token_ids))
        outcome.end = (await stream.result()).finish_reason


def _compare(config: EngineConfig, opened: Opened, lines: list[Line], seen: list[Outcome]) -> dict[str, Any]:
    found = times.of_trace("the steps of the same run", opened, lines)
    model, kv = engine_of(config, found)
    plan = Plan(config=config, model=model, kv=kv, times=found, targets=Targets(1000, 200))

    def simulated(seed: int, *, in_phase: bool, asked: bool) -> Figures:
        workload = recorded("the arrivals of this run", opened.kv.page_size, lines)
        fleet = Fleet(replace(plan, seed=seed, in_phase=in_phase), _as_asked(workload, seen) if asked else workload)
        fleet.run()
        return _figures(fleet.outcomes[1:])

    result: dict[str, Any] = {"requests": len(seen), "steps": len(found.speeds)}
    for view, measured in (("core", _figures(_by_core(lines)[1:])), ("clients", _figures(seen))):
        asked = view == "clients"
        together = simulated(0, in_phase=True, asked=asked)
        apart = [simulated(seed, in_phase=False, asked=asked) for seed in range(SEEDS)]
        print(f"as the {view} saw it")
        result[view] = {"measured": measured, "in_phase": together, "error_percent": _errors(measured, together, apart)}
    return result


def _errors(measured: Figures, together: Figures, apart: list[Figures]) -> Figures:
    errors: Figures = {}
    for name, figures in measured.items():
        errors[name] = {}
        for key, value in figures.items():
            others = sorted(100 * (run[name][key] / value - 1) for run in apart)
            errors[name][key] = round(100 * (together[name][key] / value - 1), 1)
            print(
                f"  {name:<8} {key:<5} measured {value:8.1f}  simulated {together[name][key]:8.1f}  "
                f"{errors[name][key]:+6.1f} %   out of phase {others[0]:+.1f} to {others[-1]:+.1f} %, "
                f"median {others[SEEDS // 2]:+.1f} %"
            )
    return errors


def _by_core(lines: list[Line]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    for line in lines:
        if isinstance(line, Submitted):
            outcomes[line.request.id] = Outcome(line.at)
        elif isinstance(line, Landed):
            for told in line.answers:
                if told.count:
                    outcomes[told.request].told(line.at, told.count)
    return list(outcomes.values())


def _as_asked(workload: Workload, seen: list[Outcome]) -> Workload:
    """With the clients' times in place of the core's, which takes a request only when a step is over.

    The least difference between the two is that of their clocks. The first request was there before the clients.
    """
    first, *jobs = workload.jobs
    apart = min(job.at - outcome.at for job, outcome in zip(jobs, seen, strict=True))
    asked = [job._replace(at=outcome.at + apart) for job, outcome in zip(jobs, seen, strict=True)]
    return workload._replace(jobs=iter([first, *asked]))


def _figures(outcomes: list[Outcome]) -> Figures:
    return {
        "ttft_ms": msgspec.structs.asdict(Latency.of(_firsts(outcomes))),
        "itl_ms": msgspec.structs.asdict(Latency.of(_gaps(outcomes))),
    }


def _firsts(outcomes: list[Outcome]) -> list[float]:
    return [outcome.first - outcome.at for outcome in outcomes if outcome.first is not None]


def _gaps(outcomes: list[Outcome]) -> list[float]:
    return [gap for outcome in outcomes for gap in outcome.gaps]


if __name__ == "__main__":
    main()
