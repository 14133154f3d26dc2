"""Which hosts and which pages a request may name."""

import pytest
from starlette.datastructures import Headers

from switch_tf.inference.server import Hosts


def _is_refused(hosts, method="POST", **headers):
    headers = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return hosts.refusal(method, headers) is not None


@pytest.mark.parametrize("host", [
    "localhost", "localhost:8501", "LOCALHOST:1", "localhost.", "127.0.0.1:8501", "[::1]:8501", "[::1]", "[0:0::1]:80",
    "10.1.2.3:8501", "Model.Example:443"])
def test_own_names_are_answered_at_any_port(host):
    assert not _is_refused(Hosts("10.1.2.3", ["model.example"]), host=host)


@pytest.mark.parametrize("host", [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8501", "10.1.2.4", "", " ",
    "localhost@evil.example", "evil.example@localhost", "localhost:80:80", "localhost/evil", "localhost:x", "[::1",
    "::1", "[evil.example]", "localhost, evil.example", "example", "sub.model.example", "2130706433"])
def test_other_names_are_refused(host):
    assert _is_refused(Hosts("10.1.2.3", ["model.example"]), host=host)
    assert _is_refused(Hosts("10.1.2.3", ["model.example"]), "GET", host=host)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_server_at_every_address_answers_to_any_address_and_to_no_other_name(address):
    hosts = Hosts(address, ["model.example"])
    for host in ("192.0.2.7:8501", "[2001:db8::1]:8501", "localhost", "model.example"):
        assert not _is_refused(hosts, host=host)
    assert _is_refused(hosts, host="evil.example")


def test_what_is_no_browser_needs_no_headers():
    assert not _is_refused(Hosts())


@pytest.mark.parametrize("origin, host", [
    ("http://localhost:8501", "localhost:8501"), ("http://127.0.0.1:8501", "127.0.0.1:8501"),
    ("http://localhost", "localhost:80"), ("https://model.example", "model.example"),
    ("https://model.example", "127.0.0.1:8501"), ("https://model.example:444", "127.0.0.1:8501"),
    ("https://localhost:8501", "localhost:8501")])  # the last one is behind a proxy that speaks TLS
def test_own_pages_may_post(origin, host):
    assert not _is_refused(Hosts(allowed=["model.example"]), host=host, origin=origin)


@pytest.mark.parametrize("origin", [
    "http://evil.example", "null", "", "http://localhost:3000", "http://localhost",
    "http://localhost:8501.evil.example", "http://127.0.0.1:8501", "file://", "http://[::1", "http://localhost:x",
    "moz-extension://localhost:8501"])
def test_other_pages_may_not(origin):
    assert _is_refused(Hosts(allowed=["model.example"]), host="localhost:8501", origin=origin)


@pytest.mark.parametrize("site, method, is_refused", [
    ("cross-site", "POST", True), ("same-site", "POST", True), ("same-origin", "POST", False), ("none", "POST", False),
    ("cross-site", "GET", False)])
def test_a_page_that_hides_its_name_is_known_by_the_browser(site, method, is_refused):
    assert _is_refused(Hosts(), method, host="localhost", sec_fetch_site=site) == is_refused


@pytest.mark.parametrize("name", ["http://model.example", "model.example:80", "", "*", "a b", "model.example/"])
def test_names_that_no_request_can_give_are_refused(name):
    with pytest.raises(ValueError, match="--allow_host must be a host name or an IP address, without http:// and"):
        Hosts(allowed=[name])


def test_addresses_may_be_allowed():
    hosts = Hosts(allowed=["[2001:db8::1]", "192.0.2.7"])
    assert not _is_refused(hosts, host="[2001:DB8:0::1]:80") and not _is_refused(hosts, host="192.0.2.7")
