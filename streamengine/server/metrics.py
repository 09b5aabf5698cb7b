"""`/metrics`: the engine's statistics in Prometheus' words.

Nothing is counted here: what the engine and the core have counted is read when it is asked for, so a scrape costs
the engine one snapshot and a fault in here costs one scrape. A core counts from 0 when it is started again; the
totals here go on from where they were.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import anyio
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from compiled.step import KVSpec
from streamengine.errors import StreamEngineError
from streamengine.histogram import COUNTS, SECONDS, read
from streamengine.server.service import Service

PATIENCE_S = 5.0
"""A core in the middle of a long step may answer this late; then the last snapshot is given."""

GAUGES = {
    "running": ("requests_running", "Requests that hold a seat and pages."),
    "kv_pages": ("kv_cache_pages", "Pages of the KV cache that may be handed out."),
    "prefix_pages": ("prefix_cache_pages", "Pages whose prefix can be found."),
    "engine_open": ("streams_open", "Requests that are not ended."),
    "remote_peers": ("remote_prefill_peers", "Engines that are connected and compute prompts for this one."),
    "remote_waiting": ("remote_prefills_waiting", "Requests whose prompt is to come from there."),
    "remote_zombies": ("remote_prefill_zombies", "Transfers whose request went on without them, and that still go on."),
    "prefills_waiting": ("peer_prefills_waiting", "Prompts of other engines that are to be computed."),
    "prefills_held": ("peer_prefills_held", "Prompts of other engines whose pages are held for them."),
    "transfer_pages": ("transfer_pages", "Pages of the KV cache that transfers hold."),
}
STREAMS = {
    "streams_kept": "Streams that can be attached to.",
    "streams_attached": "Streams that somebody reads.",
    "stream_log_bytes": "What their logs hold, about.",
}
COUNTERS = {
    "prefix_queries": ("prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hit_tokens", "Prompt tokens that were found in the prefix cache."),
    "prefix_evictions": ("prefix_cache_evicted_pages", "Cached pages that were given to somebody else."),
    "preemptions": ("preemptions", "Times that a request lost its pages and was computed again."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were started."),
    "generated_tokens": ("generation_tokens", "Answer tokens."),
    "draft_tokens": ("speculation_draft_tokens", "Tokens that were guessed."),
    "accepted_tokens": ("speculation_accepted_tokens", "Guessed tokens that were right."),
    "failed_steps": ("failed_steps", "Steps that raised."),
    "runner_compilations_after_ready": ("compilations_after_ready", "Compiles while serving: each one is a fault."),
    "remote_sent": ("remote_prefills", "Prompts that another engine was to compute."),
    "remote_landed": ("remote_prefills_landed", "Of these, those that it did."),
    "remote_bytes": ("remote_prefill_bytes", "Bytes of the KV cache that came from other engines."),
    "remote_mismatches": ("remote_prefill_mismatches", "Connections to engines with other pages or another key."),
    "prefills_done": ("peer_prefills", "Prompts that were computed for other engines."),
    "prefills_refused": ("peer_prefills_refused", "Prompts of other engines that were not computed."),
    "prefills_mismatches": ("peer_prefill_mismatches", "Connections by engines with other pages or another key."),
    "prefills_expired": ("peer_prefills_expired", "Prompts of other engines that nobody asked for in time."),
    "engine_submitted": ("requests_submitted", "Requests that were taken in."),
}
BY_LABEL = {
    "remote_fallbacks_": ("remote_prefill_fallbacks", "reason", "Of these, those that it did not."),
    "engine_ended_": ("requests_finished", "finish_reason", "Answers that ended."),
    "engine_refused_": ("requests_refused", "code", "Requests that were refused."),
}
HISTOGRAMS = {
    "step_s": ("step_time_seconds", "Time of a step.", SECONDS),
    "step_rows": ("step_requests", "Requests in a step.", COUNTS),
    "step_tokens": ("step_tokens", "Tokens in a step.", COUNTS),
    "engine_ttft_s": ("time_to_first_token_seconds", "From request to first token.", SECONDS),
    "engine_inter_token_s": ("inter_token_latency_seconds", "Between two tokens of an answer.", SECONDS),
    "engine_total_s": ("e2e_request_latency_seconds", "From request to end.", SECONDS),
    "engine_queue_s": ("request_queue_time_seconds", "From request to first step.", SECONDS),
    "engine_prefill_s": ("request_prefill_time_seconds", "From first step to first token.", SECONDS),
    "engine_decode_s": ("request_decode_time_seconds", "From first token to last.", SECONDS),
}


class Metrics:
    """One server's; a collector of a registry of its own, so that servers in one process share nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._now: Mapping[str, float] = {}
        self._totals = _Totals()

    async def answer(self, request: Request) -> Response:
        """The route. What goes wrong here is this request's alone."""
        try:
            await self._update()
            encode, kind = choose_encoder(request.headers.get("accept", ""))
            return Response(encode(self._registry), headers={"content-type": kind})
        except Exception:
            logging.getLogger(__name__).exception("no metrics")
            return PlainTextResponse("internal error", 500)

    async def _update(self) -> None:
        """Of an engine that cannot be asked the totals stay as they are, and nothing runs."""
        engine = self._service.engine
        if engine is None:
            return
        with anyio.move_on_after(PATIENCE_S):
            try:
                self._now = await engine.statistics()
            except StreamEngineError:
                self._now = {}
            else:
                self._totals.update(engine.epoch, self._now)

    def describe(self) -> list[Metric]:
        """Nothing: the registry would otherwise collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        service, now, totals = self._service, self._now, self._totals.values
        ready = service.status == "ready"
        yield GaugeMetricFamily("streamengine_ready", "Whether requests are taken.", value=ready)
        yield GaugeMetricFamily("streamengine_connections", "Open WebSockets.", value=service.connections)
        if service.streams is not None:
            for key, value in service.streams.statistics().items():
                yield GaugeMetricFamily(f"streamengine_{key}", STREAMS[key], value=value)
        if service.engine is not None:
            model = service.engine.model
            facts = {"name": model.name, "architecture": model.architecture, "dtype": model.dtype}
            yield InfoMetricFamily("streamengine_model", "What is served.", value=facts)
            yield _cache_config(service.engine.kv)
        for key, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(f"streamengine_{name}", text, value=now.get(key, 0))
        yield _waiting(now)
        queued = now.get("waiting", 0)
        yield GaugeMetricFamily("streamengine_requests_queued", "The same for any reason: one number.", value=queued)
        usage = now.get("kv_pages_used", 0) / max(now.get("kv_pages", 0), 1)
        yield GaugeMetricFamily("streamengine_kv_cache_usage_ratio", "Share of the pages that are held.", value=usage)
        for key, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"streamengine_{name}", text, value=totals.get(key, 0))
        for prefix, (name, label, text) in BY_LABEL.items():
            family = CounterMetricFamily(f"streamengine_{name}", text, labels=[label])
            for key, value in totals.items():
                if key.startswith(prefix):
                    family.add_metric([key.removeprefix(prefix)], value)
            yield family
        for key, (name, text, bounds) in HISTOGRAMS.items():
            counts, total = read(totals, key, bounds)
            buckets = [(floatToGoString(bound), count) for bound, count in counts]
            yield HistogramMetricFamily(f"streamengine_{name}", text, buckets=buckets, sum_value=total)


def _cache_config(kv: KVSpec) -> Metric:
    """By the labels that inference gateways look for, which route by prefix."""
    facts = {"block_size": str(kv.page_size), "num_gpu_blocks": str(kv.pages - 1)}
    return InfoMetricFamily("streamengine_cache_config", "The KV cache: tokens a page, and pages.", value=facts)


def _waiting(now: Mapping[str, float]) -> Metric:
    family: Any = GaugeMetricFamily("streamengine_requests_waiting", "Requests without pages.", labels=["reason"])
    preempted = now.get("waiting_preempted", 0)
    family.add_metric(["preempted"], preempted)
    family.add_metric(["capacity"], now.get("waiting", 0) - preempted)
    return family


class _Totals:
    """Sums over all cores of an engine, whose own counters go on from one to the next."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._epoch = ""
        self._before: dict[str, float] = {}

    def update(self, epoch: str, values: Mapping[str, float]) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._before = {key: total for key, total in self.values.items() if not key.startswith("engine_")}
        for key, value in values.items():
            total = self._before.get(key, 0) + value
            self.values[key] = max(total, self.values.get(key, 0))
