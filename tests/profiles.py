"""Profiles as a runner would write them: SmolLM2's thirty layers decoding at batch 8, with every number settable."""

from collections.abc import Callable, Iterator
from typing import Any

from streamengine.profile.record import (
    Bucket,
    Call,
    Ceilings,
    Compile,
    Event,
    Hardware,
    Host,
    Kernel,
    Overhead,
    Piece,
    Profile,
    StepTime,
    Timeline,
)

LAYERS = 30
STEPS = 100
FIRST = "embed_tokens+rotary_emb | input_layernorm+q_proj+k_proj+v_proj"
MIDDLE = "o_proj+post_attention_layernorm+mlp | input_layernorm+q_proj+k_proj+v_proj"
LAST = "o_proj+post_attention_layernorm+mlp | norm+lm_head"
BEFORE, AFTER = "input_layernorm+q_proj+k_proj+v_proj", "o_proj+post_attention_layernorm+mlp"
ROOFS = Ceilings(read_gbps=31.0, product_gflops=428.0)
GAP_S = 8e-6
"""Between two calls of the timeline."""

Cost = tuple[str, str, str | None, float, int, int]
"""Place, kind, piece, seconds, bytes and operations of one call."""


def step(slower: Callable[[str], float] = lambda place: 0.0) -> Iterator[Cost]:
    """The calls of one step; ``slower`` are seconds more at a place."""
    made: list[Cost] = [(f"{FIRST.replace('| ', '| layers.0: ')}", "piece", "first", 92e-6, 1_140_000, 8_900_000)]
    for layer in range(LAYERS):
        made.append((f"layers.{layer}: attention", "attention", None, 38e-6 + layer % 3 * 2e-6, 790_000, 2_360_000))
        if layer < LAYERS - 1:
            place = f"layers.{layer}: {AFTER} | layers.{layer + 1}: {BEFORE}"
            made.append((place, "piece", "middle", 0.352e-3 + layer % 5 * 4e-6, 7_120_000, 56_600_000))
    made.append((f"layers.29: {AFTER} | norm+lm_head", "piece", "last", 2.31e-3, 62_900_000, 505_000_000))
    made.append(("host: sampler", "host", None, 0.41e-3, 0, 0))
    for place, kind, piece, seconds, size, flops in made:
        yield place, kind, piece, seconds + slower(place), size, flops


def profile(slower: Callable[[str], float] = lambda place: 0.0, host_s: float = 0.62e-3, **fields: Any) -> Profile:
    costs = list(step(slower))
    whole = host_s + sum(cost[3] for cost in costs)
    known: dict[str, Any] = {
        "model": "smollm2-135m",
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "scenario": "decode",
        "created": "2026-11-29T21:00:00+00:00",
        "hardware": Hardware(cpu="AMD EPYC 9R14", cores=2, threads=2),
        "ceilings": ROOFS,
        "steps": STEPS,
        "step_s": StepTime(total=whole * STEPS, mean=whole, p50=whole * 0.99, min=whole * 0.95, max=whole * 1.9),
        "rows": (Bucket(at_most=4, steps=6), Bucket(at_most=8, steps=STEPS - 6)),
        "tokens": (Bucket(at_most=4, steps=6), Bucket(at_most=8, steps=90), Bucket(at_most=64, steps=4)),
        "ledger": {"weights_bytes": 269e6, "kv_bytes": 1.2e9, "step_bytes": 84e6},
        "startup": {"imports": 1.9, "weights": 0.7, "load pieces": 0.3, "warm-up": 0.4},
        "calls": tuple(call(cost, whole) for cost in costs),
        "host": Host(seconds=host_s * STEPS, share=host_s / whole),
        "pieces": pieces(),
        "timeline": Timeline(step=57, rows=8, tokens=8, seconds=whole, events=tuple(events(costs, host_s))),
        "overhead": Overhead(off_s=whole * 0.98, on_s=whole),
    }
    return Profile(**{**known, **fields})


def call(cost: Cost, whole: float) -> Call:
    name, kind, piece, seconds, size, flops = cost
    counted: dict[str, Any] = {}
    if size:
        needed = max(size / ROOFS.read_gbps, flops / ROOFS.product_gflops) / 1e9
        counted = {"bytes": size * STEPS, "flops": flops * STEPS, "gbps": size / seconds / 1e9}
        counted |= {"gflops": flops / seconds / 1e9, "of_ceiling": 100 * needed / seconds}
    times = {"total_s": seconds * STEPS, "mean_s": seconds, "p50_s": seconds * 0.99, "min_s": seconds * 0.95}
    share = seconds / whole
    return Call(name=name, kind=kind, piece=piece, tokens=8, calls=STEPS, share=share, **times, **counted)  # type: ignore[arg-type]


def events(costs: list[Cost], host_s: float) -> Iterator[Event]:
    now = host_s - GAP_S * (len(costs) - 1)
    for name, kind, piece, seconds, _, _ in costs:
        yield Event(name=name, kind=kind, start_s=now, seconds=seconds, piece=piece)  # type: ignore[arg-type]
        now += seconds + GAP_S


def pieces() -> tuple[Piece, ...]:
    hit = Compile(cache="hit", trace_s=0.21, lower_s=0.34, codegen_s=0.18, cxx_s=3.9, cxx_pieces=3)
    missed = Compile(
        cache="miss", factor="threads 1 → 2", trace_s=0.4, lower_s=0.9, codegen_s=0.3, cxx_s=3.9, cxx_pieces=3
    )
    kernel = 'extern "C" void kernel(const bfloat16* in_ptr0, float* out_ptr0, const int64_t ks0)\n{\n    return;\n}\n'
    names = {"first": FIRST, "middle": MIDDLE, "last": LAST}
    return tuple(
        Piece(
            key=key,
            name=name,
            places=tuple(cost[0] for cost in step() if cost[2] == key),
            bytes="7077888 + 5184*T",
            flops="7077888*T + 11520*T",
            uncounted=("aten.sin", "aten.cos") if key == "first" else (),
            kernels=tuple(
                Kernel(
                    name=f"cpp_fused__to_copy_add_cat_linear_mean_mul_neg_pow_rsqrt_slice_split_with_sizes_{i}",
                    source=kernel,
                )
                for i in range(4)
            ),
            graph="graph():\n    %hidden : [num_users=2] = placeholder[target=hidden]\n    return (linear,)\n",
            code="def call(args):\n    arg0_1, arg1_1 = args\n    args.clear()\n    return (buf0,)\n",
            compile=missed if key == "last" else hit,
        )
        for key, name in names.items()
    )


def burning(end: str, seconds: float) -> Callable[[str], float]:
    """``seconds`` more at each place whose name ends so."""
    return lambda place: seconds if place.endswith(end) else 0.0
