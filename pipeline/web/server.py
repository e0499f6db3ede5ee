"""The server of the web view: read-only routes over a folder of runs. Heavy work runs in threads.

A page receives the rows of a run as server-sent events. An event's id is its end offset in events.jsonl, so a
disconnected page resumes from the last id it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from pipeline.errors import SluiceError
from pipeline.rundir import RunDir
from pipeline.web import STATIC, guard, pages
from pipeline.web.exports import EXPORTS
from pipeline.web.tail import PageBlock, Record

POLL_S = 0.25
BEAT_S = 15.0  # time between comments on an idle stream, to detect dead connections
STREAMS = 128
QUEUE = 64  # blocks a page may lag before its stream is closed; it reconnects by itself
_Piece = tuple[int | None, bytes]  # end offset if it has rows, and payload; an empty payload ends the stream
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Server:
    """Serves the pages of the runs in `folder`, protected by a token. Commands name the folder as it is given."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token
        self.port = 0
        self._records: dict[str, _Followed] = {}

    def app(self) -> web.Application:
        """Return the application; `pages.py` produces its responses."""
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{path:[a-z0-9./-]{1,64}}", self._static)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/runs/{run}/events", self._events)
        app.router.add_get("/api/runs/{run}/export/{kind}", self._export)
        app.router.add_get("/api/runs/{run}/{what}", self._page)
        app.on_shutdown.append(self._end)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refused = guard.refusal(request.method, request.headers, self.port)
        if refused:
            return _headed(web.Response(status=refused[0], text=refused[1]))
        cookie = f"sluice_{self.port}"
        if request.path == "/" and guard.knows(self._token, request.query.get("token")):
            answer = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie(cookie, self._token, httponly=True, samesite="Strict", path="/")
            return _headed(answer)
        if not guard.knows(self._token, request.cookies.get(cookie)):
            return _headed(web.Response(status=401, text="open the address that python -m pipeline.view printed"))
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            return _headed(web.Response(status=error.status, text=error.reason))
        except SluiceError as error:
            return _headed(web.Response(status=404, text=" ".join(" ".join(map(str, error.problems)).split())))
        except OSError as error:
            return _headed(web.Response(status=404, text=f"{error.filename}: it cannot be read: {error.strerror}"))
        return answer if answer.prepared else _headed(answer)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return await self._file("index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return await self._file(request.match_info["path"])

    async def _file(self, name: str) -> web.StreamResponse:
        path = (STATIC / name).resolve()
        if not path.is_relative_to(STATIC) or path.suffix not in TYPES or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        return _json(await asyncio.to_thread(pages.runs, self._folder))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        make = pages.PAGES.get(request.match_info["what"])
        if make is None:
            raise web.HTTPNotFound
        query = {name: request.query[name] for name in ("step", "other") if name in request.query}
        if guard.whole(query.get("step", "0")) is None:
            raise web.HTTPBadRequest(reason="step is a number")
        if "other" in query:
            self._path(query["other"])
        return _json(await asyncio.to_thread(make, self._path(request.match_info["run"]), query))

    async def _export(self, request: web.Request) -> web.StreamResponse:
        path, kind = self._path(request.match_info["run"]), request.match_info["kind"]
        if kind not in EXPORTS:
            raise web.HTTPNotFound
        suffix, content_type, make = EXPORTS[kind]
        answer = web.StreamResponse(
            headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(path.name + suffix, safe='')}"}
        )
        answer.content_type = content_type
        pieces = make(path)
        piece = await asyncio.to_thread(next, pieces, "")  # what cannot be read is mostly found here
        _headed(answer)
        await answer.prepare(request)
        try:
            while piece:
                await answer.write(piece.encode())
                piece = await asyncio.to_thread(next, pieces, "")
        except (SluiceError, OSError):  # a file that ends here must not look complete
            if request.transport:
                request.transport.abort()
        return answer

    async def _events(self, request: web.Request) -> web.StreamResponse:
        followed = self._followed(self._path(request.match_info["run"]))
        given = request.headers.get("Last-Event-ID", request.query.get("from", "0"))
        offset = guard.whole(given)
        if offset is None:
            raise web.HTTPBadRequest(reason="Last-Event-ID is a byte offset")
        if sum(len(one.queues) for one in self._records.values()) >= STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{STREAMS} pages are open; close one")
        await followed.opened()
        answer = _headed(web.StreamResponse(headers={"Content-Type": "text/event-stream"}))
        await answer.prepare(request)
        try:
            async for piece in followed.stream(offset):
                await answer.write(piece)
        except (OSError, SluiceError):
            pass  # the page disconnected, or the record is damaged from here on
        return answer

    def _path(self, name: str) -> Path:
        """Return the directory of a run. Raises HTTPNotFound if no run has that name, or it has no record yet."""
        path = self._folder / name
        if not guard.is_run_name(name) or path.is_symlink() or not RunDir(path).plan.is_file():
            raise web.HTTPNotFound(reason="there is no such run")
        if link := guard.outward(path, pages.READ):
            raise web.HTTPNotFound(reason=f"{link} of this run is a link: it is not followed")
        if not RunDir(path).events.is_file():
            raise web.HTTPNotFound(reason="the run has not started yet")
        return path

    def _followed(self, path: Path) -> _Followed:
        if path.name not in self._records:
            self._records[path.name] = _Followed(path)
        return self._records[path.name]

    async def _end(self, app: web.Application) -> None:
        for followed in self._records.values():
            followed.end()


