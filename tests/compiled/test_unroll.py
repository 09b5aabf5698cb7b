"""One traced layer of each kind stands for all of its kind: pieces, wiring and results are those of a whole trace."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from compiled.outline import outline
from compiled.recipe import Constant
from compiled.skeleton import build_skeleton, compute_buffers
from compiled.split import Piece, Split
from compiled.stopwatch import Stopwatch
from compiled.unroll import choose, split_model
from tests.compiled import tiny

DEEPSEEK = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 7},
    "gemma3_text": {"num_hidden_layers": 14, "sliding_window": 8},
    "gpt2": {"n_layer": 6, "num_hidden_layers": 6},
    "deepseek_v3": {"num_hidden_layers": 7, **DEEPSEEK},
    "gpt_oss": {"num_hidden_layers": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SLOW = {"gemma3_text", "deepseek_v3", "gpt_oss"}
"""All their layers are traced beside one of each kind."""


def skeleton(kind: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(kind, **(tiny.BASE | MODELS.get(kind, {}) | changes))
    return build_skeleton(config, torch.float32)


def splits(module: Any) -> tuple[Split, Split, tuple[int, ...] | None]:
    """By kinds, whole, and the layers that were traced for the former."""
    choice = choose(module)
    buffers = compute_buffers(module)
    return (
        split_model(module, choice, buffers, Stopwatch()),
        split_model(module, None, buffers, Stopwatch()),
        choice.layers if choice else None,
    )


def wiring(parts: Split) -> list[Any]:
    """The calls with every value named by who makes it, or by where it comes from."""
    makers: dict[str, Any] = dict(parts.sources)
    makers |= {name: parts.constants[one.index].tolist() for name, one in makers.items() if isinstance(one, Constant)}
    told = []
    for number, call in enumerate(parts.calls):
        outputs = call.outputs if isinstance(call, Piece) else (call.output,)
        told.append(
            (
                (call.name, call.key) if isinstance(call, Piece) else call.layer,
                [makers[name] for name in call.inputs],
                len(outputs),
            )
        )
        makers |= {name: (number, position) for position, name in enumerate(outputs)}
    return [*told, makers[parts.output]]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in MODELS]
)
def test_pieces_names_and_wiring_are_those_of_the_whole_model_s_trace(kind: str) -> None:
    unrolled, whole, layers = splits(skeleton(kind))
    assert layers is not None
    assert len(layers) <= 5
    assert wiring(unrolled) == wiring(whole)


def test_a_model_is_cut_into_the_same_pieces_after_any_number_of_others() -> None:
    keys = []
    for epsilon in (1e-5, 1e-6, 1e-5, *(n / 10 for n in range(8)), 1e-5):
        module = skeleton("llama", rms_norm_eps=epsilon, num_hidden_layers=1)
        keys.append(
            [piece.key for piece in split_model(module, choose(module), compute_buffers(module), Stopwatch()).unique]
        )
    assert keys[0] == keys[2] == keys[-1] != keys[1]


@pytest.mark.parametrize("depth", [5, 9, 40])
def test_what_is_traced_and_compiled_does_not_grow_with_the_depth(depth: int) -> None:
    module = skeleton("llama", num_hidden_layers=depth)
    choice = choose(module)
    assert choice is not None and len(choice.layers) == 3
    parts = split_model(module, choice, compute_buffers(module), Stopwatch())
    assert (len(parts.pieces), len(parts.unique)) == (depth + 1, 3)
    last = depth - 1
    assert [piece.name for piece in (parts.pieces[0], parts.pieces[2], parts.pieces[-1])] == [
        "embed_tokens+rotary_emb | layers.0: input_layernorm+q_proj+k_proj+v_proj",
        "layers.1: o_proj+post_attention_layernorm+mlp | layers.2: input_layernorm+q_proj+k_proj+v_proj",
        f"layers.{last}: o_proj+post_attention_layernorm+mlp | norm+lm_head",
    ]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_layers_that_count_their_experts_tokens_are_all_alike(kind: str) -> None:
    module = skeleton(kind, num_hidden_layers=5, num_local_experts=4, num_experts_per_tok=2)
    parts = split_model(module, choose(module), compute_buffers(module), Stopwatch())
    assert len(parts.unique) == 3, "the first piece, the last, and those between layers"


class Scaled(nn.Module):
    """A layer's part that computes with a number of its own."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Noted(nn.Module):
    """Hands its result to a later layer, or takes one."""

    def __init__(self, inner: nn.Module, note: list[Tensor], takes: bool) -> None:
        super().__init__()
        self.inner, self.note, self.takes = inner, note, takes

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        if self.takes:
            return made + self.note.pop()
        self.note.append(made)
        return made


def test_a_layer_that_computes_with_another_number_is_traced_itself() -> None:
    module = skeleton("llama", num_hidden_layers=9)
    for number, layer in enumerate(module.model.layers):
        layer.mlp = Scaled(layer.mlp, 3.0 if number == 4 else 2.0)
    unrolled, whole, layers = splits(module)
    assert layers is not None
    assert {0, 4} < set(layers) < set(range(9))
    assert wiring(unrolled) == wiring(whole)


def test_a_model_whose_layers_all_compute_with_their_own_index_is_traced_whole() -> None:
    module = skeleton("llama", num_hidden_layers=5)
    for number, layer in enumerate(module.model.layers):
        layer.mlp = Scaled(layer.mlp, 1 / (number + 1))
    unrolled, whole, layers = splits(module)
    assert layers is None
    assert wiring(unrolled) == wiring(whole)


def test_a_layer_that_takes_what_a_far_one_made_is_not_replaced_by_others() -> None:
    module = skeleton("llama", num_hidden_layers=8)
    note: list[Tensor] = []
    for number in (1, 5):
        layer = module.model.layers[number]
        layer.mlp = Noted(layer.mlp, note, takes=number == 5)
    unrolled, whole, layers = splits(module)
    assert layers is None
    assert wiring(unrolled) == wiring(whole)


def test_an_outline_tells_from_where_a_layer_takes_its_rotary_positions() -> None:
    stretches = outline(skeleton("gemma3_text"))
    kinds = [stretch.origins for stretch in stretches[2:-1]]
    assert {number + 2 for number, origins in enumerate(kinds) if origins != kinds[0]} == {5, 11}
    assert len({stretch.key for stretch in stretches[1:-1]}) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_buffers_that_no_checkpoint_holds_are_those_of_a_loaded_model(kind: str) -> None:
    config = AutoConfig.for_model(kind, **(tiny.BASE | MODELS[kind]))
    loaded = AutoModelForCausalLM.from_config(config)
    buffers = compute_buffers(skeleton(kind))
    assert buffers.keys() == {name for name, _ in loaded.named_non_persistent_buffers()}
    assert all(torch.equal(buffer, loaded.get_buffer(name)) for name, buffer in buffers.items())
