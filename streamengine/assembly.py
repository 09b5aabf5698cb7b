"""What a core is made of, besides its runner."""

import secrets

from compiled.step import KVSpec, ModelSpec
from streamengine.config import EngineConfig
from streamengine.guided.grammar import MakeMasks
from streamengine.kv import KVPool
from streamengine.pace import Pace
from streamengine.prefix import PrefixCache
from streamengine.scheduler import Scheduler


def build_scheduler(config: EngineConfig, model: ModelSpec, kv: KVSpec, mask: MakeMasks | None = None) -> Scheduler:
    """The scheduler that a core with ``config`` runs. Two of them decide alike, but share no digests of prefixes."""
    budget = config.max_num_batched_tokens
    prefix = None
    if config.enable_prefix_caching:
        prefix = PrefixCache(
            page_size=kv.page_size,
            pages=kv.pages - 1,
            identity=(model.folder, model.architecture, model.dtype),
            secret=secrets.token_bytes(32),
            quota=config.prefix_quota,
        )
    return Scheduler(
        KVPool(kv.pages, kv.page_size, prefix, debug=config.debug),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=model.max_model_len,
        max_queue=config.max_queue,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        pace=None if config.target_itl_ms is None else Pace(config.target_itl_ms / 1000, budget),
        ageing_s=config.priority_ageing_s,
        window=kv.window,
        mask=mask,
        transfer_reserve=kv.reserved,
    )


def told(ledger: dict[str, float], kv: KVSpec) -> str:
    """Where the memory went, for a log."""
    parts = {name: ledger.get(f"{name}_bytes", 0) for name in ("weights", "step", "kv")}
    sizes = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())
    return f"{sizes} ({kv.pages:,} pages of {kv.page_size} tokens)"
