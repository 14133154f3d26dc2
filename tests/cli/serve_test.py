"""`switch-tf serve` as a process prints its address, answers, and stops in order or at once."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

PATH = "/v1/models/{}:predict"


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(run_folder, call):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _, found = call(f"serve --run={run_folder} --port={other.getsockname()[1]}", status=2)
    assert "cannot be listened at: [Errno 98] Address already in use. Give another --port" in found
    assert "Loading" not in found


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_package_that_is_missing_is_named(run_folder, refused, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"Serving needs the package {missing}, which is not installed; run: pip" in refused(
        f"serve --run={run_folder}")


@pytest.mark.slow
def test_it_serves_until_a_signal_and_answers_what_waits(run_folder):
    with _started(run_folder) as process:
        name, port = run_folder.name, _port(process)
        assert _ask(name, port)["predictions"][0]["scores"] < 0
        # A batch of many, so that the signal comes while it is answered.
        found = {}
        waiting = threading.Thread(target=lambda: found.update(_ask(name, port, 256)))
        waiting.start()
        while not found and "switch_tf_batch_size_count 1.0" in _metrics(port):
            pass
        process.send_signal(signal.SIGTERM)
        waiting.join(60)
        assert len(found["predictions"]) == 256
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "SIGTERM: answering what waits" in err
    assert json.loads(out.splitlines()[-1]) == {
        "run": str(run_folder), "step": 7, "address": f"http://127.0.0.1:{port}"}


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(run_folder):
    with _started(run_folder) as process:
        port = _port(process)
        with socket.create_connection(("127.0.0.1", port)) as client:  # a request that is never there
            client.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % PATH.format(
                run_folder.name).encode())
            assert _ask(run_folder.name, port)  # so that the one before has arrived
            process.send_signal(signal.SIGINT)
            assert "SIGINT: answering what waits" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert "SIGINT once more: ended at once." in process.stderr.read()


@pytest.mark.slow
def test_pjrt_serves_the_same_answers(run_folder):
    found = []
    for words in ([], ["--backend=pjrt", "--gin_file=gin/layouts/expert.gin", "--devices=4", "--batch_size=6"]):
        with _started(run_folder, *words) as process:
            port = _port(process)
            found.append([_ask(run_folder.name, port, count)["predictions"] for count in (1, 9)])
    scores = [[answer.pop("scores") for answer in sum(answers, [])] for answers in found]
    assert found[0] == found[1] and scores[0] == pytest.approx(scores[1], rel=1e-5)


@contextlib.contextmanager
def _started(run_folder, *words):
    process = subprocess.Popen(
        [sys.executable, "-m", "switch_tf.cli", "serve", "--run", str(run_folder), "--port", "0", "--json",
         *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _port(process):
    for line in process.stderr:
        if found := re.search(r"is ready after [0-9.]+ s: http://127.0.0.1:(\d+)/", line):
            return int(found[1])
    raise AssertionError("It never was ready.")


def _ask(name, port, count=1):
    instances = json.dumps({"instances": ["the <extra_id_0> array"] * count})
    return json.loads(_request(port, "POST", PATH.format(name), instances))


def _metrics(port):
    return _request(port, "GET", "/metrics").decode()


def _request(port, *request):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(*request)
    return connection.getresponse().read()
