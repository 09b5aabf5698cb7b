"""OpenAI's routes: completions, models, and vLLM's tokenize and detokenize beside them."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compiled.step import ModelSpec
from streamengine.engine import Engine, Generate
from streamengine.errors import StreamEngineError
from streamengine.server.http import Http, decode, unless_gone
from streamengine.server.openai.answers import Echo, Shape
from streamengine.server.openai.calls import Asked, Call
from streamengine.server.openai.requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    lenient,
)
from streamengine.server.openai.translate import (
    chat_generate,
    check_body,
    check_model,
    completion_generates,
    in_words_of,
    tokenizing,
)
from streamengine.server.service import Service
from streamengine.server.sse import EventStream
from streamengine.text import Detokenizer


def openai_routes(service: Service) -> list[Route]:
    http = Http(service, {422: 400})  # what OpenAI cannot do is a bad request
    api = OpenAI(http)
    return [
        http.route("/v1/chat/completions", api.chat, "POST"),
        http.route("/v1/completions", api.complete, "POST"),
        http.route("/v1/models", api.models, "GET"),
        http.route("/v1/models/{id:path}", api.model, "GET"),
        http.route("/v1/tokenize", api.tokenize, "POST"),
        http.route("/v1/detokenize", api.detokenize, "POST"),
    ]


@contextmanager
def _in_words_of(body: Body) -> Iterator[None]:
    try:
        yield
    except StreamEngineError as error:
        raise in_words_of(body, error) from error


class OpenAI:
    """The answers of one server."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._created = int(time.time())
        self._worker = anyio.CapacityLimiter(1)
        """For texts of any length: working on them may not take the threads that requests wait for."""
        strict = not http.config.ignore_unknown_fields
        self._chat: type[ChatRequest] = ChatRequest if strict else lenient(ChatRequest)
        self._completion: type[CompletionRequest] = CompletionRequest if strict else lenient(CompletionRequest)

    # completions

    async def chat(self, request: Request) -> Response:
        engine = self._http.streams.engine
        body = await self._http.read(request, partial(decode, kind=self._chat))
        check_body(body, engine.model.name)
        with _in_words_of(body):
            asked = self._asked("chat", body, bool(body.logprobs))
            return await self._answer(request, asked, [chat_generate(body)])

    async def complete(self, request: Request) -> Response:
        engine = self._http.streams.engine
        body = await self._http.read(request, partial(decode, kind=self._completion))
        check_body(body, engine.model.name)
        with _in_words_of(body):
            asked = self._asked("text", body, body.logprobs is not None)
            return await self._answer(request, asked, completion_generates(body), echo=bool(body.echo))

    def _asked(self, shape: Shape, body: Body, logprobs: bool) -> Asked:
        prefix = "cmpl" if shape == "text" else "chatcmpl"
        model = self._http.streams.engine.model.name
        id, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        return Asked(shape=shape, id=id, created=created, model=model, body=body, logprobs=logprobs)

    async def _answer(
        self, request: Request, asked: Asked, generates: Sequence[Generate], echo: bool = False
    ) -> Response:
        streams = self._http.streams
        call = Call(asked, streams)

        async def work() -> Response:
            for generate in generates:
                generate, repeated = await self._echo(streams.engine, generate) if echo else (generate, None)
                call.add(await streams.open_all(request.state.principal, generate), repeated)
            if asked.body.stream:
                if any(generate.response_format or generate.tools for generate in generates):
                    await call.settled(self._http.config.heartbeat_s)
                return EventStream(call, call.bell, self._http.config.heartbeat_s)
            return Response(await call.whole(), media_type="application/json")

        try:
            response = await unless_gone(request, work)
        except BaseException:
            call.close()
            raise
        if not asked.body.stream:
            call.close()
        return response

    async def _echo(self, engine: Engine, generate: Generate) -> tuple[Generate, Echo]:
        """The same request by ids, and the prompt as these ids write it."""
        prompt = await engine.intake.read(generate, single=False)
        tokenizer = engine.intake.tokenizer

        def work() -> Echo:
            detokenizer = Detokenizer(tokenizer.decode)
            entries = (*detokenizer.push(prompt.ids), *detokenizer.finish())
            return Echo(entries, tokenizer.token_bytes(prompt.ids[0]))

        echo = await anyio.to_thread.run_sync(work, limiter=self._worker)
        return structs.replace(generate, prompt=None, token_ids=prompt.ids), echo

    # models

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(self._http.streams.engine.model)]})

    async def model(self, request: Request) -> Response:
        model = self._http.streams.engine.model
        check_model(request.path_params["id"], model.name)
        return JSONResponse(self._model(model))

    def _model(self, model: ModelSpec) -> dict[str, str | int]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "streamengine",
            "max_model_len": model.max_model_len,
        }

    # tokens

    async def tokenize(self, request: Request) -> Response:
        engine = self._http.streams.engine
        body = await self._http.read(request, partial(decode, kind=TokenizeRequest))
        check_model(body.model, engine.model.name)
        encode = tokenizing(body, engine.intake.tokenizer)
        ids = await anyio.to_thread.run_sync(encode, limiter=self._worker)
        # msgspec: a million ids take the standard library's encoder a tenth of a second of everybody's time.
        answer = msgspec.json.encode({"count": len(ids), "max_model_len": engine.model.max_model_len, "tokens": ids})
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        engine = self._http.streams.engine
        body = await self._http.read(request, partial(decode, kind=DetokenizeRequest))
        check_model(body.model, engine.model.name)
        ids = engine.intake.check_ids(body.tokens, "tokens")
        text = await anyio.to_thread.run_sync(engine.intake.tokenizer.decode, ids, limiter=self._worker)
        return JSONResponse({"prompt": text})
