"""How large everything is: for one H200, and for a run on the CPU that shows that every line works."""

from dataclasses import dataclass
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, context: int
) -> dict[str, Any]:
    """A config.json."""
    return LLAMA | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }


@dataclass(frozen=True)
class Sizes:
    """``large`` is the model whose speed counts, ``small`` the one that is compared in float32.

    ``decode`` are batch sizes at ``context`` tokens a row, ``prefill`` lengths of one prompt; transformers is timed at
    ``eager_decode`` and ``eager_prefill``. ``rows`` are batch sizes between the graphs' own. ``steps`` are timed,
    ``greedy`` tokens compared behind a ``prompt``, and attention for ``conformance_s``. The ceilings are measured with
    ``read_bytes`` and a square product.
    """

    device: str
    large: dict[str, Any]
    small: dict[str, Any]
    max_num_seqs: int
    max_num_batched_tokens: int
    decode: tuple[int, ...]
    context: int
    prefill: tuple[int, ...]
    eager_decode: tuple[int, ...]
    eager_prefill: tuple[int, ...]
    steps: int
    greedy: int
    prompt: int
    read_bytes: int
    side: int
    rows: tuple[int, ...]
    conformance_s: float

    @property
    def kv_pages(self) -> int:
        """For the largest batch with room for three rounds of timed steps; the rest is for what is measured beside."""
        rows = max(*self.decode, *self.rows)
        return 1 + max(rows * (self.context + 3 * self.steps + 24), max(self.prefill) + 256) // 16 + rows


H200 = Sizes(
    device="cuda",
    large=llama(2048, 16, 32, 8, 8192, 128256, 16384),  # 1.24 billion parameters
    small=llama(512, 4, 8, 2, 1536, 4096, 2048),
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    decode=(1, 8, 32, 128, 256),
    context=1024,
    prefill=(512, 2048, 8192),
    eager_decode=(1, 32),
    eager_prefill=(2048,),
    steps=64,
    greedy=48,
    prompt=256,
    read_bytes=8 * 2**30,
    side=8192,
    rows=(1, 7, 33, 100),
    conformance_s=30,
)

DRY = Sizes(
    device="recording",
    large=llama(128, 2, 2, 1, 256, 512, 512),
    small=llama(128, 2, 2, 1, 256, 512, 512),
    max_num_seqs=8,
    max_num_batched_tokens=64,
    decode=(1, 3, 8),
    context=40,
    prefill=(16, 50),
    eager_decode=(1, 3),
    eager_prefill=(16,),
    steps=6,
    greedy=8,
    prompt=20,
    read_bytes=32 * 2**20,
    side=256,
    rows=(1, 3, 6),
    conformance_s=0.1,
)
