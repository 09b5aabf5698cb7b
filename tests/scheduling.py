"""A scheduler on a fake runner, driven by hand: what the tests of the scheduler share."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compiled.step import Handle, Sampling, Step
from streamengine.guided.grammar import Constraint
from streamengine.kv import KVPool
from streamengine.prefix import PrefixCache
from streamengine.request import Delta, Finish, Request
from streamengine.scheduler import Scheduler
from tests.fakes import GREEDY, Answer, FakeRunner, fake_kv, fake_model, formula, oracle


class PoisonedPool(KVPool):
    """Every freed or evicted page is forgotten by the fake's memory, after the steps that may still write to it."""

    def __init__(self, runner: FakeRunner, prefix: PrefixCache | None) -> None:
        super().__init__(runner.kv.pages, runner.kv.page_size, prefix, debug=True)
        self._runner = runner

    def free(self, pages: tuple[int, ...]) -> None:
        super().free(pages)
        self._runner.poison(self.drain_freed())

    def take(self, n: int) -> list[int] | None:
        pages = super().take(n)
        self._runner.poison(pages or ())
        return pages


class Bench:
    """Everything that happened to every request; the clock counts the calls of `submit`."""

    def __init__(
        self,
        *,
        usable_pages: int = 64,
        page_size: int = 4,
        depth: int = 1,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 256,
        max_queue: int = 64,
        prefix: bool = False,
        quota: float = 0.5,
        window: int | None = None,
        answer: Answer = formula,
        **options: Any,
    ) -> None:
        self.runner = FakeRunner(fake_kv(usable_pages + 1, page_size, window), fake_model(max_model_len), depth, answer)
        cache = PrefixCache(page_size=page_size, pages=usable_pages, secret=b"secret", quota=quota) if prefix else None
        self.pool = PoisonedPool(self.runner, cache)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_queue=max_queue,
            window=window,
            **options,
        )
        self.in_flight: deque[tuple[Step, Handle]] = deque()
        self.answers: dict[int, list[int]] = {}
        """Of each request's first answer."""
        self.others: dict[tuple[int, int], list[int]] = {}
        """Of ``(request, index)``, for the other answers."""
        self.finishes: dict[int, Finish] = {}
        self.ends: dict[tuple[int, int], Finish] = {}
        self.deltas: list[Delta] = []
        self.requests: dict[int, Request] = {}

    def submit(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        sampling: Sampling = GREEDY,
        stop_token_ids: tuple[int, ...] = (),
        constraint: Constraint | None = None,
        **options: Any,
    ) -> int:
        """Returns the id; a number for a prompt stands for that many distinct tokens. ``options`` are `Request`'s."""
        id = len(self.requests) + 1
        tokens = tuple((id * 31 + i) % 256 for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        request = Request(
            id=id, prompt=tokens, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids, **options
        )
        self.requests[id] = request
        deltas = self.enter(request, constraint)
        self.answers[id] = []
        self.note(deltas)
        return id

    def enter(self, request: Request, constraint: Constraint | None) -> list[Delta]:
        return self.scheduler.submit(request, float(request.id), constraint)

    def launch(self) -> Step | None:
        assert len(self.in_flight) < self.runner.depth
        step = self.scheduler.plan(float(len(self.requests)))
        if step is not None:
            try:
                self.in_flight.append((step, self.runner.submit(step)))
            except RuntimeError as error:
                self.note(self.scheduler.fail(step, "engine_error", str(error)))
        return step

    def land(self) -> list[Delta]:
        step, handle = self.in_flight.popleft()
        try:
            result = handle.wait()
        except RuntimeError as error:
            return self.note(self.scheduler.fail(step, "engine_error", str(error)))
        return self.note(self.scheduler.commit(step, result))

    def note(self, deltas: Sequence[Delta]) -> list[Delta]:
        for delta in deltas:
            key = (delta.request, delta.index)
            assert key not in self.ends, "a delta after the end"
            answer = self.others.setdefault(key, []) if delta.index else self.answers[delta.request]
            answer += delta.tokens
            if delta.finish is not None:
                self.ends[key] = delta.finish
                if not delta.index:
                    self.finishes[delta.request] = delta.finish
        self.deltas += deltas
        return list(deltas)

    def answer(self, id: int, index: int) -> list[int]:
        return self.others.get((id, index), []) if index else self.answers[id]

    def abort(self, id: int) -> list[Delta]:
        return self.note(self.scheduler.abort(id, "client"))

    def turn(self) -> list[Delta]:
        """As the core does it: fill the pipe, land the oldest."""
        while len(self.in_flight) < self.runner.depth and self.launch() is not None:
            pass
        deltas = self.land() if self.in_flight else []
        self.scheduler.check()
        return deltas

    def run(self, turns: int = 2000) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.turn()
            turns -= 1
            assert turns > 0, f"no end in sight: {self.scheduler.statistics()}"
        assert self.pool.available == self.pool.capacity

    def expected(self, id: int, index: int = 0) -> list[int]:
        request = self.requests[id]
        sampling = replace(request.sampling, seed=request.sampling.seed + index)
        return oracle(
            request.prompt,
            request.max_tokens,
            sampling=sampling,
            stop_token_ids=request.stop_token_ids,
            answer=self.runner.answer,
            window=self.runner.kv.window,
        )

    @property
    def running(self) -> list[int]:
        """Ids of those who run, once for each answer."""
        return [sequence.request.id for sequence in self.scheduler._running]

    @property
    def waiting(self) -> list[int]:
        return [sequence.request.id for sequence in self.scheduler._waiting]

    @property
    def preemptions(self) -> float:
        return self.scheduler.statistics()["preemptions"]