class _Followed:
    """A record and the pages that follow it. While any page is connected, one task reads the record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: Record | None = None
        self._opening = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self.queues: set[asyncio.Queue[_Piece]] = set()

    async def stream(self, offset: int) -> AsyncIterator[bytes]:
        """Yield the rows from a byte offset, then everything new."""
        queue: asyncio.Queue[_Piece] = asyncio.Queue(QUEUE)
        record = await self.opened()
        if offset > record.offset:
            offset = 0  # the record was truncated or replaced: the page starts from the beginning
            yield _event("again", {}, None)
        yield _event("now", record.now() | {"loading": True}, None)  # a page shows this while the rows arrive
        while block := await asyncio.to_thread(record.block, offset):
            offset = block.offset
            yield _rows(block)
        self.queues.add(queue)  # new rows arrive here; rows written meanwhile are read below
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(record))
        try:
            while block := await asyncio.to_thread(record.block, offset):
                offset = block.offset
                yield _rows(block)
            yield _event("now", record.now(), None)
            while True:
                try:
                    until, piece = await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    until, piece = None, b": still here\n\n"
                if not piece:
                    return
                if until is None or until > offset:
                    offset = until or offset
                    yield piece
        finally:
            self.queues.discard(queue)

    async def opened(self) -> Record:
        """Return the record, read to its end. The first caller reads it for all. Raises GraphError if it is damaged."""
        async with self._opening:
            if self._record is None:
                self._record = await asyncio.to_thread(Record.read, self._path)
            return self._record

    def end(self) -> None:
        """Close every stream."""
        if self._reader:
            self._reader.cancel()
        for queue in list(self.queues):
            self._give(queue, (None, b""))

    async def _read(self, record: Record) -> None:
        """Follow the record while pages are connected."""
        shown: Any = None
        while self.queues:
            try:
                while block := await asyncio.to_thread(record.advance):
                    self._send((block.offset, _rows(block)))
            except SluiceError:  # the record is damaged from here on: a page that comes back gets the reason
                self._record = None
                self._send((None, b""))
                return
            now = record.now()
            if now != shown:
                shown = now
                self._send((None, _event("now", now, None)))
            await asyncio.sleep(POLL_S)

    def _send(self, piece: _Piece) -> None:
        for queue in list(self.queues):
            self._give(queue, piece)

    def _give(self, queue: asyncio.Queue[_Piece], piece: _Piece) -> None:
        if queue.full():  # the page lags too far: close its stream; it reconnects where it was
            while not queue.empty():
                queue.get_nowait()
            piece = (None, b"")
        queue.put_nowait(piece)


def _rows(block: PageBlock) -> bytes:
    return _event("rows", block.rows, block.offset)


def _event(name: str, data: Any, offset: int | None) -> bytes:
    head = f"event: {name}\n" + (f"id: {offset}\n" if offset is not None else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _json(data: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def _headed(answer: Any) -> Any:
    answer.headers.update(guard.HEADERS)
    return answer


async def serve(folder: Path, token: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve on the loopback address until canceled; call `ready` with the port once it listens.

    Raises OSError if the port is taken.
    """
    server = Server(folder, token)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        server.port = runner.addresses[0][1]
        ready(server.port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
