"""A scheduler on a fake runner, driven by hand: what the tests of the scheduler share."""

from collections import deque
from collections.abc import Sequence

from compiled.step import Handle, Sampling, Step
from streamengine.kv import KVPool
from streamengine.request import Delta, Finish, Request
from streamengine.scheduler import Scheduler
from tests.fakes import GREEDY, FakeRunner, fake_kv, fake_model, oracle


class PoisonedPool(KVPool):
    """Every freed page is forgotten by the fake's memory, after the steps that may still write to it."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner.kv.pages, runner.kv.page_size)
        self._runner = runner

    def free(self, pages: tuple[int, ...]) -> None:
        super().free(pages)
        self._runner.poison(pages)


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
    ) -> None:
        self.runner = FakeRunner(fake_kv(usable_pages + 1, page_size), fake_model(max_model_len), depth)
        self.pool = PoisonedPool(self.runner)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_queue=max_queue,
        )
        self.in_flight: deque[tuple[Step, Handle]] = deque()
        self.answers: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.requests: dict[int, Request] = {}

    def submit(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        sampling: Sampling = GREEDY,
        stop_token_ids: tuple[int, ...] = (),
    ) -> int:
        """Returns the id; a number for a prompt stands for that many distinct tokens."""
        id = len(self.requests) + 1
        tokens = tuple((id * 31 + i) % 256 for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        request = Request(id=id, prompt=tokens, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids)
        self.requests[id] = request
        self.scheduler.submit(request, float(id))
        self.answers[id] = []
        return id

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
            assert delta.request not in self.finishes, "a delta after the end"
            self.answers[delta.request] += delta.tokens
            if delta.finish is not None:
                self.finishes[delta.request] = delta.finish
        return list(deltas)

    def abort(self, id: int) -> Delta | None:
        delta = self.scheduler.abort(id, "client")
        if delta is not None:
            self.note([delta])
        return delta

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

    def expected(self, id: int) -> list[int]:
        request = self.requests[id]
        return oracle(
            request.prompt, request.max_tokens, sampling=request.sampling, stop_token_ids=request.stop_token_ids
        )

    @property
    def running(self) -> list[int]:
        return [sequence.request.id for sequence in self.scheduler._running]

    @property
    def waiting(self) -> list[int]:
        return [sequence.request.id for sequence in self.scheduler._waiting]

    @property
    def preemptions(self) -> float:
        return self.scheduler.statistics()["preemptions"]
