"""A server at a socket, with limits and deadlines for connections, and signals that end it.

uvicorn waits without limit for a request's headers, and accepts connections until the process has no file descriptor
left. XLA's compiler then aborts the process, since it cannot open its source of random numbers.
"""

import asyncio
import functools
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import INTERRUPTED
from switch_tf.storage import outputs

HEADER_SECONDS = 10  # from the start of a connection or a later request
_KEEP_ALIVE_SECONDS = 30  # from an answer to the next request
WRITE_SECONDS = 30  # for a client to receive a part
_STOPPING_SECONDS = 30  # for open requests after the first signal
_MOST_HEADER_BYTES = 2**14
_ACCEPTED_AT_ONCE = 16  # before they are counted
_MOST_CONNECTIONS = 2048
_FEWEST_CONNECTIONS = 16
_FOR_HEALTH = 16  # above the limit, only for /health
_OTHER_DESCRIPTORS = 128  # for compilers, files and uncounted connections
_SILENT, _ANSWERED, _SENDING = range(3)  # stages of waiting for the client, in the order of dropping


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Port 0 means any free port."""
    if not 0 <= port < 2**16:
        raise Refusal(f"--port must be in 0 to {2**16 - 1}, not {port}.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise Refusal(f"--host {host} --port {port} cannot be listened at: {first_line(error)}. Give another --port "
                      "(0 for any that is free) or --host.") from None
    return listener


def make_room() -> int:
    """Raises the limit of file descriptors if allowed, and returns the number of connections that fit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    reserved = len(os.listdir("/dev/fd")) + _OTHER_DESCRIPTORS + _FOR_HEALTH
    wanted = reserved + _MOST_CONNECTIONS
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    most = min(_MOST_CONNECTIONS, soft - reserved)
    if most < _FEWEST_CONNECTIONS:
        raise Refusal(f"Serving needs {reserved + _FEWEST_CONNECTIONS} open files at least, and this process may have "
                      f"{soft}; start it after `ulimit -n 1024` or more.")
    return most


class HttpServer(uvicorn.Server):
    """A uvicorn server with limits and deadlines. `app` answers `/health`.

    In the main thread the first signal lets requests end, and the second one ends the process.

    Args:
        most: Largest number of connections, see `_Connection`.
        on_ready: Called when the server accepts requests.
    """

    should_exit: bool

    def __init__(self, app: Callable[..., Any], most: int, on_ready: Callable[[], None] = lambda: None):
        super().__init__(uvicorn.Config(
            app, http=functools.partial(_Connection, most), ws="none", loop="asyncio", access_log=False,
            server_header=False, log_level="warning", backlog=_ACCEPTED_AT_ONCE,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=_STOPPING_SECONDS,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES))
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
            for listener in sockets or ():
                # asyncio also uses `backlog` for the system's longer queue.
                listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise Refusal(f"The server could not listen: {first_line(error)}.") from error
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if min(connection.headers_due, connection.write_due) <= now:
                connection.drop()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        name = signal.Signals(sig).name
        if self.should_exit:
            outputs.say(f"{name} once more: ended at once.")
            os._exit(INTERRUPTED)
        self.should_exit = True  # before the message: its reader may send the next signal at once
        outputs.say(f"{name}: answering what waits, {_STOPPING_SECONDS} seconds at most; once more ends at once.")


class _Connection(H11Protocol):
    """A connection of uvicorn with deadlines.

    Above the limit it drops the oldest that waits for its client: without a request, else with its answer, else with an
    incomplete request. If all are busy, the new connection gets status 503, except for `/health`.
    """

    def __init__(self, most, **arguments):
        super().__init__(**arguments)
        self._most = most
        self._stage, self._since = None, 0.0  # None while an answer is computed
        self.headers_due = self.write_due = math.inf

    def drop(self):
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > self._most:
            waiting = [connection for connection in self.connections if connection._stage is not None]
            if waiting:
                min(waiting, key=lambda connection: (connection._stage, connection._since)).drop()
            elif len(self.connections) > self._most + _FOR_HEALTH:
                self.drop()
        if len(self.connections) > self._most:
            self.app = functools.partial(_only_health, self.app)
        self._note_stage()
        self.headers_due = self.loop.time() + HEADER_SECONDS

    def data_received(self, data):
        super().data_received(data)
        self._note_stage()
        if self._stage not in (_SILENT, _ANSWERED):
            self.headers_due = math.inf
        elif self.headers_due == math.inf:
            self.headers_due = self.loop.time() + HEADER_SECONDS

    def on_response_complete(self):
        super().on_response_complete()
        self._note_stage()

    def pause_writing(self):
        super().pause_writing()
        self.write_due = self.loop.time() + WRITE_SECONDS

    def resume_writing(self):
        super().resume_writing()
        self.write_due = math.inf

    def _note_stage(self):
        if not self.cycle:
            stage = _SILENT
        elif self.cycle.response_complete:
            stage = _ANSWERED
        else:
            stage = _SENDING if self.cycle.more_body else None
        if stage != self._stage:
            self._stage, self._since = stage, self.loop.time()


async def _only_health(app, scope, receive, send):
    if scope["type"] == "http" and scope["path"] != "/health":
        app = JSONResponse({"error": "Too many requests are being answered; try again later."}, 503,
                           {"Retry-After": "1", "Connection": "close"})
    await app(scope, receive, send)
