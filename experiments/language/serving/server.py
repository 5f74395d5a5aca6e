"""The HTTP server: requests in JSON, answers in JSON or, streamed, in lines of JSON.

    POST /generate   continues a text; the fields are those of `RequestBody`
    GET /health      the counts of the engine

Every error is a JSON object {"error": "..."}; a stream that has begun ends with one.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from experiments.language.serving.engine import Engine, Event, GenerationRequest, Refused
from experiments.language.serving.requests import generation_request, read_body
from experiments.language.text import Characters


_BODY_SECONDS = 10.0  # for a client to send its body
_END_SECONDS = 5  # for clients to read the last events when the server stops


class LanguageServer(uvicorn.Server):
    """A server for one engine, which has started; it stops the engine when it ends.

    Args:
        engine: generates the tokens.
        characters: the model's vocabulary.
        tell: receives a line for each request that has ended.
    """

    def __init__(self, engine: Engine, characters: Characters, tell: Callable[[str], object]):
        self.engine, self.characters, self.tell = engine, characters, tell
        # The longest body has 12 bytes for each character, as JSON may escape it.
        self.max_bytes = 12 * engine.length + 4096
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        handlers: Any = {HTTPException: _http_error, 500: _internal_error}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="error",
                timeout_graceful_shutdown=_END_SECONDS,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """Returns whether the server ends: it was asked to, or the engine has failed."""
        return self.engine.failure is not None or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all requests with a last event, and then the connections."""
        await asyncio.to_thread(self.engine.stop)
        await super().shutdown(sockets)

    async def health(self, _: Request) -> Response:
        """Answers with the engine's counts."""
        return JSONResponse(self.engine.counts())

    async def generate(self, http: Request) -> Response:
        """Answers a request for text. Errors before the first character have a status of their
        own."""
        try:
            body = read_body(await self._read(http))
            events = self._events(
                http, generation_request(body, self.characters, self.engine.length)
            )
            lines = [self._line(await anext(events))]
        except ValueError as error:
            return _error(400, str(error))
        except Refused as error:
            return _error(503, str(error))
        if body.stream and "error" not in lines[0]:
            encoded = self._encoded(lines[0], events)
            return StreamingResponse(encoded, media_type="application/x-ndjson")
        lines += [self._line(event) async for event in events]
        if "error" in lines[-1]:
            return _error(503 if self.engine.is_stopping else 500, lines[-1]["error"])
        text = "".join(line["text"] for line in lines)
        return JSONResponse({"text": text, "tokens": len(text), "finish": lines[-1]["finish"]})

    async def _read(self, http: Request) -> bytes:
        """Returns the body of a request, of at most `max_bytes`."""
        content = b""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in http.stream():
                    content += part
                    if len(content) > self.max_bytes:
                        raise HTTPException(
                            413, f"body: expected at most {self.max_bytes} bytes, got more"
                        )
        except ClientDisconnect:
            raise HTTPException(400, "body: the client closed the connection") from None
        except TimeoutError:
            raise HTTPException(408, f"body: expected within {_BODY_SECONDS:.0f} s") from None
        return content

    async def _events(self, http: Request, request: GenerationRequest) -> AsyncIterator[Event]:
        """Submits a request and yields its events, up to its end or that of its client."""
        loop, start = asyncio.get_running_loop(), time.perf_counter()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = self.engine.submit(request, deliver)

        def end(_: object) -> None:
            self.engine.abandon(job)  # does nothing if it has ended
            events.put_nowait(Event(error="abandoned"))
            counts = f"{len(request.prompt)} + {job.written} characters"
            self.tell(f"{counts}, {job.outcome}, {time.perf_counter() - start:.2f} s")

        # The end of the connection is noticed while the request waits, too, and without iteration.
        client = asyncio.create_task(_answered(http))
        client.add_done_callback(end)
        event = Event()
        while event.finish is None and event.error is None:
            event = await events.get()
            yield event

    async def _encoded(
        self, first: dict[str, str], events: AsyncIterator[Event]
    ) -> AsyncIterator[str]:
        """Yields lines of JSON, one for each event."""
        yield json.dumps(first) + "\n"
        async for event in events:
            yield json.dumps(self._line(event)) + "\n"

    def _line(self, event: Event) -> dict[str, str]:
        """Returns the JSON object of an event."""
        if event.error is not None:
            return {"error": event.error}
        text = self.characters.decode(np.array([event.token]))
        return {"text": text} if event.finish is None else {"text": text, "finish": event.finish}


async def _answered(http: Request) -> None:
    """Returns when the client has the whole answer, or has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def _http_error(http: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code in (404, 405):
        message = f"{http.method} {http.url.path}: expected POST /generate or GET /health"
    return _error(error.status_code, message, error.headers)


def _internal_error(_: Request, error: Exception) -> Response:
    return _error(500, f"the server failed: {type(error).__name__}")
