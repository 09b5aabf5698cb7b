"""Stand-ins for the two things that a test does not want: a model and a vocabulary.

`FakeRunner` keeps a simulated paged KV memory: every token is written to its slot together with its
position, and the whole context is read back through the page table before the next token is computed
from it. So a wrong page table, a page that was given away too early or a token at a wrong position
raises or changes the answer, just as it would on a real runner. Standard library only, so that it also
runs in a child process that is meant to be killed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

from compiled.step import PADDING_PAGE, KVSpec, ModelSpec, Row, Sampling, Step, StepResult

EOS = 256
BOS = 257
VOCAB_SIZE = 258
WAIT_S = 30.0
"""Nothing in a test may block for longer."""

GREEDY = Sampling()

Answer = Callable[[Sequence[int], Sampling], int]
"""``(all tokens so far, sampling) -> next token``."""


def formula(context: Sequence[int], sampling: Sampling) -> int:
    """A lowercase letter that depends on every token of the context, and on the seed unless greedy."""
    seed = 0 if sampling.temperature == 0 else sampling.seed
    return ord("a") + crc32(",".join(map(str, context)).encode(), seed & 0xFFFFFFFF) % 26


def script(replies: Mapping[str | tuple[int, ...], str | Sequence[int]]) -> Answer:
    """Answers word by word: ``{prompt: reply}``, text or ids; the end of a reply is `EOS`."""
    table = {_ids(prompt): _ids(reply) for prompt, reply in replies.items()}

    def answer(context: Sequence[int], sampling: Sampling) -> int:
        for prompt, reply in table.items():
            position = len(context) - len(prompt)
            if position >= 0 and tuple(context[: len(prompt)]) == prompt:
                return reply[position] if position < len(reply) else EOS
        raise AssertionError(f"no reply for {bytes(i for i in context if i < 256)!r}")

    return answer


def _ids(text: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(text.encode()) if isinstance(text, str) else tuple(text)


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop_token_ids: Iterable[int] = (),
    answer: Answer = formula,
) -> list[int]:
    """The answer that a request must get, whatever else the engine does meanwhile."""
    context = list(prompt)
    stops = set(stop_token_ids)
    for _ in range(max_tokens):
        context.append(answer(context, sampling))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def fake_kv(pages: int = 65, page_size: int = 4) -> KVSpec:
    return KVSpec(pages=pages, page_size=page_size, page_bytes=64)


def fake_model(max_model_len: int = 256) -> ModelSpec:
    return ModelSpec(
        name="fake",
        folder="",
        architecture="FakeForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
    )


@dataclass(slots=True, eq=False)
class FakeHandle:
    runner: "FakeRunner"
    step: Step
    error: Exception | None = None
    result: StepResult | None = None

    def wait(self) -> StepResult:
        return self.runner.finish(self)


@dataclass(eq=False)
class FakeRunner:
    """A `compiled.step.Runner` that answers by formula.

    With ``depth == 2`` nothing is computed before `FakeHandle.wait`, as if a device were still busy: steps
    run in the order of their submission and placeholders are resolved there.
    """

    kv: KVSpec = field(default_factory=fake_kv)
    model: ModelSpec = field(default_factory=fake_model)
    depth: int = 1
    answer: Answer = formula

    steps: list[Step] = field(default_factory=list)
    """Every step that was submitted, those that raised included."""
    warmups: int = 0
    closed: bool = False
    holding: threading.Event = field(default_factory=threading.Event)
    """Set while a step is blocked by `hold`."""

    def __post_init__(self) -> None:
        self._memory: list[tuple[int, int] | None] = [None] * (self.kv.pages * self.kv.page_size)
        self._queue: deque[FakeHandle | tuple[int, ...]] = deque()
        self._sampled: dict[int, int] = {}
        self._faults: deque[tuple[str, Exception]] = deque()
        self._open = threading.Event()
        self._open.set()

    # what a test may do to it

    def fail(self, times: int = 1, error: Exception | None = None, at: Literal["submit", "wait"] = "wait") -> None:
        """Make the next ``times`` steps raise."""
        self._faults.extend([(at, error or RuntimeError("kernel panic"))] * times)

    @property
    def faulty(self) -> bool:
        """Some step that is yet to be submitted will raise."""
        return bool(self._faults)

    def hold(self) -> None:
        """Let the next step block until `release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def poison(self, pages: Iterable[int]) -> None:
        """Forget ``pages`` once every step submitted so far has run: reading them afterwards raises."""
        self._queue.append(tuple(pages))
        if self.depth == 1:
            self._run_until(None)

    # Runner

    def submit(self, step: Step) -> FakeHandle:
        self._check(step)
        self.steps.append(step)
        handle = FakeHandle(self, step)
        if self._faults:
            at, error = self._faults.popleft()
            if at == "submit":
                raise error
            handle.error = error
        self._queue.append(handle)
        if self.depth == 1:
            self._pass_gate()
            self._run_until(handle)
        return handle

    def finish(self, handle: FakeHandle) -> StepResult:
        if self.depth > 1:
            self._pass_gate()
            self._run_until(handle)
        if handle.error is not None:
            raise handle.error
        assert handle.result is not None, "waited for out of order"
        return handle.result

    def warmup(self) -> None:
        self.warmups += 1

    def statistics(self) -> dict[str, float]:
        return {"kv_bytes": float(self.kv.pages * self.kv.page_bytes)}

    def close(self) -> None:
        self.closed = True

    # inside

    def _pass_gate(self) -> None:
        if not self._open.is_set():
            self.holding.set()
            assert self._open.wait(WAIT_S), "held and never released"
            self.holding.clear()

    def _run_until(self, last: FakeHandle | None) -> None:
        while self._queue:
            work = self._queue.popleft()
            if isinstance(work, FakeHandle):
                self._execute(work)
                if work is last:
                    return
            else:
                for page in work:
                    first = page * self.kv.page_size
                    self._memory[first : first + self.kv.page_size] = [None] * self.kv.page_size

    def _execute(self, handle: FakeHandle) -> None:
        rows = handle.step.rows
        contexts = [self._forward(row) for row in rows]
        sampled = {
            row.request: self.answer(context, row.sampling)
            for row, context in zip(rows, contexts, strict=True)
            if row.sampling is not None
        }
        # A failed step leaves no tokens behind: who waits for one of them computes garbage that nobody reads.
        self._sampled = {} if handle.error else sampled
        tokens = tuple((sampled[row.request],) if row.request in sampled else () for row in rows)
        handle.result = StepResult(number=handle.step.number, tokens=tokens, seconds=0.0)

    def _forward(self, row: Row) -> list[int]:
        """Write the row's tokens through its page table, then read its whole context back."""
        tokens = row.tokens
        if row.pending:
            tokens = (*tokens[:-1], self._sampled.get(row.request, 0))
        for position, token in enumerate(tokens, row.start):
            self._memory[self._slot(row, position)] = (token, position)
        context = []
        for position in range(row.start + len(tokens)):
            cell = self._memory[self._slot(row, position)]
            assert cell is not None, f"request {row.request} reads position {position}, which was never written"
            token, written_at = cell
            assert written_at == position, f"request {row.request} reads {written_at} where {position} belongs"
            context.append(token)
        return context

    def _slot(self, row: Row, position: int) -> int:
        size = self.kv.page_size
        return row.pages[position // size] * size + position % size

    def _check(self, step: Step) -> None:
        """The contract of `Step`, as far as one step shows it."""
        assert not self.closed, "submitted to a closed runner"
        in_flight = sum(isinstance(work, FakeHandle) for work in self._queue)
        assert in_flight < self.depth, f"{in_flight} steps in flight, depth is {self.depth}"
        assert step.rows, "an empty step"
        assert len({row.request for row in step.rows}) == len(step.rows), "two rows of one request"
        written: set[int] = set()
        for row in step.rows:
            end = row.start + len(row.tokens)
            assert row.tokens, "an empty row"
            assert end <= len(row.pages) * self.kv.page_size, "the page table is too short"
            assert all(PADDING_PAGE < page < self.kv.pages for page in row.pages), f"no such page: {row.pages}"
            assert len(set(row.pages)) == len(row.pages), "a page twice in one table"
            assert end <= self.model.max_model_len, "past the model's end"
            assert not row.pending or self.depth > 1, "nothing is ever pending at depth 1"
            slots = {self._slot(row, position) for position in range(row.start, end)}
            assert not slots & written, "two rows write the same slot"
            written |= slots


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; `EOS` and `BOS` are special and have no text."""

    vocab_size = VOCAB_SIZE
    longest_token = 1
    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return [BOS, *self.encode(f"{lines}assistant: ")]
