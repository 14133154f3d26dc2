"""A server under real clients: each hears its own answer, or in one sentence why there is none."""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import re
import socket
import threading

import numpy as np
import pytest

from switch_tf import data, decoding
from switch_tf.inference import listening
from switch_tf.inference import server as server_module
from switch_tf.inference.server import Hosts, Server
from switch_tf.inference.text_model import TextModel
from switch_tf.tasks import vocabularies

BYTES = vocabularies.byte()
TEXTS = [f"{letter * (1 + number % 9)} <extra_id_{number % 3}> {number}"
         for number, letter in enumerate("abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz")]
PREDICT, LOOK = "/v1/models/tiny:predict", "/v1/models/tiny:look"


def until(is_true):
    for _ in range(1000):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("It never came true.")


@contextlib.contextmanager
def served(text_model, most=100, **limits):
    """A server in a thread of its own: its Server and its port."""
    server = Server(text_model, "tiny", {"step": 3}, **{
        "batch_size": 32, "max_waiting": 256, "max_request_bytes": 2**20, "hosts": Hosts(), **limits})
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    http_server = listening.HttpServer(server.app, most)
    http_server.config.timeout_graceful_shutdown = 10
    thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: http_server.started)
    try:
        yield server, listener.getsockname()[1]
    finally:
        http_server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def make_text_model(make_model):
    @functools.cache
    def make(sampler="greedy", batch_size=None):
        model = make_model(vocab_size=384, logits_via_embedding=False, scale_decoder_outputs=False,
                           num_encoder_layers=1, num_decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1)
        return TextModel(model, data.Reading(BYTES, BYTES), 20, 6, sampler, batch_size)

    return make


@pytest.fixture(scope="module")
def text_model(make_text_model):
    return make_text_model()


@pytest.fixture(scope="module")
def port(text_model):
    with served(text_model, batch_size=8, max_waiting=100, max_request_bytes=10_000) as (server, port):
        text_model.warm_up()
        yield port


@pytest.fixture(scope="module")
def expected(make_text_model):
    """Answers by another program, of batches that are filled up."""
    model = make_text_model(batch_size=len(TEXTS))
    answers = [results[0] for results in model.answer([model.read(text).ids for text in TEXTS], range(len(TEXTS)))]
    assert len({one.text for one in answers}) > len(TEXTS) // 2
    return dict(zip(TEXTS, answers, strict=True))


