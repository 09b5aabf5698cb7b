"""Which tokens of which requests are computed next. Pure decisions: no clock, no I/O, no torch.

There is no prefill or decode phase. A sequence has `known` and `computed` tokens, and every step gives some
sequences some tokens so that computed catches up with known; a row whose tokens reach known samples.
Chunked prefill, a prefix that was found in the cache, resumption after a preemption and a guess that was wrong
are nothing but that.

Those who run are ranked: priority with age first, then arrival. A plan serves them in this order, then admits from
the `WaitingQueue`; nobody overtakes the one whose turn it is. When pages are short the last in rank gives way:
it loses its pages, waits in front of its priority, and is computed again later. That it keeps the same
tokens is up to the sampler, whose random numbers depend on seed and position alone.

Progress: ranks never change, a sequence is never preempted for one behind it, and `submit` refuses what the pool
could not hold alone, so the first in rank of those who run has tokens in every step, and when nobody runs the one
whose turn it is does. Three rules keep preemption rare and never circular:

- whoever is admitted takes the pages of its whole known sequence at once, so a prompt never runs short halfway;
- an admission leaves one free page for each running sequence that still grows, itself and forks to come included.
  With one token a step nobody needs a second page before ``page_size`` steps have gone by, so for that
  long a resumed sequence is safe; guesses take no page of this reserve. A step that is short of pages admits
  nobody: its victim had no more than it needs again, and one is gone. (Whoever is alone needs no reserve.)
- the last in rank, short of a page itself, keeps what it has and sits the step out: its pages are given
  up when somebody before it wants one, not before.

A waiting request of a higher priority does not wait behind a lower one that runs: where seats or pages are short
it takes those of the last in rank, once that has had ``page_size`` steps.

One step may be in flight while the next one is planned. Whatever was submitted runs in that order, so pages
may be handed on at once: a late write of a finished or preempted sequence lands before its successor's.
"""

from collections import Counter
from itertools import takewhile

import msgspec

from compiled.step import Row, Step, StepResult
from streamengine.books import Books
from streamengine.guided.grammar import Constraint, MakeMasks
from streamengine.kv import KVPool
from streamengine.landing import Landing
from streamengine.limits import check_fit, check_queue
from streamengine.pace import Pace
from streamengine.prefix import Entry
from streamengine.request import QUEUE_TIMEOUT, Delta, Finish, Request, Sequence, State
from streamengine.rows import Plan, StepMasks, accept, delta_of, scores_of
from streamengine.speculation import Lookup


