"""The whole model: the runner's logits and greedy tokens beside transformers' own, and graphs beside no graphs."""

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compiled.step import Step
from profiles.gpu.bench import Bench, capture_all, limited
from profiles.gpu.driver import Driver, one_step

NEAR = 2.5
"""In bfloat16 the runner's logits may be so many times as far from float32 as transformers' bfloat16 ones are."""


def float32(bench: Bench) -> None:
    """Greedy tokens are equal, and logits up to rounding. In float32 attention is plain PyTorch: FlashInfer has no
    kernel for it; all else is compiled for the device as ever."""
    prompt = bench.prompt(bench.sizes.prompt)
    reference = bench.reference("small", torch.float32)
    expected = _greedy(reference, prompt, bench)
    logits = _logits(reference, prompt, bench)
    del reference
    runner = bench.runner("small", "float32", attention="reference")
    _compare_float32(bench, _runner_logits(runner, prompt, bench), logits)
    driver = Driver(runner, [prompt], bench.sizes.greedy)
    driver.prefill(bench.sizes.max_num_batched_tokens)
    driver.decode(bench.sizes.greedy - 1)
    same = _common(driver.tokens[0][len(prompt) :], expected)
    bench.facts["greedy_tokens_equal"] = same
    bench.show("{greedy_tokens_equal} greedy tokens are equal, logits differ by {logits_difference:.2e}")
    bench.expect(same == len(expected), f"greedy tokens differ from the {same + 1}. of {len(expected)} on")


def _compare_float32(bench: Bench, found: Tensor, expected: Tensor) -> None:
    difference = ((found - expected).norm() / expected.norm()).item()
    bench.facts["logits_difference"] = difference
    bench.expect(difference < 1e-3, f"logits differ by {difference:.2e}, 1e-3 is allowed")


def bfloat16(bench: Bench) -> None:
    """The large model with the kernels that it is served with. How far its logits may be from float32's is what
    transformers' own bfloat16 says; greedy tokens are compared where float32's first and second are clearly apart."""
    prompt = bench.prompt(bench.sizes.prompt)
    model = bench.reference("large", torch.bfloat16)
    rounded = _logits(model, prompt, bench)
    exact = _logits(model.float(), prompt, bench)
    del model
    bench.close()
    runner = bench.runner("large")
    found = _runner_logits(runner, prompt, bench)
    ours, theirs = _distance(found, exact), _distance(rounded, exact)
    bench.facts |= {"distance": ours, "distance_of_transformers": theirs}
    best = exact.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1]) > 4 * (rounded - exact).abs().max(dim=-1).values
    agree = (found.argmax(-1) == exact.argmax(-1))[clear]
    bench.facts |= {"clear_tokens": int(clear.sum()), "clear_tokens_equal": int(agree.sum())}
    bench.show(
        "from float32: ours {distance:.4f}, transformers' {distance_of_transformers:.4f}; "
        "{clear_tokens_equal} of {clear_tokens} clear tokens are equal"
    )
    bench.expect(ours <= NEAR * theirs, f"logits are {ours:.4f} from float32's, {NEAR} times {theirs:.4f} is allowed")
    bench.expect(bool(agree.all()), "a token that is clear in float32 is another one")


def float8(bench: Bench) -> None:
    """A cache of float8 numbers changes the logits by what its rounding explains, and a step by the bytes it saves."""
    prompt, batch = bench.prompt(bench.sizes.prompt), bench.sizes.decode[-1]
    # The CPU's kernel has no such cache.
    attention = "auto" if bench.sizes.device == "cuda" else "reference"
    logits = {}
    for name in ("auto", "fp8_e4m3"):
        runner = bench.runner("large", kv_dtype=name, attention=attention)
        logits[name] = _runner_logits(runner, prompt, bench)
        driver = Driver(runner, [bench.prompt(bench.sizes.context, i) for i in range(batch)], bench.sizes.steps + 8)
        driver.prefill(bench.sizes.max_num_batched_tokens)
        driver.decode(4)
        bench.facts[f"{name}_ms"] = statistics.median(driver.decode(bench.sizes.steps).all) * 1e3
    found = bench.facts["distance"] = _distance(logits["fp8_e4m3"], logits["auto"])
    bench.show(
        "batch " + str(batch) + ": {auto_ms:.3f} ms, with float8 {fp8_e4m3_ms:.3f} ms; logits differ by {distance:.3f}"
    )
    bench.expect(
        0 < found < 0.25, f"logits differ by {found:.3f}, 0.25 is allowed, and 0 would mean that nothing changed"
    )


