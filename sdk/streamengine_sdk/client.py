"""The client: one socket, opened when it is needed, with all requests on it.

Owns the connection's task and the request ids. Refuses: anything about a single stream.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import isfinite
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import anyio
import msgspec
from anyio.abc import TaskGroup

from streamengine_sdk import wire
from streamengine_sdk.connection import Connection
from streamengine_sdk.errors import InvalidRequest, Overloaded, Timeout
from streamengine_sdk.events import Result
from streamengine_sdk.feed import Feed
from streamengine_sdk.stream import Timeouts, TokenStream
from streamengine_sdk.transport import Endpoint, Transport, WebSocketTransport

BLIND_CHARACTERS = 64 * 1024
"""A longer request waits for `hello` and its limit: too large a message would end the whole connection."""


class Options(TypedDict, total=False):
    """What a request may say beside its prompt. ``None`` is the same as leaving it out.

    ``messages`` (a chat) or ``token_ids`` take the place of the prompt. ``return_token_ids`` asks for the ids
    of the answer in `Delta.tokens` and `Result.token_ids`, ``logprobs`` for its log-probabilities in the fields of
    that name, with ``top_logprobs`` likeliest tokens beside each; a request of higher ``priority`` goes first;
    ``timeouts`` replaces the client's. The others have the names and meanings of the Chat Completions API or
    else of vLLM's sampling parameters, and the server's defaults.
    """

    messages: Sequence[Mapping[str, Any]] | None
    token_ids: Sequence[int] | None
    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    priority: int | None
    return_token_ids: bool | None
    timeouts: Timeouts | None


class AsyncClient:
    """A client for asyncio and trio.

    Args:
        url: ``http(s)://`` or ``ws(s)://``; without a path it is ``/v1/stream``.
        token: sent as ``Authorization: Bearer``.
        timeouts: for all requests that bring none.
        transport: makes the connection; another one than a WebSocket in tests.

    Raises:
        ValueError: the URL or the token cannot be used.

    Example::

        async with AsyncClient("http://127.0.0.1:8000") as client:
            async for event in client.stream("Why is the sky blue?", max_tokens=200):
                match event:
                    case events.Delta(text=text):
                        print(text, end="", flush=True)
                    case events.Done(usage=usage):
                        print(f"\\n{usage.completion_tokens} tokens")

    Streams share the socket. When it breaks, each open stream raises `ConnectionLost`, and the next request
    opens another one. Leaving the ``async with`` cancels what still runs.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        transport: Callable[[Endpoint], Transport] = WebSocketTransport,
    ) -> None:
        self._endpoint = Endpoint.parse(url, token)
        self._timeouts = timeouts or Timeouts()
        self._transport = transport
        self._ids = count(1)
        self._connection: Connection | None = None
        self._connecting = anyio.Lock(fast_acquire=True)
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this client is open already")
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._tasks is not None, "entered before"
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        # Not told of the error: it would come back wrapped in a group, and users could not catch it by its name.
        await tasks.__aexit__(None, None, None)

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> TokenStream:
        """Ask for an answer; nothing is sent before the result is used.

        Args:
            prompt: plain text to go on with, no chat template; or give ``messages`` or ``token_ids``.
            options: see `Options`.

        Raises:
            InvalidRequest: at once, for what cannot be sent.
            TypeError: an unknown option, or timeouts that are none.

        Example::

            async with client.stream(messages=[{"role": "user", "content": "hi"}], temperature=0) as stream:
                async for text in stream.text:
                    print(text, end="")
                    if len(stream.snapshot) > 1000:
                        await stream.cancel()
                result = await stream.result()
        """
        timeouts = options.pop("timeouts", None)
        timeouts = self._timeouts if timeouts is None else timeouts
        if not isinstance(timeouts, Timeouts):
            raise TypeError(f"timeouts must be Timeouts, not {type(timeouts).__name__}")
        message = _request(f"r{next(self._ids)}", prompt, options, timeouts)
        try:
            text = wire.encode(message)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the request is no JSON: {error}") from error
        return TokenStream(partial(self._send, message, text, timeouts), timeouts)

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Result:
        """The whole answer at once; arguments and errors are those of `stream`. Cancelling it cancels the request.

        Example::

            result = await client.generate("2 + 2 =", max_tokens=1, temperature=0)
            print(result.text, result.usage.completion_tokens)
        """
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    async def ping(self) -> float:
        """Seconds of one round trip; opens the connection if there is none."""
        connection = await self._connected(self._timeouts.connect)
        sent = anyio.current_time()
        await connection.ping()
        return anyio.current_time() - sent

    async def _send(self, message: wire.Generate, text: str, timeouts: Timeouts) -> tuple[Connection, Feed]:
        connection = await self._connected(timeouts.connect, greeted=len(text) > BLIND_CHARACTERS)
        feed = connection.open(
            message.id, text, with_tokens=message.delivery.token_ids, with_logprobs=bool(message.logprobs)
        )
        return connection, feed

    async def _connected(self, seconds: float | None, *, greeted: bool = False) -> Connection:
        try:
            with anyio.fail_after(seconds):
                async with self._connecting:
                    connection = await self._usable_connection()
                if greeted:
                    await connection.greeted()
                return connection
        except TimeoutError:
            error = Timeout(f"no connection to {self._endpoint.url} within {seconds} s")
            error.kind = "connect"
            raise error from None

    async def _usable_connection(self) -> Connection:
        connection = self._connection
        if connection is not None and connection.error is None:
            if connection.goaway is None:
                return connection
            if not connection.goaway.reconnect:
                raise Overloaded(f"the server goes away: {connection.goaway.reason}", code="shutting_down")
        self._running()
        transport = self._transport(self._endpoint)
        await transport.connect()
        try:
            tasks = self._running()
        except RuntimeError:
            await transport.close()
            raise
        self._connection = Connection(transport)
        tasks.start_soon(self._connection.run)
        return self._connection

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise RuntimeError("the client is not open: use it in `async with`")
        return self._tasks


def _request(id: str, prompt: str | None, options: Options, timeouts: Timeouts) -> wire.Generate:
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if prompt is not None:
        given["prompt"] = prompt
    sources = [name for name in ("prompt", "messages", "token_ids") if name in given]
    if len(sources) != 1:
        text = f"give exactly one of prompt, messages and token_ids, not {' and '.join(sources) or 'none'}"
        raise InvalidRequest(text, param=sources[-1] if sources else "prompt")
    for name, value in given.items():
        try:
            given[name] = _TRANSLATE.get(name, _exact)(value)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be sent: {error}", param=name) from error
    given["delivery"] = {"token_ids": given.pop("return_token_ids", False)}
    if timeouts.queue is not None:
        given["timeouts"] = {"queue_s": timeouts.queue}
    try:
        return msgspec.convert({"id": id, **given}, wire.Generate)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=wire.field_of(str(error))) from error


def _exact(value: Any) -> Any:
    """Numbers as JSON has them, whatever library they are from."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    if not isfinite(value):
        raise ValueError(f"{value} is no number in JSON")
    return float(value)


def _ids(value: Any) -> list[int]:
    return list(map(operator.index, value))


_TRANSLATE: dict[str, Callable[[Any], Any]] = {
    "token_ids": _ids,
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "bad_words": lambda words: [word if isinstance(word, str) else _ids(word) for word in words],
    "logit_bias": lambda biases: {str(token): _exact(bias) for token, bias in biases.items()},
    "messages": lambda messages: [dict(it) if isinstance(it, Mapping) else it for it in messages],
    "stop": lambda stops: [stops] if isinstance(stops, str) else list(stops),
}
