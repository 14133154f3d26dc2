"""A server at a socket, from the first request to the signal that ends it."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from switch_tf.inference import connections
from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import INTERRUPTED

_STOPPING_SECONDS = 30  # for the requests that are being answered at the first signal


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address.

    Args:
        host: Name or address of this machine.
        port: From 0 to 65535; 0 means any free port.

    Raises:
        Refusal: The port is out of range, or the address cannot be listened at.
    """
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


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: Callable[..., Any], listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves an app until a signal. The first signal lets requests end, the second one ends the process.

    Args:
        app: ASGI app. It runs in a thread of its own, so that this thread hears signals.
        listener: Bound socket.
        on_ready: Function that is called once requests are answered.

    Raises:
        Refusal: The server could not listen.
    """
    server = connections.HttpServer(app, connections.make_room(), log_level="warning",
                                    timeout_graceful_shutdown=_STOPPING_SECONDS)

    def stop(number, _):
        name = signal.Signals(number).name
        if server.should_exit:
            print(f"{name} once more: ended at once.", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        server.should_exit = True  # before the message, because its reader may send the next signal at once
        print(f"{name}: answering what waits, {_STOPPING_SECONDS} seconds at most; once more ends at once.",
              file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.01)
    has_started = server.started
    if has_started:
        on_ready()
    while thread.is_alive():
        thread.join(1)
    for number, handler in previous.items():
        signal.signal(number, handler)
    if not has_started and not server.should_exit:
        raise Refusal("The server could not listen; what it printed above says why.")
