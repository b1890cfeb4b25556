"""Who may see the page.

On loopback, processes of this machine may. The ``Host`` header must name this machine, so that no
site on the web can get at the page through a name that it points to loopback (DNS rebinding).

Beyond loopback, the browser must know a code, which is made for this page and this process, and is
good for nothing else. It is part of the address that the command prints. The browser then keeps it
as a cookie. The token of the run never gets to a browser, because the page has no encryption.
"""

from __future__ import annotations

import hmac
import secrets

from pccl.addresses import is_loopback

COOKIE = "pccl_page"

CODE_BYTES = 32


class Access:
    """Decides who may see the page.

    Args:
        host: host on which the page is served.

    Attributes:
        code: what a browser must know; empty: nothing.
    """

    def __init__(self, host: str) -> None:
        self.code = "" if is_loopback(host) else secrets.token_urlsafe(CODE_BYTES)

    def accepts_host(self, header: str) -> bool:
        """Whether a request with this ``Host`` header is meant for this page."""
        if self.code:
            return True  # another site's name does not get this site's cookie
        host, colon, port = header.rpartition(":")
        if colon and port.isdecimal():
            return is_loopback(host)
        return is_loopback(header)

    def accepts(self, code: str | None) -> bool:
        """Whether a browser with this code may see the run. Takes the same time for all codes."""
        given = (code or "").encode(errors="replace")
        return not self.code or hmac.compare_digest(given, self.code.encode())