class Scheduler:
    """Owns every unfinished request and its pages.

    Args:
        pool: nobody else takes pages from it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: prompt + answer in tokens.
        max_queue: requests beyond ``max_num_seqs`` that may wait.
        long_prefill_token_threshold: prompt tokens of one sequence in one step; ``None``: all that the step holds.
        pace: limits the prompt tokens of a step in which somebody decodes.
        ageing_s: seconds of waiting that are worth one level of priority.
        window: see `KVSpec`.
        mask: makes the bitmasks of steps, where requests have grammars.
        transfer_reserve: see `Landing`.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queue: int,
        long_prefill_token_threshold: int | None = None,
        pace: Pace | None = None,
        ageing_s: float = 60.0,
        window: int | None = None,
        mask: MakeMasks | None = None,
        transfer_reserve: int = 0,
    ) -> None:
        self._pool = pool
        self._books = Books(pool, ageing_s, window)
        self.landing = Landing(self._books, transfer_reserve)
        self._running, self._waiting = self._books.running, self._books.waiting
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_queue = max_queue
        self._threshold = long_prefill_token_threshold or max_num_batched_tokens
        self._pace = pace
        self._mask = mask
        self._masks: StepMasks | None = None
        self._planned: dict[int, list[Sequence]] = {}
        self._generations: dict[int, list[list[int]]] = {}
        self._steps = self._generated_tokens = 0
        self._counts: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._books.requests)

    @property
    def unfinished(self) -> list[int]:
        """Ids of all requests that wait or run, oldest first."""
        return list(self._books.requests)

    def submit(self, request: Request, now: float, constraint: Constraint | None = None) -> list[Delta]:
        """Queue ``request``, which arrived at ``now`` (seconds); ``constraint`` is its grammar's beginning.
        An answer that was begun elsewhere may end or go on without a step: that comes back.

        Raises:
            InvalidRequest: more answers than may run at once, or a beginning that it cannot have.
            ContextLengthExceeded: it could not finish even if it were alone.
            Overloaded: the queue is full.
        """
        assert request.id not in self._books.requests, f"request {request.id} is already here"
        assert request.prompt and request.max_tokens >= 1, f"request {request.id} asks for nothing"
        return self._books.queue(self.check_room(request, now, 0, constraint))

    def check_room(self, request: Request, now: float, others: int, constraint: Constraint | None = None) -> Sequence:
        """Refuse what `submit` would, with ``others`` yet to be submitted; nothing is queued."""
        sequence = self._books.enter(request, now, constraint)
        check_fit(sequence, self._pool, self._max_num_seqs, self._max_model_len, self.landing.reserve)
        check_queue(len(self._books.requests) + others, self._max_num_seqs, self._max_queue)
        return sequence

    def abort(self, request_id: int, cause: str, index: int | None = None) -> list[Delta]:
        """End all answers of a request in whatever state it is; none when it is unknown or has ended already.

        With ``index`` only that answer ends, where it has begun. The beams of a search end together.
        """
        if cause == QUEUE_TIMEOUT and self._books.has_started(request_id):
            return []
        return self._end(request_id, Finish("cancelled", cause), index)

    def fail(self, step: Step, code: str, message: str) -> list[Delta]:
        """End exactly the requests of a step that raised."""
        self._generations.pop(step.number, None)
        ids = dict.fromkeys(sequence.request.id for sequence in self._planned.pop(step.number))
        deltas = [delta for id in ids for delta in self._end(id, Finish("error", code, message))]
        self._taken_in()
        return deltas

    # plan

    def plan(self, now: float) -> Step | None:
        """The next step, to be submitted in the order of planning; None when nothing can be computed now.

        At most one earlier step may still be uncommitted.
        """
        self._books.let_go()
        self._make_way()
        prefill = self._max_num_batched_tokens
        if self._pace is not None and any(s.known - s.computed == 1 for s in self._running):
            prefill = self._pace.prefill_budget
        plan = Plan(self._max_num_batched_tokens, prefill, self._threshold)
        preemptions = self._counts["preemptions"]
        self._plan_running(plan)
        if self._waiting and self._counts["preemptions"] == preemptions:
            self._plan_waiting(plan, now)
        if not plan.rows:
            return None
        self._steps += 1
        self._planned[self._steps] = plan.sequences
        self._books.hold_copied(tuple(source for source, _ in plan.copies))
        for parent in plan.parents:
            self._books.bear(parent)
        if self._pool.debug:
            self._generations[self._steps] = [self._pool.generations(row.pages) for row in plan.rows]
        self._masks = self._mask and plan.masks(self._mask)
        return Step(self._steps, tuple(plan.rows), tuple(plan.copies), self._masks)

    def _plan_running(self, plan: Plan) -> None:
        running, page_size = self._running, self._pool.page_size
        # Where somebody could still come in, the budget is rather his.
        may_guess = not self._waiting or self._books.seats >= self._max_num_seqs
        index = 0
        while plan.left > 0 and index < len(running):  # preemption shortens it, behind `index`
            sequence = running[index]
            index += 1
            start = sequence.computed
            need = len(sequence.tokens) + sequence.pending - start
            if not need or start >= sequence.reach or (sequence.lockstep and sequence.pending):
                continue  # all that can be computed is in flight, or waits for what is
            drafts: tuple[int, ...] = ()
            if need > 1:
                need = plan.chunk(need, len(running) - index)
            elif may_guess and sequence.lookup is not None:
                drafts = self._draft(sequence, sequence.lookup, plan.left - 1 - len(running) + index)
            end = start + need
            if need and (end <= len(sequence.pages) * page_size or self._grow(sequence, end)):
                plan.add(sequence, end, page_size, drafts)

    def _draft(self, sequence: Sequence, lookup: Lookup, budget: int) -> tuple[int, ...]:
        """Guesses behind its last token, into pages that it has or that nobody will miss."""
        known = sequence.computed + 1
        drafts = lookup.draft(sequence.tokens, min(sequence.request.speculate, budget, sequence.reach - known))
        missing = self._pool.pages_for(known + len(drafts)) - len(sequence.pages)
        if missing > 0 and missing + len(self._running) <= self._pool.available:
            sequence.pages += tuple(self._pool.take(missing) or ())
        drafts = drafts[: max(0, len(sequence.pages) * self._pool.page_size - known)]
        return drafts if sequence.constraint is None else sequence.constraint.trim(drafts)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give it pages for ``tokens``, at the cost of those behind it; False when it is the last in rank."""
        missing = self._pool.pages_for(tokens) - len(sequence.pages)
        while (pages := self._pool.take(missing)) is None:
            # The last in rank is behind the one being planned, so it has no row in this step to be taken back.
            last = self._running[-1]
            if last is sequence or (last.request is sequence.request and last.request.beam_width):
                return False
            self._preempt()
        sequence.pages += tuple(pages)
        return True

    def _preempt(self) -> None:
        self._books.preempt()
        self._counts["preemptions"] += 1

    def _make_way(self) -> None:
        """Preempt for a waiting request of a higher priority, if that gets it in."""
        head, running = self._waiting.peek(), self._running
        if head is None or head.pending or not running or not self._gives_way(running[-1], head):
            return
        lower = list(takewhile(lambda sequence: self._gives_way(sequence, head), reversed(running)))
        seats = self._books.seats - len(lower) - sum(sequence.unborn for sequence in lower)
        pages = self._pool.available + sum(len(sequence.pages) for sequence in lower)
        missing = self._pool.pages_for(len(head.tokens)) - len(head.landed)
        if seats + head.unborn >= self._max_num_seqs or pages < missing:
            return
        while running and self._gives_way(running[-1], head) and self._room(head) is None:
            self._preempt()

    def _gives_way(self, sequence: Sequence, head: Sequence) -> bool:
        return (
            sequence.request.priority < head.request.priority
            and sequence.rank > head.rank
            and self._steps - sequence.since >= self._pool.page_size
        )

    def _plan_waiting(self, plan: Plan, now: float) -> None:
        """Admit whose turn it is while budget, seats and pages last."""
        page_size = self._pool.page_size
        while plan.left > 0 and (sequence := self._waiting.peek()) is not None:
            if sequence.pending:
                break  # preempted, and the token in flight may be its last
            found = self._room(sequence)
            size = plan.chunk(len(sequence.tokens) - (sequence.landed_tokens or len(found or ()) * page_size))
            if found is None or not size:
                break
            self._books.admit(found, self._steps + 1)
            if sequence.preemptions == 0 and not sequence.begun:
                sequence.queued_s = now - sequence.arrival
                sequence.cached = min(sequence.computed, len(sequence.request.prompt))
                self._counts["prompt_tokens"] += len(sequence.tokens)
                self._waiting.serve(sequence.request.tenant, len(sequence.tokens) - sequence.computed, 0)
            plan.add(sequence, sequence.computed + size, page_size)

    def _room(self, sequence: Sequence) -> list[Entry] | None:
        """What the prefix cache has of it; None when there is no seat, or are no pages, for it now."""
        pool, running = self._pool, self._running
        if self._books.seats + 1 + sequence.unborn > self._max_num_seqs:
            return None
        found = self._books.find(sequence)
        pages = pool.pages_for(len(sequence.tokens))
        needed = pages - len(sequence.landed) - len(found) + sum(pool.is_idle(entry.page) for entry in found)
        reserve = sum(self._books.growth(other, len(other.pages)) for other in running)
        reserve += self._books.growth(sequence, pages)
        return None if running and needed + reserve > pool.available else found

    # commit

    def commit(self, step: Step, result: StepResult) -> list[Delta]:
        """Take in what a step computed: one delta per row, except for requests that ended meanwhile.

        Of a beam search its prompt's rows, and its answers when it is over.
        """
        assert step.number == result.number, f"step {step.number} was answered by {result.number}"
        self._books.let_go()
        sequences = self._planned.pop(step.number)
        if self._pool.debug:
            self._check_generations(step, sequences)
        if self._pace is not None:
            self._pace.observe(step, result.seconds)
        deltas: list[Delta] = []
        ended: list[Sequence] = []
        searched: dict[int, Request] = {}
        served: dict[str, int] = {}
        for place, (sequence, row) in enumerate(zip(sequences, step.rows, strict=True)):
            if sequence.state is State.FINISHED:
                continue
            request = sequence.request
            delta = self._take_in(sequence, row, result, place)
            served[request.tenant] = served.get(request.tenant, 0) + len(delta.tokens)
            if delta.finish is not None:
                ended.append(sequence)
                self._counts[f"finished_{delta.finish.reason}"] += 1
            if request.beam_width:
                searched[request.id] = request
            if not request.beam_width or not sequence.answered:
                deltas.append(delta)
        if ended:
            self._books.remove(ended)
        self._serve(served)
        self._taken_in()
        for request in searched.values():
            deltas += self._search(request)
        return deltas

    def _taken_in(self) -> None:
        """Nothing is unknown any more that the grammars of the step in flight wait for."""
        if self._masks is not None:
            self._masks.begin()

    def _take_in(self, sequence: Sequence, row: Row, result: StepResult, place: int) -> Delta:
        """What a row did, if it is not a beam's behind the prompt."""
        page_size = self._pool.page_size
        resident = sequence.since <= result.number and sequence.state is State.RUNNING
        sampled = result.tokens[place] if result.number >= sequence.sampled_from else ()
        tokens, end, finish, forced = accept(sequence, row, sampled, resident)
        if forced and sequence.pending:  # what is in flight is sampled where a forced token stands
            sequence.pending, sequence.sampled_from = 0, self._steps + 1
        if resident and end // page_size > row.start // page_size:
            self._books.land(sequence, end)
        logprobs = result.logprobs[place] if result.logprobs else ()
        if sequence.request.beam_width and sampled and resident:
            sequence.top = logprobs[0].top
        if row.drafts:
            self._counts["draft_tokens"] += row.drafts
            self._counts["accepted_tokens"] += end - row.start - len(row.tokens) + row.drafts
        scores = scores_of(sequence, row, result.scores[place]) if row.targets else ()
        return delta_of(sequence, end, tokens, finish, logprobs[: len(tokens)], scores, forced)

    def _serve(self, tokens: dict[str, int]) -> None:
        self._generated_tokens += sum(tokens.values())
        for tenant in filter(tokens.get, tokens):
            self._waiting.serve(tenant, 0, tokens[tenant])

    def _search(self, request: Request) -> list[Delta]:
        """The next round of a beam search, once all of its beams are there; its answers when it was the last."""
        beams = self._books.requests.get(request.id, [])
        if not beams or not all(beam.top for beam in beams) or self._books.branch(request):
            return []
        best = self._books.searches[request.id].finished[: request.n]
        self._books.remove(beams)
        self._counts.update(f"finished_{hypothesis.finish.reason}" for hypothesis in best)
        self._serve({request.tenant: sum(len(hypothesis.tokens) for hypothesis in best)})
        return [hypothesis.told(request, index) for index, hypothesis in enumerate(best)]

    def _end(self, request_id: int, finish: Finish, index: int | None = None) -> list[Delta]:
        """End all answers of a request that have not ended; with ``index`` that one, if it goes its own way by now."""
        self._books.let_go()
        sequences = self._books.requests.get(request_id, [])
        if index is not None and request_id not in self._books.searches:
            sequences = [sequence for sequence in sequences if sequence.index == index and not sequence.unborn]
        if not sequences:
            return []
        first = sequences[0]
        whole = first.request.beam_width or first.unborn
        indices = range(first.request.n) if whole else [sequence.index for sequence in sequences]
        told = delta_of(first, first.computed, finish=finish)
        others = [Delta(request=request_id, computed=told.computed, index=i, finish=finish) for i in indices[1:]]
        self._books.remove(sequences)
        self._counts[f"finished_{finish.reason}"] += len(indices)
        return [msgspec.structs.replace(told, index=indices[0]), *others]

    # inspection

    def drain_freed(self) -> list[int]:
        """See `KVPool.drain_freed`."""
        return self._pool.drain_freed()

    def check(self) -> None:
        """Prove that sequences, queues and pages agree."""
        self._books.check(self._max_num_seqs)

    def _check_generations(self, step: Step, sequences: list[Sequence]) -> None:
        """No page was handed on while it was in a page table, as far as it is still there."""
        for sequence, row, planned in zip(sequences, step.rows, self._generations.pop(step.number), strict=True):
            now = self._pool.generations(row.pages)
            for page, kept, then, generation in zip(row.pages, sequence.pages, planned, now, strict=False):
                assert kept != page or then == generation, f"{sequence} lost page {page} and did not know"

    def statistics(self) -> dict[str, float]:
        """Counts that never go down, except ``running``, ``waiting…`` and ``…_pages…``. Ends are those of answers."""
        names = ("preemptions", "prompt_tokens", "draft_tokens", "accepted_tokens")
        ends = [f"finished_{reason}" for reason in ("stop", "length", "cancelled", "error")]
        return {
            "running": len(self._running),
            "steps": self._steps,
            "generated_tokens": self._generated_tokens + self.landing.begun_tokens,
            **{name: self._counts[name] for name in (*names, *ends)},
            **self._waiting.statistics(),
            **(self._pace.statistics() if self._pace else {}),
            **self._pool.statistics(),
        }
