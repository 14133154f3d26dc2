"""Connections that say nothing, or too slowly, or are too many, end; others are answered; signals end a server."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import os
import resource
import signal
import socket
import threading
import time

import pytest

from switch_tf.inference import listening

MOST = 8


class App:
    """Answers a request when `go` is set, `/health` at once, and `/large` with more than a client's window."""

    def __init__(self):
        self.go, self.num_asked = threading.Event(), 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b"x" * 2**26 if scope["path"] == "/large" else b"well"
        self.num_asked += 1
        while scope["method"] == "POST" and (await receive()).get("more_body"):
            pass
        while scope["path"] == "/slow" and not self.go.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def _until(is_true):
    for _ in range(1000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("It never came true.")


@pytest.fixture
def served(request, monkeypatch):
    """An app and the port where it is served."""
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(listening, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(listening, "_FOR_HEALTH", 2)
    app, listener = App(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = listening.HttpServer(app, getattr(request, "param", MOST))
    server.config.timeout_graceful_shutdown = 5
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    _until(lambda: server.started)
    try:
        yield app, listener.getsockname()[1]
    finally:
        app.go.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def connect(served):
    """A function that opens a connection and sends what it is given."""
    with contextlib.ExitStack() as stack:
        def connect(content=b""):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", served[1]), timeout=10))
            client.sendall(content)
            return client

        yield connect


def _request(path="/", method="GET", headers=""):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def _ends(client):
    """Whether the server closes a connection without a word."""
    with contextlib.suppress(ConnectionResetError):
        return client.recv(1000) == b""
    return True


def _is_answered(client):
    found = b""
    while not found.endswith(b"well") and (block := client.recv(1000)):
        found += block
    return b"200 OK" in found and found.endswith(b"well")


def _get(port, path):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("GET", path)
    return client.getresponse().status


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_headers_have_a_deadline(connect, sent):
    start = time.monotonic()
    assert _ends(connect(sent)) and 0.4 < time.monotonic() - start < 5


def test_a_byte_now_and_then_does_not_move_the_deadline(connect):
    client = connect(_request())
    assert _is_answered(client)  # an answer, so that its next request is tried as well
    start = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - start < 5:
            client.sendall(b"G")
            time.sleep(0.1)
    assert time.monotonic() - start < 3


def test_a_client_that_does_not_read_its_answer_is_dropped(connect):
    client = connect(_request("/large"))
    time.sleep(1.5)
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while block := client.recv(2**20):
            received += len(block)
    assert received < 2**26


def test_the_oldest_silent_connection_makes_room_for_the_next(served, connect):
    answered = connect(_request())
    assert _is_answered(answered)
    silent = [connect() for _ in range(MOST - 1)]
    assert _get(served[1], "/") == 200
    assert _ends(silent[0])
    answered.sendall(_request())  # who has asked once is kept longer than who has said nothing
    assert _is_answered(answered)


def test_a_request_whose_body_does_not_come_makes_room_last(served, connect):
    sending = [connect(_request("/", "POST", "Content-Length: 9\r\n")) for _ in range(MOST)]
    _until(lambda: served[0].num_asked == MOST)
    assert _get(served[1], "/") == 200
    assert _ends(sending[0])


def test_requests_that_are_being_answered_are_not_dropped_and_health_is_answered(served, connect):
    app, port = served
    busy = [connect(_request("/slow")) for _ in range(MOST)]
    _until(lambda: app.num_asked == MOST)
    for _ in range(3):
        assert _get(port, "/health") == 200 and _get(port, "/") == 503
    silent = [connect() for _ in range(5 * MOST)]
    assert _get(port, "/health") == 200 and _get(port, "/") == 503
    app.go.set()
    assert all(map(_is_answered, busy))
    for client in [*busy, *silent]:
        client.close()
    assert _get(port, "/") == 200


def test_connections_fit_under_the_limit_of_descriptors(monkeypatch):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    limits["now"] = 1024, 1024
    most = listening.make_room()
    # 128 descriptors are for other things and 16 for /health, besides those that this process has open.
    assert abs(most - (1024 - 128 - 16 - len(os.listdir("/dev/fd")))) < 8 and limits["now"] == (1024, 1024)
    limits["now"] = 256, 2**20  # macOS' own
    assert listening.make_room() == 2048 and 2048 < limits["now"][0] < 2**12
    limits["now"] = 1024, resource.RLIM_INFINITY
    assert listening.make_room() == 2048
    limits["now"] = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    assert listening.make_room() == 2048 and limits["now"] == (resource.RLIM_INFINITY,) * 2
    limits["now"] = 64, 64
    with pytest.raises(ValueError, match=r"and this process may have 64; start it after `ulimit -n 1024`"):
        listening.make_room()


@pytest.mark.slow
@pytest.mark.parametrize("served", [200], indirect=True)
def test_no_request_is_lost_beside_more_silent_connections_than_there_may_be(served, connect):
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def client(number):
        connection = http.client.HTTPConnection("127.0.0.1", served[1], timeout=30)
        for _ in range(100):
            connection.request("GET", "/")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"well")
        connection.close()
        return True

    with concurrent.futures.ThreadPoolExecutor(20) as clients:
        done = [clients.submit(client, number) for number in range(40)]
        silent = [connect() for _ in range(1500)]
        assert all(one.result() for one in done)
    assert sum(map(_ends, silent)) == 1500


def test_a_second_signal_that_comes_while_the_first_is_told_ends_it(monkeypatch):
    told = []

    class Ended(BaseException):
        """In place of the process's end."""

    def tell(text):
        told.append(text)
        if len(told) == 1:
            signal.raise_signal(signal.SIGINT)

    def end(status):
        raise Ended(status)

    async def app(scope, receive, send):
        """It answers nothing."""

    monkeypatch.setattr(listening.outputs, "say", tell)
    monkeypatch.setattr(os, "_exit", end)
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            with pytest.raises(Ended, match="130"):
                listening.HttpServer(app, 16, lambda: signal.raise_signal(signal.SIGINT)).run([listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert told[1:] == ["SIGINT once more: ended at once."]
