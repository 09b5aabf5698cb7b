"""Which tokens of which requests are computed next. Pure decisions: no clock, no I/O, no torch.

There is no prefill or decode phase. A sequence has `known` and `computed` tokens, and every step gives some
sequences some tokens so that computed catches up with known; a row whose tokens reach known samples.
Chunked prefill and resumption after a preemption are nothing but that.

A plan serves running sequences first, in the order of their arrival, then admits waiting ones in the same
order; nobody overtakes. So everyone who runs is older than everyone who waits, and when pages are short the
youngest gives way: it loses its pages, waits at the front, and is computed again later. That it keeps the
same tokens is up to the sampler, whose random numbers depend on seed and position alone.

Progress: a sequence is never preempted for a younger one, and `submit` refuses what the pool could not hold
alone, so the oldest runs in every step. Three rules keep preemption rare and never circular:

- whoever is admitted takes the pages of its whole known sequence at once, so a prompt never runs short halfway;
- an admission leaves one free page for each running sequence that still grows, itself included. With
  one token a step nobody needs a second page before ``page_size`` steps have gone by, so for that long
  a resumed sequence is safe. A step that preempts admits nobody: its victim, now in front, had no more
  pages than it needs again, and one is gone. (Whoever is alone needs no reserve: `submit` has checked.)
- the youngest one, short of a page itself, keeps what it has and sits the step out: its pages are given
  up when an older sequence wants one, not before.

One step may be in flight while the next one is planned. Whatever was submitted runs in that order, so pages
may be handed on at once: a late write of a finished or preempted sequence lands before its successor's.
"""

from collections import Counter, deque
from itertools import chain

from compiled.step import Row, Step, StepResult
from streamengine.errors import ContextLengthExceeded, Overloaded
from streamengine.kv import KVPool
from streamengine.request import Delta, Event, Finish, Request, Sequence, State

_PLACEHOLDER = 0
_STOP_TOKEN = Finish("stop", "stop_token")
_MAX_TOKENS = Finish("length", "max_tokens")


