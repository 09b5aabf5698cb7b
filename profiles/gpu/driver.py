"""Enough of a scheduler to keep a runner busy: rows with pages of their own, which get one token a step each."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiled.step import PADDING_PAGE, Handle, Row, Runner, Sampling, Step


@dataclass
class Times:
    """Of each step, in seconds: ``host`` to build and submit it, ``blocked`` waiting for a result, ``all`` of it."""

    host: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)


class Parity:
    """Masks that hang on the newest token of each row: behind an even one comes an odd one."""

    def __init__(self, tokens: list[list[int]], vocabulary: int) -> None:
        self._tokens = tokens
        self.words = -(-vocabulary // 32)

    def wait(self) -> memoryview:
        rows = np.array([0x55555555 << (row[-1] % 2 == 0) for row in self._tokens], np.uint32)
        return memoryview(rows[:, None].repeat(self.words, axis=1).tobytes())


class Driver:
    """``prompts`` become rows 0, 1, …; call `prefill`, then `decode` as often as you like."""

    def __init__(self, runner: Any, prompts: list[list[int]], room: int, sampling: Sampling | None = None) -> None:
        """``room``: tokens that a row may grow by."""
        self._runner: Runner = runner
        self._sampling = sampling or Sampling()
        size = runner.kv.page_size
        self.tokens = [list(prompt) for prompt in prompts]
        self._pages: list[tuple[int, ...]] = []
        page = PADDING_PAGE + 1
        for prompt in prompts:
            count = -(-(len(prompt) + room) // size)
            self._pages.append(tuple(range(page, page + count)))
            page += count
        if page > runner.kv.pages:
            raise ValueError(f"{page} pages are needed, there are {runner.kv.pages}")
        self._number = 0
        self._flying: deque[tuple[Handle, list[int]]] = deque()

    def prefill(self, budget: int) -> None:
        """All prompts, in steps of ``budget`` tokens; each row samples its first token at the end of its prompt."""
        steps: list[list[Row]] = [[]]
        room = budget
        for row, prompt in enumerate(self.tokens):
            done = 0
            while done < len(prompt):
                part = prompt[done : done + room]
                last = done + len(part) == len(prompt)
                steps[-1].append(Row(row, tuple(part), done, self._pages[row], self._sampling if last else None))
                done, room = done + len(part), room - len(part)
                if not room:
                    steps.append([])
                    room = budget
        for rows in filter(None, steps):
            result = self._submit(rows).wait()
            for row, sampled in zip(rows, result.tokens, strict=True):
                self.tokens[row.request] += sampled

    def decode(
        self,
        steps: int,
        *,
        depth: int | None = None,
        guided: bool = False,
        submitted: Callable[[], None] = lambda: None,
    ) -> Times:
        """``steps`` tokens for every row, with as many steps in flight as the runner takes (or ``depth``). ``guided``:
        by `Parity`. ``submitted`` is called after each."""
        depth = self._runner.depth if depth is None else depth
        times, length = Times(), [len(row) for row in self.tokens]
        began = time.perf_counter()
        for _ in range(steps):
            started = time.perf_counter()
            pending = bool(self._flying)
            rows = [
                Row(
                    request=i,
                    tokens=(0 if pending else tokens[-1],),
                    start=length[i] - 1,
                    pages=self._pages[i],
                    sampling=self._sampling,
                    pending=pending,
                    mask=i if guided else None,
                )
                for i, tokens in enumerate(self.tokens)
            ]
            length = [one + 1 for one in length]
            self._flying.append((self._submit(rows, guided), list(range(len(rows)))))
            submitted()
            launched = time.perf_counter()
            if len(self._flying) >= depth:
                self._take()
            ended = time.perf_counter()
            times.host.append(launched - started)
            times.blocked.append(ended - launched)
            times.all.append(ended - began)
            began = ended
        while self._flying:
            self._take()
        return times

    def _take(self) -> None:
        handle, rows = self._flying.popleft()
        for row, sampled in zip(rows, handle.wait().tokens, strict=True):
            self.tokens[row] += sampled

    def _submit(self, rows: list[Row], guided: bool = False) -> Handle:
        self._number += 1
        masks = Parity(self.tokens, self._runner.model.vocab_size) if guided else None
        return self._runner.submit(Step(self._number, tuple(rows), masks=masks))


def one_step(runner: Any, rows: list[tuple[list[int], int]]) -> Step:
    """A step of ``(tokens, start)`` rows that all sample, each with pages of its own."""
    page, made = PADDING_PAGE + 1, []
    for i, (tokens, start) in enumerate(rows):
        count = -(-(start + len(tokens)) // runner.kv.page_size)
        made.append(Row(i, tuple(tokens), start, tuple(range(page, page + count)), Sampling()))
        page += count
    return Step(0, tuple(made))
