"""Limits of a server's connections: their number, deadlines, and the one to close for the next.

uvicorn closes a connection that is idle after an answer. It waits without limit for the first byte of a request and for
the end of its headers, and accepts connections until the process has no file descriptor left. Then XLA's compiler
aborts the process, because it cannot open its source of random numbers.
"""

import asyncio
import functools
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from switch_tf.refusals import Refusal

HEADER_SECONDS = 10  # from the start of a connection or of a later request to the end of its headers
_KEEP_ALIVE_SECONDS = 30  # from an answer to the next request
WRITE_SECONDS = 30  # for a client to receive a part of its answer
_MOST_HEADER_BYTES = 2**14
_ACCEPTED_AT_ONCE = 16  # connections that may be accepted before they are counted
_MOST_CONNECTIONS = 2048
_FEWEST_CONNECTIONS = 16
_FOR_HEALTH = 16  # connections above the limit, for /health alone
_OTHER_DESCRIPTORS = 128  # for compilers, files, and connections that are not counted yet or any more


def make_room() -> int:
    """Raises the limit of file descriptors if allowed, and returns the number of connections that fit under it.

    Raises:
        Refusal: the limit is too low to serve.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/dev/fd")) + _OTHER_DESCRIPTORS + _FOR_HEALTH
    wanted = others + _MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, soft - others)
    if most < _FEWEST_CONNECTIONS:
        raise Refusal(f"Serving needs {others + _FEWEST_CONNECTIONS} open files at least, and this process may have "
                      f"{soft}; start it after `ulimit -n 1024` or more.")
    return most


class HttpServer(uvicorn.Server):
    """A server of uvicorn under these limits.

    Args:
        app: ASGI app that answers `/health`.
        most: int. See `Connections`.
        others: Arguments of `uvicorn.Config`.
    """

    def __init__(self, app: Callable[..., Any], most: int, **others: Any):
        super().__init__(uvicorn.Config(
            app, http=functools.partial(_Connection, Connections(most)), ws="none", loop="asyncio", access_log=False,
            server_header=False, backlog=_ACCEPTED_AT_ONCE, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES, **others))

    async def startup(self, sockets: list[socket.socket]) -> None:
        await super().startup(sockets)
        for listener in sockets:
            # asyncio uses `backlog` for the system's queue too, which should be longer.
            listener.listen(socket.SOMAXCONN)


class Connections:
    """The open connections of a server, with queues of connections that wait for their client.

    A connection above the limit closes the oldest one that waits for its client: one without a request, else one that
    has its answer, else one with an incomplete request. If none waits for its client, the new connection gets status
    503, except for `/health`.

    Args:
        most: int. Largest number of connections that are served at a time.
    """

    def __init__(self, most: int):
        self.most = most
        self.open = set()
        self.silent, self.answered, self.sending = {}, {}, {}  # ordered sets

    def admit(self, connection: Any) -> bool:
        """Counts a new connection, and returns whether it is above the limit."""
        self.open.add(connection)
        if len(self.open) <= self.most:
            return False
        oldest = next((next(iter(queue)) for queue in (self.silent, self.answered, self.sending) if queue), None)
        if oldest is not None:
            oldest.drop()
        elif len(self.open) > self.most + _FOR_HEALTH:
            connection.drop()
        return len(self.open) > self.most


class _Connection(H11Protocol):
    """A connection of uvicorn with deadlines."""

    app: Callable[..., Any]

    def __init__(self, connections: Connections, **arguments):
        super().__init__(**arguments)
        self._all, self._queue = connections, None
        self._headers_due = self._write_due = None

    def drop(self) -> None:
        """Closes the connection at once."""
        self._leave()
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self._all.admit(self):
            self.app = functools.partial(_only_health, self.app)
        self._update_queue()
        self._headers_due = self.loop.call_later(HEADER_SECONDS, self.drop)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_queue()
        if self._queue is not self._all.silent and self._queue is not self._all.answered:
            self._headers_due = _cancelled(self._headers_due)
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self.drop)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_queue()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._headers_due, self._write_due = _cancelled(self._headers_due), _cancelled(self._write_due)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_due = _cancelled(self._write_due) or self.loop.call_later(WRITE_SECONDS, self.drop)

    def resume_writing(self) -> None:
        self._write_due = _cancelled(self._write_due)
        super().resume_writing()

    def _update_queue(self):
        """Puts the connection into the queue of its state; one that computes an answer is in no queue."""
        if self not in self._all.open:  # dropped
            return
        if self.cycle is None:
            queue = self._all.silent
        elif self.cycle.response_complete:
            queue = self._all.answered
        else:
            queue = self._all.sending if self.cycle.more_body else None
        if queue is not self._queue:
            if self._queue is not None:
                del self._queue[self]
            if queue is not None:
                queue[self] = None
            self._queue = queue

    def _leave(self):
        self._all.open.discard(self)
        if self._queue is not None:
            del self._queue[self]
            self._queue = None


def _cancelled(timer):
    """Cancels a timer and returns None."""
    if timer is not None:
        timer.cancel()


async def _only_health(app, scope, receive, send):
    """Answers a request on a connection above the limit."""
    if scope["type"] == "http" and scope["path"] != "/health":
        app = JSONResponse({"error": "Too many requests are being answered; try again later."}, 503,
                           {"Retry-After": "1", "Connection": "close"})
    await app(scope, receive, send)
