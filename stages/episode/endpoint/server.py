"""The server of an endpoint, on the loopback address. A key stands for one episode."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from stages.episode.endpoint.anthropic_api import AnthropicApi
from stages.episode.endpoint.openai_api import OpenAIApi
from stages.episode.endpoint.requests import Api, BadRequestError
from stages.episode.endpoint.session import Session, SessionOverError

HOST = "127.0.0.1"
MODEL = "policy"
BEAT_S = 15.0  # time between comments on a stream whose turn is being sampled
MOST_BYTES = 64 << 20  # of a request
OPENAI, ANTHROPIC = OpenAIApi(), AnthropicApi()
MESSAGES = "/v1/messages"
SERVED = f"POST /v1/chat/completions, POST {MESSAGES} and GET /v1/models"


class EndpointServer:
    """Answers the requests of the `sessions`, by key. `port` is known once it has started."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.port = 0
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_refused])
        app.router.add_post("/v1/chat/completions", _ApiRoute(self.sessions, OPENAI).answer)
        app.router.add_post(MESSAGES, _ApiRoute(self.sessions, ANTHROPIC).answer)
        app.router.add_get("/v1/models", _models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen on a free port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """End."""
        await self._runner.cleanup()


class _ApiRoute:
    """One API's path."""

    def __init__(self, sessions: dict[str, Session], api: Api) -> None:
        self._sessions, self._api = sessions, api

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request once its turn has been sampled."""
        session = self._sessions.get(key_of(request))
        if session is None:
            return self._error(401, "no episode has this key")
        try:
            body = msgspec.json.decode(await request.read())
            if not isinstance(body, dict):
                raise BadRequestError("the body is no JSON object")
            asked = self._api.asked(body)
            if not asked.messages:
                raise BadRequestError("there are no messages")
        except (msgspec.DecodeError, BadRequestError, RecursionError) as error:
            return self._error(400, str(error))
        waiting = asyncio.ensure_future(session.ask(asked))
        try:
            if asked.streams:
                return await self._streamed(request, waiting, lambda done: self._api.events(asked, done))
            return web.json_response(self._api.answer(asked, await waiting))
        except SessionOverError as error:
            return self._error(410, str(error))
        finally:
            waiting.cancel()

    async def _streamed(self, request: web.Request, waiting: asyncio.Future[Any], written: Any) -> web.StreamResponse:
        """Answer as a stream, which is kept alive until the turn is there."""
        await asyncio.wait([waiting], timeout=BEAT_S)
        if waiting.done():
            waiting.result()  # raises before the answer has begun
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        while not waiting.done():
            await response.write(b": the policy is writing\n\n")
            await asyncio.wait([waiting], timeout=BEAT_S)
        try:
            await response.write(written(waiting.result()))
        except SessionOverError as error:
            await response.write(
                b"event: error\ndata: " + msgspec.json.encode(self._api.error(410, str(error))) + b"\n\n"
            )
        await response.write_eof()
        return response

    def _error(self, status: int, text: str) -> web.Response:
        return web.json_response(self._api.error(status, text), status=status)


@web.middleware
async def _refused(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what no route takes as the API of its path does; who has left gets no answer."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        refused: web.HTTPException = error
        text = f"{request.method} {request.path:.100} is not served; this endpoint has {SERVED}"
    except web.HTTPRequestEntityTooLarge as error:
        refused, text = error, f"the request has more than {MOST_BYTES >> 20} MiB"
    except ConnectionError:
        return web.Response()
    api: Api = ANTHROPIC if request.path.startswith(MESSAGES) else OPENAI
    allow = {name: value for name, value in refused.headers.items() if name == "Allow"}
    return web.json_response(api.error(refused.status, text), status=refused.status, headers=allow)


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sluice"}]})


def key_of(request: web.Request) -> str:
    """The key of a request, as OpenAI's or Anthropic's clients send it."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
