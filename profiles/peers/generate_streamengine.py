"""Our constrained answers: the engine as `open_engine` gives it, its core in a process of its own."""

from contextlib import ExitStack
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal
from generate import Item, Sampling, answer

from streamengine import EngineConfig, SamplingParams, open_engine
from streamengine.errors import RequestError


class StreamEngine:
    def __init__(self, model: str) -> None:
        self._open = ExitStack()  # until the process ends
        self._portal = self._open.enter_context(start_blocking_portal())
        config = EngineConfig(model=model, max_num_seqs=64, enable_prefix_caching=False)
        self._engine = self._open.enter_context(self._portal.wrap_async_context_manager(open_engine(config)))

    def generate(self, items: list[Item], sampling: Sampling) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{} for _ in items]
        params = SamplingParams(**sampling)

        async def one(item: Item, told: dict[str, Any]) -> None:
            schema = item["schema"]
            wanted = schema and {"type": "json_schema", "json_schema": {"schema": schema}}
            try:
                result = await self._engine.generate(
                    token_ids=tuple(item["ids"]), sampling=params, response_format=wanted
                )
            except RequestError as error:
                told["refused"] = error.message
            else:
                told |= {"text": result.text, "tokens": len(result.token_ids), "finish": result.finish_reason}
                told["forced"] = result.timing.forced_tokens

        async def every() -> None:
            async with anyio.create_task_group() as tasks:
                for item, told in zip(items, answers, strict=True):
                    tasks.start_soon(one, item, told)

        self._portal.call(every)
        return answers


if __name__ == "__main__":
    answer(StreamEngine)
