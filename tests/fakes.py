"""Stand-ins for the two things that a test does not want: a model and a vocabulary.

`FakeRunner` keeps a simulated paged KV memory: every token is written to its slot together with its
position, and the whole context is read back through the page table before the next token is computed
from it. So a wrong page table, a page that was given away too early or a token at a wrong position
raises or changes the answer, just as it would on a real runner. Standard library only, so that it also
runs in a child process that is meant to be killed.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compiled.step import PADDING_PAGE, KVMemory, KVSpec, Logprob, ModelSpec, Row, Sampling, Step, StepResult
from streamengine.calls.conversation import in_words
from streamengine.calls.format import IN_WORDS, CallFormat, Message, Tool
from streamengine.tokenizer import NO_OPTIONS

EOS = 256
BOS = 257
VOCAB_SIZE = 258
WAIT_S = 30.0
"""Nothing in a test may block for longer."""

GREEDY = Sampling()
CELL_BYTES = 16
"""A token and its position, which is -1 where nothing was written."""

FORGOTTEN = -1
"""Stands in a context for a token that fell out of the window."""

Answer = Callable[[Sequence[int], Sampling], int]
"""``(all tokens so far, sampling) -> next token``."""


def formula(context: Sequence[int], sampling: Sampling) -> int:
    """A lowercase letter that depends on every token of the context, and on the seed unless greedy."""
    seed = 0 if sampling.temperature == 0 else sampling.seed
    return ord("a") + crc32(",".join(map(str, context)).encode(), seed & 0xFFFFFFFF) % 26


def catchy(context: Sequence[int], sampling: Sampling) -> int:
    """Like `formula`, but mostly one of three letters, by the last two tokens only: an answer that repeats itself."""
    whole = formula(context, sampling)
    return ord("a") + formula(context[-2:], GREEDY) % 3 if whole % 6 else whole


def seen(context: Sequence[int], window: int | None) -> list[int]:
    """What is left of ``context`` for a model that sees only the last ``window`` tokens."""
    gone = 0 if window is None else max(0, len(context) - window)
    return [FORGOTTEN] * gone + list(context[gone:])


def likeliest(context: Sequence[int], most: int, answer: Answer = formula) -> tuple[tuple[int, float], ...]:
    """``(token, logprob)``, best first: what greedy `answer` gives, then letters in an order of their own.

    Multiples of 1/64, so that sums are exact and ties are frequent.
    """
    first = answer(context, GREEDY)
    state = crc32(",".join(map(str, context)).encode())
    others = sorted((t for t in range(ord("a"), ord("z") + 1) if t != first), key=lambda t: crc32(bytes([t]), state))
    logprobs = [-(8 + state % 24) / 64]
    for rank in range(len(others)):
        logprobs.append(logprobs[-1] - (state >> rank) % 8 / 64)
    return tuple(zip((first, *others), logprobs, strict=True))[:most]


def logprob(context: Sequence[int], token: int, most: int, answer: Answer = formula) -> Logprob:
    top = likeliest(context, 26, answer)
    ranks = {other: (value, rank) for rank, (other, value) in enumerate(top, 1)}
    value, rank = ranks.get(token, (-20.0, 27))
    return Logprob(token, value, rank, top[:most])


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
    window: int | None = None,
) -> list[int]:
    """The answer that a request must get, whatever else the engine does meanwhile."""
    context = list(prompt)
    stops = set(stop_token_ids)
    for _ in range(max_tokens):
        context.append(answer(seen(context, window), sampling))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def beam_oracle(
    prompt: Sequence[int],
    max_tokens: int,
    width: int,
    *,
    n: int = 1,
    length_penalty: float = 1.0,
    stop_token_ids: Iterable[int] = (),
    answer: Answer = formula,
    window: int | None = None,
) -> list[tuple[list[int], float]]:
    """The ``n`` best answers and their scores, by a search that ends at ``max_tokens`` and no sooner."""
    stops = set(stop_token_ids)
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    found: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        branches = [
            ((*tokens, token), total + value)
            for tokens, total in beams
            for token, value in likeliest(seen([*prompt, *tokens], window), 2 * width, answer)
        ]
        branches.sort(key=lambda branch: -branch[1])
        beams = []
        for tokens, total in branches:
            if tokens[-1] in stops or length == max_tokens:
                found.append((list(tokens), total / length**length_penalty))
            if tokens[-1] not in stops:
                beams.append((tokens, total))
            if len(beams) == width:
                break
    return sorted(found, key=lambda found: -found[1])[:n]


def fake_kv(pages: int = 65, page_size: int = 4, window: int | None = None) -> KVSpec:
    return KVSpec(pages=pages, page_size=page_size, page_bytes=page_size * CELL_BYTES, window=window)


def fake_model(max_model_len: int = 256, folder: str = "") -> ModelSpec:
    return ModelSpec(
        name="fake",
        folder=folder,
        architecture="FakeForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
    )


def memfd(size: int) -> int:
    """Of so many bytes, for ever. Whoever asks closes it."""
    descriptor = os.memfd_create("streamengine-kv-fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


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
    seconds: Callable[[Step], float] = lambda step: 0.0
    shared: bool = False
    """The memory lies in a memfd."""

    steps: list[Step] = field(default_factory=list)
    """Every step that was submitted, those that raised included."""
    warmups: int = 0
    closed: bool = False
    holding: threading.Event = field(default_factory=threading.Event)
    """Set while a step is blocked by `hold`."""

    def __post_init__(self) -> None:
        size = self.kv.pages * self.kv.page_bytes
        self._descriptor = memfd(size) if self.shared else None
        if self._descriptor is None:
            self._bytes = memoryview(bytearray(size))
        else:
            weakref.finalize(self, os.close, self._descriptor)
            self._bytes = memoryview(mmap.mmap(self._descriptor, size))
        self._bytes[:] = b"\xff" * size
        self._cells = self._bytes.cast("q")
        self._queue: deque[FakeHandle | tuple[int, ...]] = deque()
        self._sampled: dict[tuple[int, int], int] = {}
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

    def settle(self) -> None:
        """Forget at once what is to be forgotten before the next step runs: others may write there from now on."""
        while self._queue and not isinstance(pages := self._queue[0], FakeHandle):
            self._queue.popleft()
            self._forget(pages)

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

    def kv_memory(self) -> KVMemory:
        return KVMemory(self._bytes, self.kv.pages, self.kv.page_bytes, self._descriptor)

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
                self._forget(work)

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._page(page)[:] = b"\xff" * self.kv.page_bytes

    def _execute(self, handle: FakeHandle) -> None:
        step = handle.step
        for source, target in step.copies:
            self._page(target)[:] = self._page(source)
        contexts = [self._forward(row) for row in step.rows]
        tokens, logprobs, scores = [], [], []
        for row, context in zip(step.rows, contexts, strict=True):
            ends = range(len(context) - row.drafts, len(context) + 1) if row.sampling else range(0)
            heads = [seen(context[:end], self.kv.window) for end in ends]
            drawn = (self.answer(head, row.sampling) for head in heads if row.sampling)
            sampled = tuple(self._allowed(token, step, row, i) for i, token in enumerate(drawn))
            most = row.sampling.logprobs if row.sampling else None
            tokens.append(sampled)
            logprobs.append(self._logprobs(heads, sampled, most) if most is not None else ())
            heads = [seen(context[: row.start + place], self.kv.window) for place in range(1, len(row.targets) + 1)]
            scores.append(self._logprobs(heads, row.targets, row.targets_top))
        # A failed step leaves no tokens behind: who waits for one of them computes garbage that nobody reads.
        rows = zip(step.rows, tokens, strict=True)
        self._sampled = {} if handle.error else {(row.request, row.index): new[-1] for row, new in rows if new}
        handle.result = StepResult(
            number=step.number,
            tokens=tuple(tokens),
            seconds=self.seconds(step),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            scores=tuple(scores) if any(scores) else (),
        )

    def _allowed(self, token: int, step: Step, row: Row, draft: int) -> int:
        """``token``, or the next one behind it that the row's grammar allows."""
        if row.mask is None:
            return token
        assert step.masks is not None, "a row with a mask in a step without any"
        words = step.masks.wait().cast("I")[(row.mask + draft) * step.masks.words :][: step.masks.words]
        order = [*range(token, VOCAB_SIZE), *range(token)]
        return next(other for other in order if words[other // 32] >> other % 32 & 1)

    def _logprobs(self, heads: Sequence[Sequence[int]], tokens: Sequence[int], most: int) -> tuple[Logprob, ...]:
        return tuple(logprob(head, token, most, self.answer) for head, token in zip(heads, tokens, strict=True))

    def _forward(self, row: Row) -> list[int]:
        """Write the row's tokens through its page table, then read its whole context back.

        What fell out of the window of the row's first token is not there any more.
        """
        tokens = row.tokens
        if row.pending:
            tokens = (*tokens[:-1], self._sampled.get((row.request, row.index), 0))
        for position, token in enumerate(tokens, row.start):
            cell = self._cell(row, position)
            self._cells[cell], self._cells[cell + 1] = token, position
        context: list[int] = []
        first = 0 if self.kv.window is None else max(0, row.start - self.kv.window + 1)
        for position in range(row.start + len(tokens)):
            if position < first:
                context.append(FORGOTTEN)
                continue
            cell = self._cell(row, position)
            token, written_at = self._cells[cell], self._cells[cell + 1]
            assert written_at >= 0, f"request {row.request} reads position {position}, which was never written"
            assert written_at == position, f"request {row.request} reads {written_at} where {position} belongs"
            context.append(token)
        if row.history:
            there = range(first, len(context) - row.pending)
            assert [row.history[i] for i in there] == [context[i] for i in there], "not the history"
        return context

    def _page(self, page: int) -> memoryview:
        return self._bytes[page * self.kv.page_bytes :][: self.kv.page_bytes]

    def _cell(self, row: Row, position: int) -> int:
        """Where the token is in `_cells`; its position is behind it."""
        size = self.kv.page_size
        return row.pages[position // size] * self.kv.page_bytes // 8 + position % size * CELL_BYTES // 8

    def _slot(self, row: Row, position: int) -> int:
        size = self.kv.page_size
        return row.pages[position // size] * size + position % size

    def _check(self, step: Step) -> None:
        """The contract of `Step`, as far as one step shows it."""
        assert not self.closed, "submitted to a closed runner"
        in_flight = sum(isinstance(work, FakeHandle) for work in self._queue)
        assert in_flight < self.depth, f"{in_flight} steps in flight, depth is {self.depth}"
        assert step.rows, "an empty step"
        assert len({(row.request, row.index) for row in step.rows}) == len(step.rows), "two rows of one answer"
        written: set[int] = set()
        for row in step.rows:
            end = row.start + len(row.tokens)
            assert row.tokens, "an empty row"
            assert end <= len(row.pages) * self.kv.page_size, "the page table is too short"
            seen = 0 if self.kv.window is None else max(0, row.start - self.kv.window + 1) // self.kv.page_size
            seen_pages = row.pages[seen:]
            assert all(PADDING_PAGE < page < self.kv.pages for page in seen_pages), f"no such page: {row.pages}"
            assert len(set(seen_pages)) == len(seen_pages), "a page twice in one table"
            assert end <= self.model.max_model_len, "past the model's end"
            assert not row.pending or self.depth > 1, "nothing is ever pending at depth 1"
            assert row.drafts < len(row.tokens) and not (row.pending and row.drafts), "guesses behind nothing"
            assert bool(row.history) == (row.sampling is not None and row.sampling.needs_history), "history"
            slots = {self._slot(row, position) for position in range(row.start, end)}
            assert not slots & written, "two rows write the same slot"
            written |= slots


def byte_tokenizer_json() -> str:
    """What `ByteTokenizer` does, as a ``tokenizer.json``."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{name}>" for name in ("eos", "bos")])
    return str(tokenizer.to_str())


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; `EOS` and `BOS` are special and have no text."""

    vocab_size = VOCAB_SIZE
    longest_token = 1
    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def calls(self) -> CallFormat:
        return IN_WORDS

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        messages = in_words(messages, tools, IN_WORDS)
        lines = "".join(f"{name}={value}\n" for name, value in options.items())
        lines += "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return [BOS, *self.encode(f"{lines}assistant: ")]
