"""Host names that a server answers to, so that pages of other sites cannot reach it through a visitor's browser.

A browser sends the requests of a page to any address that its host name resolves to, even 127.0.0.1, and lets every
page post text anywhere without reading the answer. It sends the host and the page as `Host` and `Origin`, which the
page cannot change. Other clients send no `Origin`, so they may post with any content type.
"""

import ipaddress
import re
import urllib.parse
from collections.abc import Sequence

from starlette.datastructures import Headers

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
    """

    def __init__(self, address: str = "127.0.0.1", allowed: Sequence[str] = ()):
        for name in allowed:
            if not _NAME.fullmatch(name) and isinstance(_canonical(name), str):
                raise Refusal(f"--allow_host must be a host name or an IP address, without http:// and without a "
                              f"port, not {checks.shown(name)}.")
        self._allowed = {_canonical(name) for name in allowed}
        self._own = self._allowed | {_canonical(name) for name in (*_LOOPBACK, address)}
        self._any_address = getattr(_canonical(address), "is_unspecified", False)

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Returns the reason to refuse a request, None if there is none."""
        host = headers.get("host")  # is missing in HTTP/1.0, which no browser uses
        match = _HOST.fullmatch(host or "")
        name = match and _canonical(match[1])
        if host is not None and name not in self._own and (
                name is None or isinstance(name, str) or not self._any_address):
            return (f"Host {checks.shown(host)} is no name of this server; if it is one of yours, start the server "
                    "with --allow_host and the name.")
        origin = headers.get("origin")
        if origin is not None and not self._is_own_page(origin, name, match and match[2]):
            return (f"Pages of {checks.shown(origin)} may not use this server; if they are yours, start it with "
                    "--allow_host and the name of their host.")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and method not in ("GET", "HEAD") and site not in ("none", "same-origin"):
            return "Pages of other sites may not use this server."
        return None

    def _is_own_page(self, origin, name, port):
        try:
            page = urllib.parse.urlsplit(origin)
            default = {"http": 80, "https": 443}[page.scheme]
            address, own = _canonical(page.hostname or ""), page.port or default
            return address in self._allowed or (address, own) == (
                name, int((port or ":")[1:] or default))
        except (ValueError, KeyError):  # the port is no number, or the scheme is not HTTP's, as in "null"
            return False


def _canonical(name):
    """Returns a name in lower case, or an address of `ipaddress`."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return name
