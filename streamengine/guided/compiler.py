"""Grammars become matchers here, a few at a time, while those who asked for them wait.

What was compiled before is copied, what was refused before is refused again; both are remembered, the
least recently used forgotten first. Time comes in as an argument.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from streamengine.errors import GrammarError, Overloaded, RequestError
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Matcher

COMPILE_S = 10.0
"""A request whose grammar takes longer is refused. The limits of `schema` keep all but contrived ones far below."""

THREADS = 2
MAX_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 16 * 2**20
MAX_WAITING = 32
"""Different grammars that one tenant may have in the making."""

Outcome = Matcher | RequestError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    tenant: str
    deadline: float
    future: "Future[Outcome]"


class GrammarCompiler:
    """Compiles with ``compile`` (see `Vocabulary.compile`), which other threads may call."""

    def __init__(self, compile: Callable[[Grammar], Matcher]) -> None:
        self._compile = compile
        self._threads = ThreadPoolExecutor(THREADS, "streamengine-grammar")
        self._jobs: dict[int, _Job] = {}
        self._same: dict[Grammar, Future[Outcome]] = {}
        self._remembered: OrderedDict[Grammar, Outcome] = OrderedDict()
        self._bytes = 0
        self._counts: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    def start(self, key: int, grammar: Grammar, tenant: str, now: float) -> None:
        """Have ``grammar`` compiled for ``key``; `done` gives it back. Raises Overloaded."""
        known = self._remembered.get(grammar)
        if isinstance(known, Matcher) and known.error:
            known = self._remembered[grammar] = GrammarError(f"the grammar cannot be followed: {known.error}")
        self._counts["hits" if known else "compiled"] += 1
        if known is not None:
            self._remembered.move_to_end(grammar)
            future: Future[Outcome] = Future()
            future.set_result(known)
        else:
            if grammar not in self._same:
                self._check_waiting(tenant)
                self._same[grammar] = self._threads.submit(self._run, grammar)
            future = self._same[grammar]
        self._jobs[key] = _Job(grammar, tenant, now + COMPILE_S, future)

    def _check_waiting(self, tenant: str) -> None:
        waiting = len({job.grammar for job in self._jobs.values() if job.tenant == tenant})
        if waiting >= MAX_WAITING:
            raise Overloaded(f"{waiting} grammars of yours are being compiled, which is the most", waiting=waiting)

    def cancel(self, key: int) -> bool:
        """Forget ``key``; False if it is not here. What nobody else waits for is not begun."""
        job = self._jobs.pop(key, None)
        if job is None:
            return False
        if all(other.grammar != job.grammar for other in self._jobs.values()) and job.future.cancel():
            self._same.pop(job.grammar, None)
        return True

    def done(self, now: float) -> list[tuple[int, Outcome]]:
        """Whose grammar is there, in the order of `start`, each with a matcher of its own; or refused."""
        for grammar in [grammar for grammar, future in self._same.items() if future.done()]:
            # Also those that nobody waits for any more.
            self._remember(grammar, self._same.pop(grammar).result())
        ended: list[tuple[int, Outcome]] = []
        for key, job in list(self._jobs.items()):
            if job.future.done():
                outcome = job.future.result()
            elif now >= job.deadline:
                outcome = GrammarError(f"the grammar took longer than {COMPILE_S:g} s to compile")
            else:
                continue
            del self._jobs[key]
            ended.append((key, outcome.copy() if isinstance(outcome, Matcher) else outcome))
        return ended

    def wait(self, timeout_s: float) -> None:
        """Until one is done, or for ``timeout_s``."""
        wait([job.future for job in self._jobs.values()], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def statistics(self) -> dict[str, float]:
        return {
            "grammars_compiling": len(self._jobs),
            "grammars_compiled": self._counts["compiled"],
            "grammar_hits": self._counts["hits"],
        }

    def _run(self, grammar: Grammar) -> Outcome:
        try:
            return self._compile(grammar)
        except RequestError as error:
            return error
        except BaseException as error:  # a panic of the grammar engine is no Exception
            logger.exception("a grammar did not compile")
            return GrammarError(f"the grammar engine failed: {type(error).__name__}")

    def _remember(self, grammar: Grammar, outcome: Outcome) -> None:
        self._remembered[grammar] = outcome
        self._bytes += len(grammar.text)
        while len(self._remembered) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
            oldest, _ = self._remembered.popitem(last=False)
            self._bytes -= len(oldest.text)
