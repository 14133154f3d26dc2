"""Host names that a server answers to, so that pages of other sites cannot reach it through a visitor's browser.

A browser sends the requests of a page to any address that its host name resolves to, even 127.0.0.1, and lets every
page post text anywhere without reading the answer. It sends the host and the page as `Host` and `Origin`, which the
page cannot change. Other clients send no `Origin`, so they may post with any content type.
"""

import ipaddress
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from switch_tf import checks
from switch_tf.refusals import Refusal

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:/@\[\]?#\\]+)(:\d{0,5})?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


class Hosts:
    """Hosts that requests may name.

    Args:
        address: str. Address of the server. 0.0.0.0 and :: stand for every address of the machine, so a request may
            name any IP address.
        allowed: Additional names or addresses. Pages of these hosts may post, too.

    Raises:
        Refusal: a name is not that of a host.
    """

    def __init__(self, address: str = "127.0.0.1", allowed: Sequence[str] = ()):
        for name in allowed:
            if not _NAME.fullmatch(name) and _address(_plain(name)) is None:
                raise Refusal(f"--allow_host must be a host name or an IP address, without http:// and without a "
                              f"port, not {checks.shown(name)}.")
        parsed = _address(address)
        self._any_address = parsed is not None and parsed.is_unspecified
        self._allowed = {_plain(name) for name in allowed}
        self._own = {*_LOOPBACK, _plain(address)}

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Returns the reason to refuse a request, None if there is none."""
        host = headers.get("host")  # is missing in HTTP/1.0, which no browser uses
        if host is not None and not self._is_own(host):
            return (f"Host {checks.shown(host)} is no name of this server; if it is one of yours, start the server "
                    "with --allow_host and the name.")
        origin = headers.get("origin")
        if origin is not None and not self._is_own_page(origin, host):
            return (f"Pages of {checks.shown(origin)} may not use this server; if they are yours, start it with "
                    "--allow_host and the name of their host.")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and method not in ("GET", "HEAD") and site not in ("none", "same-origin"):
            return "Pages of other sites may not use this server."
        return None

    def _is_own(self, host):
        name = _name_of(host)
        return name is not None and (
            name in self._own or name in self._allowed or (self._any_address and _address(name) is not None))

    def _is_own_page(self, origin, host):
        try:
            page = urllib.parse.urlsplit(origin)
            port = page.port
        except ValueError:
            return False
        if page.scheme not in ("http", "https") or page.hostname is None:  # such as "null"
            return False
        if _plain(page.hostname) in self._allowed:
            return True
        default = 443 if page.scheme == "https" else 80
        match = _HOST.fullmatch(host or "")
        return match is not None and (_plain(page.hostname), port or default) == (
            _name_of(host), int((match[2] or ":").removeprefix(":") or default))


class OnlyOwnHosts:
    """ASGI middleware that answers requests refused by `Hosts` with status 403."""

    def __init__(self, app: Callable[..., Any], hosts: Hosts):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        app = self._app
        if scope["type"] == "http" and (reason := self._hosts.refusal(scope["method"], Headers(scope=scope))):
            app = JSONResponse({"error": reason}, 403)
        await app(scope, receive, send)


def _name_of(host):
    """Returns the canonical name or address in a Host header, None if it has neither."""
    match = _HOST.fullmatch(host)
    return match and _plain(match[1])


def _plain(name):
    """Returns the canonical spelling of a name or address."""
    name = name.strip("[]").lower().removesuffix(".")
    address = _address(name)
    return name if address is None else str(address)


def _address(name):
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
