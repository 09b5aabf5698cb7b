"""One answer of a request on its way: its tokens become text, calls of tools, log-probabilities and timing. Pure."""

import secrets
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from compiled.step import Logprob
from streamengine.calls.parser import CallParser
from streamengine.errors import InvalidRequest, QueueTimeout, StreamEngineError, from_code
from streamengine.intake import Prompt
from streamengine.log import Guided, Log, Outcome, TokenLogprob
from streamengine.request import QUEUE_TIMEOUT, Delta, Finish, FinishReason, Request
from streamengine.sampling import SamplingParams
from streamengine.text import Detokenizer, Entry
from streamengine.timing import Stopwatch
from streamengine.tokenizer import Tokenizer

STOP_TOKEN_CAUSES = ("eos", "stop_token")


class Choice:
    """One of a request's answers: its tokens become text, log-probabilities and timing in ``log``.

    Args:
        submitted: when the request came, in seconds like every other time here.
        token_bytes: what one token writes.
        keeps_stop: the token that ends the answer is part of its text.
        schema: that its text is to be held against; what it is not certain to keep to, for ``warnings``.
    """

    def __init__(
        self,
        log: Log,
        detokenizer: Detokenizer,
        submitted: float,
        token_bytes: Callable[[int], bytes],
        keeps_stop: bool = False,
        schema: str | None = None,
        warnings: tuple[str, ...] = (),
        calls: CallParser | None = None,
        continued: int = 0,
    ) -> None:
        self.log = log
        self.schema = schema
        self.unjudged: Outcome | None = None
        """It has ended, but for `judge`."""
        self.stopwatch = Stopwatch(submitted, continued)
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._keeps_stop = keeps_stop
        self._warnings = warnings
        self._calls = calls
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose entries are held back."""
        self._end_token: int | None = None
        """It ended an answer that was begun elsewhere, as the core will say."""

    @property
    def over(self) -> bool:
        """Nothing more can come."""
        return self.log.ended or self.unjudged is not None

    def begin(self, request: Request) -> None:
        """What another engine answered: the text is made again, so the log is that of the whole answer.

        Raises:
            InvalidRequest: the answer ends before the last of these tokens.
        """
        tokens = request.answered
        self.log.continued = len(tokens)
        if request.sampling.logprobs is not None:
            self.log.logprobs_after = len(tokens)
        if tokens[-1] in request.stop_token_ids and not self._keeps_stop:
            tokens, self._end_token = tokens[:-1], tokens[-1]
        for index, token in enumerate(tokens):
            if self._detokenizer.stop_sequence is not None:
                text = f"token {index} of continues comes after the stop string that ends the answer"
                raise InvalidRequest(text, param="continues")
            self._append(self._detokenizer.push((token,)))

    def apply(self, delta: Delta, now: float, queue_s: float | None) -> None:
        """What one step did. It is `over` afterwards if ``delta`` has a finish or completes a stop string."""
        finish = delta.finish
        self.stopwatch.tokens(len(delta.tokens), now, delta.forced)
        assert len(delta.logprobs) in (0, len(delta.tokens)), "a token without a log-probability"
        self._logprobs += self.spell(delta.logprobs)
        self.log.beam_score = delta.beam_score
        tokens, end_token = delta.tokens, self._end_token
        if finish is not None and finish.cause in STOP_TOKEN_CAUSES and tokens and not self._keeps_stop:
            tokens, end_token = tokens[:-1], tokens[-1]
        self._append(self._detokenizer.push(tokens))
        # What is held when a server shuts down is not final: another server may go on with the answer.
        if finish is not None and finish.cause != "shutdown":
            self._append(self._detokenizer.finish(end_token, cut=finish.reason != "stop"))
        # A stop string that the last allowed token completes comes before the length.
        if self._detokenizer.stop_sequence is not None:
            self._end("stop", now)
        elif finish is not None:
            self._finish(finish, now, queue_s)

    def finish(self, finish: Finish, now: float, queue_s: float | None) -> None:
        """End it with what there is."""
        self._append(self._detokenizer.finish(cut=True))
        self._finish(finish, now, queue_s)

    def fail(self, error: StreamEngineError) -> None:
        """End it in ``error``, after the text that was held."""
        if not self.over:
            self._append(self._detokenizer.finish(cut=True))
        self.log.fail(error)

    def spell(self, logprobs: Sequence[Logprob]) -> list[TokenLogprob]:
        """With the tokens' text beside their ids."""
        return [
            self._spell(
                item.token,
                item.logprob,
                item.rank,
                tuple(self._spell(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)),
            )
            for item in logprobs
        ]

    def _spell(self, token: int, logprob: float, rank: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._token_bytes(token)
        text = data.decode(errors="replace")
        # Rounding may lift a certain token's above 0, which is no logarithm of a probability.
        return TokenLogprob(token=token, text=text, bytes=data, logprob=min(logprob, 0.0), rank=rank, top=top)

    def _append(self, entries: list[Entry]) -> None:
        for after, call in self._detokenizer.switches:
            self.log.switch(after, call)
        self._detokenizer.switches.clear()
        told = len(entries) - max(0, self.log.logprobs_after - len(self.log)) if self._logprobs else 0
        self.log.append(entries, self._logprobs[:told])
        del self._logprobs[:told]

    def _finish(self, finish: Finish, now: float, queue_s: float | None) -> None:
        if finish.reason == "error":
            self.log.fail(from_code(finish.cause, finish.message, param=finish.param))
        elif finish.reason == "cancelled" and finish.cause == QUEUE_TIMEOUT:
            self.log.fail(QueueTimeout(f"no step for it within {queue_s} s", param="queue_s"))
        else:
            self._end(finish.reason, now, finish.cause if finish.reason == "cancelled" else None)

    def _end(self, reason: FinishReason, now: float, cause: str | None = None) -> None:
        if reason == "stop" and self._calls is not None and self._calls.whole:
            reason = "tool_calls"
        outcome = Outcome(
            finish_reason=reason,
            cause=cause,
            stop_sequence=self._detokenizer.stop_sequence,
            usage=self.log.usage,
            timing=self.stopwatch.timing(now),
        )
        if self.schema is None:
            self.log.end(outcome)
            return
        self.unjudged = outcome
        if reason != "stop":
            self.judge(valid=False)

    def judge(self, *, valid: bool | None) -> None:
        """Whether an answer that is `unjudged` keeps to its schema ends it."""
        assert self.unjudged is not None, "judged twice, or too soon"
        self.log.end(structs.replace(self.unjudged, guided=Guided(valid=valid, warnings=self._warnings)))
        self.unjudged = None


def open_choices(
    request: Request, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, submitted: float
) -> list[Choice]:
    """One for each answer that ``request`` draws, with an empty log: see `Choice.begin`."""
    return [_open_choice(request, prompt, params, tokenizer, submitted) for _ in range(request.n)]


def _open_choice(
    request: Request, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, submitted: float
) -> Choice:
    grammar, decode, keeps_stop = request.grammar, tokenizer.decode, params.include_stop_str_in_output
    calls = None
    if prompt.calls is not None:
        calls = CallParser(prompt.calls)
        if prompt.calls.tokens:  # a marker may be a special token, which else has no text
            decode, keeps_stop = partial(tokenizer.decode, special=True), False
    detokenizer = Detokenizer(
        decode, request.prompt, params.stop, min_tokens=params.min_tokens, include_stop=keeps_stop, calls=calls
    )
    json = grammar is not None and grammar.kind == "json_schema"
    log = Log("st_" + secrets.token_urlsafe(16), len(request.prompt), json=json)
    log.seed = request.sampling.seed
    return Choice(
        log,
        detokenizer,
        submitted,
        tokenizer.token_bytes,
        keeps_stop,
        grammar.text if grammar is not None and grammar.lenient else None,
        prompt.warnings,
        calls,
        len(request.answered),
    )