def _distance(found: Tensor, exact: Tensor) -> float:
    """Median over the tokens of the relative distance."""
    return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()


def graphs(bench: Bench) -> None:
    """A step's logits are the same with graphs and without, whatever was replayed before: pure decode and mixed, at
    sizes between the buckets and above the largest; with graphs of the pieces only, too."""
    runner = bench.runner("large")
    bench.facts |= capture_all(runner)
    bench.show("{graphs} graphs captured in {capture_seconds:.1f} s, {graph_bytes} bytes")
    steps = {}
    for name, whole, pieces in (("with", True, True), ("pieces", False, True), ("without", False, False)):
        with limited(runner, whole=whole, pieces=pieces):
            steps[name] = [_of_step(bench, runner, kind) for kind in _kinds(bench)]
    steps["again"] = [_of_step(bench, runner, kind) for kind in reversed(_kinds(bench))][::-1]
    found = {name: max(map(_worst, steps[name], steps["without"])) for name in ("with", "pieces")}
    found["again"] = max(map(_worst, steps["again"], steps["with"]))
    bench.facts |= {"steps": len(steps["with"]), "difference": found}
    bench.show("{steps} kinds of steps differ from those without graphs by {difference}")
    ways = {name: value for name, value in runner.statistics().items() if name.startswith("graph_steps_")}
    bench.expect(all(ways.values()), f"not every way was taken: {ways}")
    # On a GPU other sizes run other matrix kernels, and bfloat16 sums in another order.
    allowed = 0.05 if bench.sizes.device == "cuda" else 0.0
    bench.expect(max(found["with"], found["pieces"]) <= allowed, f"logits with graphs differ by {found}")
    bench.expect(found["again"] == 0, f"a replay's logits differ by {found['again']:.2e} from the same replay's before")


def _kinds(bench: Bench) -> list[list[tuple[int, int]]]:
    """``(tokens, start)`` of each row."""
    sizes = bench.sizes
    context = sizes.context - 1
    decode = [[(1, 1 + context * i // rows) for i in range(rows)] for rows in sizes.rows]
    chunk = max(sizes.max_num_batched_tokens // 27, 6)
    return [*decode, [(chunk, 0)], [(1, context), (chunk, 0), (1, 5)], [(sizes.max_num_batched_tokens, 0)]]


def _of_step(bench: Bench, runner: Any, kind: list[tuple[int, int]]) -> Tensor:
    """Logits. What the rows have before is computed first, into the same pages."""
    prompts = [bench.prompt(start + tokens, seed) for seed, (tokens, start) in enumerate(kind)]
    step = one_step(runner, [(prompt[start:], start) for prompt, (_, start) in zip(prompts, kind, strict=True)])
    for row, prompt in zip(step.rows, prompts, strict=True):
        if row.start:
            before = replace(row, tokens=tuple(prompt[: row.start]), start=0, sampling=None)
            runner.submit(Step(0, (before,))).wait()
    return runner.logits(step).float().to(bench.device)


def _worst(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def _logits(model: Any, prompt: list[int], bench: Bench) -> Tensor:
    """[T, V], float32."""
    with torch.inference_mode():
        return model(torch.tensor([prompt], device=bench.device)).logits[0].float()


def _runner_logits(runner: Any, prompt: list[int], bench: Bench) -> Tensor:
    """The same through pages, by chunks of unlike lengths: a long one, single tokens, and one that ends mid-page."""
    half = len(prompt) // 2
    cuts = [0, half, half + 1, half + 2, len(prompt) - 3, len(prompt)]
    whole = one_step(runner, [(prompt, 0)]).rows[0]
    found = []
    for start, end in pairwise(cuts):
        part = tuple(prompt[start:end])
        row = replace(whole, tokens=part, start=start, sampling=None, targets=part)
        found.append(runner.logits(Step(0, (row,))).float().to(bench.device))
    return torch.cat(found)


def _greedy(model: Any, prompt: list[int], bench: Bench) -> list[int]:
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt], device=bench.device),
            max_new_tokens=bench.sizes.greedy,
            min_new_tokens=bench.sizes.greedy,
            do_sample=False,
        )
    return made[0, len(prompt) :].tolist()


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
