"""The names that a server answers to, so that pages of other sites cannot reach it through a visitor's browser.

A browser sends a page's requests to wherever its name points, 127.0.0.1 as well, and lets any page post text anywhere
without reading the answer. It names the host and the page in `Host` and `Origin`, which the page cannot change. Other
clients send no `Origin`, so what they post needs no content type of its own.
"""

import ipaddress
import re
import urllib.parse
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from switch_tf import checks
from switch_tf.refusals import Refusal

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:/@\[\]?#\\]+)(:\d{0,5})?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


class Hosts:
    """The hosts that requests may name.

    Args:
        address: str, where the server listens. 0.0.0.0 and :: listen at every address of the machine, so a request may
            name any IP address.
        allowed: names or addresses besides. Pages that have one of these names may post, too.

    Raises:
        Refusal: a name that no request can give.
    """

    def __init__(self, address: str = "127.0.0.1", allowed: Sequence[str] = ()):
        for name in allowed:
            if not _NAME.fullmatch(name) and _address(_plain(name)) is None:
                raise Refusal(f"--allow_host must be a host name or an IP address, without http:// and without a "
                              f"port, not {checks.shown(name)}.")
        own = _address(address)
        self._any_address = own is not None and own.is_unspecified
        self._allowed = {_plain(name) for name in allowed}
        self._own = {*_LOOPBACK, _plain(address)}

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Returns why a request is not answered; None where it is."""
        host = headers.get("host")  # HTTP/1.0 has none, and no browser speaks that
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
        found = _HOST.fullmatch(host or "")
        return found is not None and (_plain(page.hostname), port or default) == (
            _name_of(host), int((found[2] or ":").removeprefix(":") or default))


class OnlyOwnHosts:
    """ASGI middleware that answers 403 to what `Hosts` refuses."""

    def __init__(self, app, hosts: Hosts):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope, receive, send):
        app = self._app
        if scope["type"] == "http" and (reason := self._hosts.refusal(scope["method"], Headers(scope=scope))):
            app = JSONResponse({"error": reason}, 403)
        await app(scope, receive, send)


def _name_of(host):
    """The name or address in a Host header, in one spelling; None where it holds something else."""
    found = _HOST.fullmatch(host)
    return found and _plain(found[1])


def _plain(name):
    """One spelling of a name or address."""
    name = name.strip("[]").lower().removesuffix(".")
    address = _address(name)
    return name if address is None else str(address)


def _address(name):
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