def ask(port, path, body=None, method=None, headers=None):
    """Status, JSON and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content.startswith(b"{") else content.decode(), response.headers


def is_answer(found, expected):
    return found["outputs"] == expected.text and abs(found["scores"] - expected.score) < 1e-4


def test_answers_are_those_of_the_model(port, expected):
    status, found, _ = ask(port, PREDICT, {"instances": TEXTS})
    assert status == 200 and len(found["predictions"]) == len(TEXTS)
    assert all(is_answer(one, expected[text]) for one, text in zip(found["predictions"], TEXTS, strict=True))
    _, found, _ = ask(port, PREDICT, {"instances": ["x" * 30]})
    assert found["predictions"][0]["cut"] == 11


def test_64_clients_at_once_hear_their_own_answers(port, expected):
    start = threading.Barrier(64)

    def client(number):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        start.wait()
        for turn in range(3):
            texts = [TEXTS[(number * 7 + turn) % len(TEXTS)]]
            connection.request("POST", PREDICT, json.dumps({"instances": texts}))
            found = json.loads(connection.getresponse().read())
            assert is_answer(found["predictions"][0], expected[texts[0]])
        connection.close()
        return True

    with concurrent.futures.ThreadPoolExecutor(64) as clients:
        assert all(clients.map(client, range(64)))
    _, metrics, _ = ask(port, "/metrics")
    batches = float(re.search(r"^switch_tf_batch_size_count (\S+)", metrics, re.MULTILINE)[1])
    texts = float(re.search(r"^switch_tf_batch_size_sum (\S+)", metrics, re.MULTILINE)[1])
    assert texts >= 192 and batches < texts / 2, "those that come at a time are answered at a time"


@pytest.mark.parametrize("path, body, status, words", [
    (PREDICT, b"{", 400, "The body is no JSON object: "), (PREDICT, b"[]", 400, r"must be a JSON object, not \[\]"),
    (PREDICT, b"", 400, "no JSON object"), (PREDICT, b"\xff\xfe\xff", 400, "no JSON object"),
    (PREDICT, b"[" * 9_000, 400, "no JSON object"), (PREDICT, b"1" * 9_000, 400, "no JSON object"),
    (PREDICT, {}, 400, '{"instances": '), (PREDICT, {"instances": "a"}, 400, '{"instances": '),
    (PREDICT, {"instances": []}, 400, "one text at least"),
    (PREDICT, {"instances": ["a", 5]}, 400, r"instances\[1\] must be a text, not 5"),
    (PREDICT, {"instances": ["a", ""]}, 400, r"There is no text in instances\[1\]"),
    (PREDICT, b'{"instances": ["\\ud800"]}', 400, r"instances\[0\] holds half of a character"),
    (PREDICT, {"instances": ["a"] * 101}, 400, "at most 100 instances, not 101"),
    (PREDICT, {"instances": ["a" * 10_000]}, 413, "at most 10000 bytes, not 100"),
    (LOOK, {"text": "a"}, 400, "instance must be a text, not None"), (LOOK, {"instance": ""}, 400, "no text in"),
    ("/v1/models/other:predict", {"instances": ["a"]}, 404, "The model here is 'tiny', not 'other'"),
    ("/v1/models/other", None, 404, "'tiny'"), ("/nowhere", None, 404, "Not Found"), ("/health", b"{}", 405, "Method")])
def test_what_cannot_be_answered_is_told(port, path, body, status, words):
    found, error, _ = ask(port, path, body)
    assert found == status and re.search(words, error["error"])
    assert ask(port, "/health")[:2] == (200, {"status": "ok"})


def test_a_request_that_is_never_there_is_given_up(make_text_model, monkeypatch):
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.2)
    with served(make_text_model()) as (_, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        client.settimeout(10)
        assert b"408" in client.recv(1000)


def test_texts_are_limited_before_they_are_tokenised(text_model, monkeypatch):
    longest = 2**14  # of a model that reads few tokens
    with served(text_model, max_request_bytes=2**20) as (_, port):
        assert ask(port, "/v1/models/tiny")[1]["max_characters"] == longest
        assert ask(port, PREDICT, {"instances": ["a" * longest]})[1]["predictions"][0]["cut"] == longest + 1 - 20
        monkeypatch.setattr(text_model, "read", None)  # is not reached
        for path, body, name in ((PREDICT, {"instances": ["a", "b" * (longest + 1)]}, r"instances\[1\]"),
                                 (LOOK, {"instance": "b" * (longest + 1)}, "instance")):
            status, found, _ = ask(port, path, body)
            assert status == 413 and re.match(
                rf"{name} has 16,385 characters, and a text may have 16,384: the model reads 20 tokens", found["error"])


def test_requests_take_turns_to_be_tokenised(text_model, monkeypatch):
    order, read, go = [], text_model.read, threading.Event()

    def slow(text):
        order.append(text[0])
        assert go.wait(20)
        return read(text)

    monkeypatch.setattr(text_model, "read", slow)
    with served(text_model) as (server, port), concurrent.futures.ThreadPoolExecutor() as pool:
        large = pool.submit(ask, port, PREDICT, {"instances": ["a" * 10_000] * 20})
        until(lambda: order)
        small = pool.submit(ask, port, PREDICT, {"instances": ["b"]})
        until(lambda: server._turn._waiters)
        go.set()
        assert small.result()[0] == large.result()[0] == 200
    assert len(order) == 21 and order.index("b") <= 2


@pytest.mark.parametrize("headers, words", [
    ({"Host": "evil.example"}, "Host 'evil.example' is no name of this server"),
    ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, "Pages of 'http://evil.example' may not use"),
    ({"Sec-Fetch-Site": "cross-site"}, "Pages of other sites")])
def test_pages_of_other_sites_are_refused(port, headers, words):
    status, found, _ = ask(port, PREDICT, {"instances": ["a"]}, headers=headers)
    assert status == 403 and words in found["error"]


def test_nobody_is_sent_elsewhere(port):
    assert ask(port, f"{PREDICT}/", {"instances": ["a"]})[0] == 404
    assert ask(port, PREDICT, {"instances": ["a"]}, headers={"Content-Type": "text/plain"})[0] == 200  # such as curl's


def test_requests_that_are_not_all_there_may_hold_only_so_much(make_text_model, monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_BYTES_HELD", 0)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n" % PREDICT.encode()
    with served(make_text_model(), max_request_bytes=1000) as (server, port), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        for number, client in enumerate(clients):
            until(lambda held=900 * number: server._num_bytes_held == held)
            client.settimeout(10)
            client.sendall(head + b"x" * 900)
        assert b"503" in clients[2].recv(20) and server._num_bytes_held == 1800
        assert ask(port, "/health")[0] == 200
        for client in clients:
            client.close()
        until(lambda: not server._num_bytes_held)
        assert ask(port, PREDICT, {"instances": ["a"]})[0] == 200


def test_no_http_is_refused(port):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"\x16\x03\x01 nothing\r\n\r\n")
        client.settimeout(10)
        assert b"400" in client.recv(1000)
    assert ask(port, "/health")[0] == 200


@pytest.fixture
def slow(text_model, monkeypatch):
    """The texts that were tokenised, and the event that each waits for."""
    order, read, go = [], text_model.read, threading.Event()

    def wait(text):
        order.append(text)
        assert go.wait(20)
        return read(text)

    monkeypatch.setattr(text_model, "read", wait)
    yield order, go
    go.set()


def test_long_requests_are_refused_while_some_are_prepared_and_short_ones_are_not(text_model, slow, monkeypatch):
    order, go = slow
    monkeypatch.setattr(server_module, "_SMALL", 500)
    monkeypatch.setattr(server_module, "_MOST_LONG", 2)
    long = {"instances": ["a" * 600]}
    with served(text_model, max_request_bytes=700) as (server, port), concurrent.futures.ThreadPoolExecutor() as pool:
        prepared = [pool.submit(ask, port, PREDICT, long) for _ in range(2)]
        until(lambda: server._num_bytes_prepared > 1200)
        status, found, headers = ask(port, PREDICT, long)
        assert (status, headers["Retry-After"]) == (503, "1") and found["error"].startswith("Too many long requests")
        short = pool.submit(ask, port, PREDICT, {"instances": ["b"]})
        until(lambda: server._num_texts_prepared == 3)
        go.set()
        assert [request.result()[0] for request in (*prepared, short)] == [200, 200, 200]
        assert server._num_bytes_prepared == server._num_texts_prepared == 0
        assert ask(port, PREDICT, long)[0] == 200


def test_more_texts_than_may_wait_are_refused_before_they_are_tokenised(text_model, slow):
    order, go = slow
    with served(text_model, max_waiting=3) as (server, port), concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, port, PREDICT, {"instances": ["a", "a"]})
        until(lambda: order)
        assert ask(port, PREDICT, {"instances": ["b", "b"]})[0] == 503
        second = pool.submit(ask, port, PREDICT, {"instances": ["c"]})
        go.set()
        assert first.result()[0] == second.result()[0] == 200
    assert sorted(order) == ["a", "a", "c"]


def test_of_a_client_that_hangs_up_no_further_text_is_tokenised(text_model, slow, monkeypatch):
    order, go = slow
    monkeypatch.setattr(server_module, "_CHARACTERS_PER_TURN", 1)
    with served(text_model) as (server, port):
        body = json.dumps({"instances": ["x", "y", "z"]}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
                PREDICT.encode(), len(body), body))
            until(lambda: order)
        threading.Event().wait(0.2)  # the server hears of it
        go.set()
        until(lambda: 'status="hung_up"} 1.0' in ask(port, "/metrics")[1])
        assert server._num_texts_prepared == 0
    assert order == ["x"]


@pytest.fixture
def held(make_text_model, monkeypatch):
    """A model whose answers wait for an event: itself, the event, and the batches that it was asked."""
    model, go, asked = make_text_model(), threading.Event(), []
    answer = model.answer

    def wait(inputs, rows):
        asked.append((inputs, list(rows)))
        assert go.wait(20)
        return answer(inputs, rows)

    monkeypatch.setattr(model, "answer", wait)
    yield model, go, asked
    go.set()


def test_of_more_than_may_wait_requests_are_refused(held):
    model, go, asked = held
    with served(model, batch_size=1, max_waiting=2) as (server, port), concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, port, PREDICT, {"instances": ["a"]})
        until(lambda: asked)
        second = pool.submit(ask, port, PREDICT, {"instances": ["b", "c"]})
        until(lambda: "switch_tf_waiting_texts 2.0" in ask(port, "/metrics")[1])
        status, found, headers = ask(port, PREDICT, {"instances": ["d"]})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert found["error"] == "2 of at most 2 texts are waiting; try again later."
        go.set()
        assert first.result()[0] == second.result()[0] == 200


def test_of_a_client_that_hangs_up_nothing_is_computed_that_has_not_begun(held):
    model, go, asked = held
    with served(model, batch_size=1) as (_, port), concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, port, PREDICT, {"instances": ["a"]})
        until(lambda: asked)
        body = json.dumps({"instances": ["gone", "gone"]}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
                PREDICT.encode(), len(body), body))
            until(lambda: "switch_tf_waiting_texts 2.0" in ask(port, "/metrics")[1])
        until(lambda: 'status="hung_up"} 1.0' in ask(port, "/metrics")[1])
        last = pool.submit(ask, port, PREDICT, {"instances": ["b"]})
        go.set()
        assert first.result()[0] == last.result()[0] == 200
    assert [inputs for inputs, _ in asked] == [[model.read("a").ids], [model.read("b").ids]]


def test_stopping_answers_what_waits(held):
    model, go, asked = held
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with served(model, batch_size=1) as (_, port):
            found = [pool.submit(ask, port, PREDICT, {"instances": ["a"]}) for _ in range(3)]
            until(lambda: asked and "switch_tf_waiting_texts 2.0" in ask(port, "/metrics")[1])
            threading.Timer(0.5, go.set).start()
        assert [one.result()[0] for one in found] == [200, 200, 200]
    with pytest.raises(OSError):
        ask(port, "/health")


def test_a_model_that_fails_is_told_and_asked_again(make_text_model, monkeypatch):
    model = make_text_model()
    answer = model.answer
    monkeypatch.setattr(model, "answer", lambda inputs, rows: 1 / 0 if len(inputs[0]) == 4 else answer(inputs, rows))
    with served(model) as (_, port):
        status, found, _ = ask(port, PREDICT, {"instances": ["bad"]})
        assert (status, found["error"]) == (500, "The model failed: division by zero.")
        assert ask(port, PREDICT, {"instances": ["good"]})[0] == 200
        assert 'switch_tf_requests_total{path="/v1/models/{name}:predict",status="500"} 1.0' in ask(port, "/metrics")[1]


@pytest.mark.slow
def test_several_results_and_new_draws(make_text_model):
    with served(make_text_model(decoding.Beam(3, num_results=3))) as (_, port):
        ((prediction,),) = ask(port, PREDICT, {"instances": ["a"]})[1].values()
        scores = [prediction["scores"], *(one["scores"] for one in prediction["others"])]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    with served(make_text_model(decoding.Sample(seed=1))) as (_, port):
        drawn = [ask(port, PREDICT, {"instances": ["a"]})[1]["predictions"][0]["outputs"] for _ in range(8)]
        assert len(set(drawn)) > 4


def test_a_look_shows_where_tokens_went(port, text_model, expected):
    _, found, _ = ask(port, LOOK, {"instance": TEXTS[4]})
    assert is_answer(found["prediction"], expected[TEXTS[4]])
    routes = found["routes"]
    assert "".join(routes["inputs"]) == f"{TEXTS[4]}</s>"
    assert routes["outputs"][0] == "<pad>"  # the start of sequence
    assert [layer["layer"] for layer in routes["layers"]] == ["encoder/layers_0/mlp", "decoder/layers_0/mlp"]
    # In the encoder by hand: the router of the layer, on what reaches it.
    model = text_model.model
    ids = np.asarray([text_model.read(TEXTS[4]).ids])
    hidden = {}
    layer = model.encoder.layers[0].mlp
    call, layer.call = layer.call, lambda inputs, *unused, **options: (
        hidden.update(x=np.asarray(inputs[0])), call(inputs, *unused, **options))[1]
    try:
        model.forward({"encoder_input_tokens": ids, "decoder_input_tokens": ids})
    finally:
        layer.call = call
    logits = hidden["x"].astype("float64") @ np.asarray(layer.router.kernel.value, "float64")
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for (chosen,), own in zip(routes["layers"][0]["experts"], probs, strict=True):
        assert chosen[0] == own.argmax() and chosen[1] == pytest.approx(own.max(), abs=1e-4)
    assert len(routes["layers"][1]["experts"]) == len(routes["outputs"])


def test_the_page_names_the_model_and_reaches_nothing_else(port):
    status, page, headers = ask(port, "/")
    assert status == 200 and 'data-address="v1/models/tiny"' in page and "<title>tiny</title>" in page
    assert not re.search(r"https?://", page) and "connect-src 'self'" in headers["Content-Security-Policy"]
    assert ask(port, "/v1/models/tiny")[1]["inputs_length"] == 20
