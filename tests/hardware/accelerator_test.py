"""The type of a TPU is read from the environment, or from the metadata server of the machine."""

import contextlib
import http.server
import threading

import pytest

from switch_tf.hardware import accelerator, host, memory, rates


@contextlib.contextmanager
def _server(status, text):
    """A metadata server on this machine; gives its address and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _tpu_without_a_variable(monkeypatch):
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never asked
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(accelerator, "_TIMEOUT", 60)  # a busy machine may take its time
    accelerator._from_metadata.cache_clear()
    yield
    accelerator._from_metadata.cache_clear()


def test_the_metadata_server_is_asked_once(monkeypatch):
    with _server(200, b"v5litepod-8\n") as (address, asked):
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert accelerator.accelerator_type() == accelerator.accelerator_type() == "v5litepod-8"
        assert asked == [("/computeMetadata/v1/instance/attributes/accelerator-type", "Google")]
        monkeypatch.setattr(rates, "device_type", lambda: "TPU")
        assert rates.nominal_flops("bfloat16") == 197e12
        with pytest.raises(ValueError, match="a v5litepod device has 16 GiB"):
            memory.check(17 * 2**30, "Weights are whole", "cut them")


def test_the_variable_comes_first_and_a_machine_without_tpu_asks_nobody(monkeypatch):
    with _server(200, b"v5litepod-8") as (address, asked):
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
        assert accelerator.accelerator_type() == "v4-8"
        monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
        monkeypatch.setattr(host, "has_tpu", lambda: False)
        assert accelerator.accelerator_type() == "" and not asked


def test_a_server_that_does_not_know_or_is_not_there_is_no_error(monkeypatch):
    with _server(404, b"not found") as (address, _):
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert accelerator.accelerator_type() == ""
    accelerator._from_metadata.cache_clear()
    assert accelerator.accelerator_type() == ""  # nothing listens there any more