class Scheduler:
    """Owns every unfinished request and its pages.

    Args:
        pool: nobody else takes pages from it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: prompt + answer in tokens.
        max_queue: requests beyond ``max_num_seqs`` that may wait.
    """

    def __init__(
        self, pool: KVPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, max_queue: int
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_queue = max_queue
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._steps = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def unfinished(self) -> list[int]:
        """Ids of all requests that wait or run, oldest first."""
        return list(self._sequences)

    def submit(self, request: Request, now: float) -> None:
        """Queue ``request``, which arrived at ``now`` (seconds).

        Raises:
            ContextLengthExceeded: it could not finish even if it were alone.
            Overloaded: the queue is full.
        """
        assert request.id not in self._sequences, f"request {request.id} is already here"
        assert request.prompt and request.max_tokens >= 1, f"request {request.id} asks for nothing"
        sequence = Sequence(request, arrival=now, tokens=list(request.prompt))
        self._check_fit(sequence)
        unfinished = len(self._sequences)
        if unfinished >= self._max_num_seqs + self._max_queue:
            raise Overloaded(
                f"{unfinished} requests are running or waiting; at most {self._max_num_seqs} run and "
                f"{self._max_queue} wait",
                unfinished=unfinished,
                max_num_seqs=self._max_num_seqs,
                max_queue=self._max_queue,
            )
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: int, cause: str) -> Delta | None:
        """End a request in whatever state it is; None when it is unknown or has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._end([sequence], Finish("cancelled", cause))[0]

    def fail(self, step: Step, code: str, message: str) -> list[Delta]:
        """End exactly the requests of a step that raised."""
        sequences = [self._sequences[row.request] for row in step.rows if row.request in self._sequences]
        return self._end(sequences, Finish("error", code, message))

    # plan

    def plan(self, now: float) -> Step | None:
        """The next step, to be submitted in the order of planning; None when nothing can be computed now.

        At most one earlier step may still be uncommitted.
        """
        rows: list[Row] = []
        budget = self._plan_running(rows)
        if budget and self._waiting:
            self._plan_waiting(rows, budget, now)
        if not rows:
            return None
        self._steps += 1
        return Step(self._steps, tuple(rows))

    def _plan_running(self, rows: list[Row]) -> int:
        """Append the rows of running sequences; returns what is left of the budget."""
        budget = self._max_num_batched_tokens
        running, page_size = self._running, self._pool.page_size
        index = 0
        while budget and index < len(running):  # preemption shortens it, behind `index`
            sequence = running[index]
            index += 1
            computed = sequence.computed
            if computed >= sequence.reach:
                continue  # all its tokens are in flight
            end = min(sequence.known, computed + budget)
            if end > len(sequence.pages) * page_size and not self._grow(sequence, end):
                break
            rows.append(_advance(sequence, end))
            budget -= end - computed
        return budget

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give it pages for ``tokens``, at the cost of younger ones; False when it is the youngest."""
        missing = self._pool.pages_for(tokens) - len(sequence.pages)
        while (pages := self._pool.take(missing)) is None:
            if self._running[-1] is sequence:
                return False
            self._preempt_youngest()
        sequence.pages += tuple(pages)
        return True

    def _preempt_youngest(self) -> None:
        # It is behind the sequence being planned, so it has no row in this step to be taken back. A token
        # that a step in flight samples for it is still awaited: it was computed while the pages were its own.
        victim = self._running.pop()
        victim.apply(Event.PREEMPT)
        self._pool.free(victim.pages)
        victim.pages = ()
        victim.computed = 0
        victim.preemptions += 1
        self._waiting.appendleft(victim)
        self._preemptions += 1

    def _plan_waiting(self, rows: list[Row], budget: int, now: float) -> None:
        """Admit from the front of the queue while budget, seats and pages last."""
        pool, running, waiting = self._pool, self._running, self._waiting
        if len(running) >= self._max_num_seqs:
            return
        reserve = sum(len(sequence.pages) < pool.pages_for(sequence.reach) for sequence in running)
        while budget and waiting and len(running) < self._max_num_seqs:
            sequence = waiting[0]
            if sequence.pending:
                break  # preempted, and the token in flight may be its last
            needed = pool.pages_for(len(sequence.tokens))
            reserve += needed < pool.pages_for(sequence.reach)
            if running and needed + reserve > pool.available:
                break
            pages = pool.take(needed)
            assert pages is not None, f"request {sequence.request.id} does not fit an empty pool"
            waiting.popleft()
            running.append(sequence)
            sequence.apply(Event.ADMIT)
            sequence.pages = tuple(pages)
            if sequence.preemptions == 0:
                sequence.queued_s = now - sequence.arrival
                self._prompt_tokens += len(sequence.request.prompt)
            end = min(len(sequence.tokens), budget)
            rows.append(_advance(sequence, end))
            budget -= end

    # commit

    def commit(self, step: Step, result: StepResult) -> list[Delta]:
        """Take in what a step computed: one delta per row, except for requests that ended meanwhile."""
        assert step.number == result.number, f"step {step.number} was answered by {result.number}"
        sequences = self._sequences
        deltas: list[Delta] = []
        ended: list[Sequence] = []
        for row, tokens in zip(step.rows, result.tokens, strict=True):
            sequence = sequences.get(row.request)
            if sequence is None:
                continue
            finish = None
            if row.sampling is not None:
                sequence.pending -= 1
                tokens, finish = _accept(sequence, tokens)
                self._generated_tokens += len(tokens)
                if finish is not None:
                    ended.append(sequence)
                    self._finished[finish.reason] += 1
            deltas.append(_delta(sequence, row.start + len(row.tokens), tokens, finish))
        if ended:
            self._remove(ended)
        return deltas

    def _end(self, sequences: list[Sequence], finish: Finish) -> list[Delta]:
        self._finished[finish.reason] += len(sequences)
        deltas = [_delta(sequence, sequence.computed, (), finish) for sequence in sequences]
        self._remove(sequences)
        return deltas

    def _remove(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.state is State.WAITING:
                self._waiting.remove(sequence)
            sequence.apply(Event.FINISH)
            self._pool.free(sequence.pages)
            sequence.pages = ()
            del self._sequences[sequence.request.id]
        self._running = [sequence for sequence in self._running if sequence.state is State.RUNNING]

    # inspection

    def check(self) -> None:
        """Prove that sequences, queues and pages agree."""
        self._pool.check()
        running, waiting = self._running, self._waiting
        assert {s.request.id for s in chain(running, waiting)} == set(self._sequences), "a sequence is lost"
        assert len(running) + len(waiting) == len(self._sequences), "a sequence is in two places"
        arrivals = [s.arrival for s in chain(running, waiting)]
        assert arrivals == sorted(arrivals), "somebody was overtaken"
        for s in waiting:
            assert s.state is State.WAITING and not s.pages and s.computed == 0, f"{s} waits"
        for s in running:
            assert s.state is State.RUNNING and 0 < s.computed <= s.known <= s.reach + 1, f"{s} runs"
            covered = len(s.pages) * self._pool.page_size
            assert s.computed <= covered < s.reach + self._pool.page_size, f"{s} has {covered} slots"
        tables = [page for s in running for page in s.pages]
        assert len(set(tables)) == len(tables), "a page has two owners"
        assert len(tables) == self._pool.capacity - self._pool.available, "a page is held by nobody"

    def statistics(self) -> dict[str, float]:
        """Counts; those of tokens and requests never go down, except ``running`` and ``waiting``."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "steps": self._steps,
            "preemptions": self._preemptions,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            **{f"finished_{reason}": self._finished[reason] for reason in ("stop", "length", "cancelled", "error")},
            **self._pool.statistics(),
        }

    def _check_fit(self, sequence: Sequence) -> None:
        prompt, max_tokens = len(sequence.request.prompt), sequence.request.max_tokens
        asked = f"a prompt of {prompt} tokens and max_tokens {max_tokens}"
        if prompt + max_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                f"{asked} make {prompt + max_tokens} tokens; the context holds {self._max_model_len}",
                param="max_tokens",
                tokens=prompt + max_tokens,
                max_model_len=self._max_model_len,
            )
        pages, capacity = self._pool.pages_for(sequence.reach), self._pool.capacity
        if pages > capacity:
            raise ContextLengthExceeded(
                f"{asked} need {pages} KV pages of {self._pool.page_size} tokens; there are {capacity}",
                param="max_tokens",
                pages=pages,
                capacity=capacity,
            )


def _advance(sequence: Sequence, end: int) -> Row:
    """The row that computes ``sequence`` up to ``end``."""
    start, known = sequence.computed, sequence.known
    tokens = tuple(sequence.tokens[start:end])
    pending = end > len(sequence.tokens)
    if pending:
        assert end == len(sequence.tokens) + 1, "two steps in flight while a third is planned"
        tokens += (_PLACEHOLDER,)
    sequence.computed = end
    if end < known:
        return Row(sequence.request.id, tokens, start, sequence.pages)
    sequence.pending += 1
    return Row(sequence.request.id, tokens, start, sequence.pages, sequence.request.sampling, pending)


def _accept(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish | None]:
    """Append sampled tokens up to the one that ends the answer. A stop token wins over the length."""
    request = sequence.request
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if token in request.stop_token_ids:
            return tokens[:count], _STOP_TOKEN
        if sequence.answered >= request.max_tokens:
            return tokens[:count], _MAX_TOKENS
    return tokens, None


def _delta(sequence: Sequence, computed: int, tokens: tuple[int, ...], finish: Finish | None) -> Delta:
    queued_s, sequence.queued_s = sequence.queued_s, None
    request = sequence.request
    return Delta(
        request=request.id,
        tokens=tokens,
        computed=min(computed, len(request.prompt)),
        queued_s=queued_s,
        finish=finish,
    )
