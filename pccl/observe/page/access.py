"""Who may see the page.

On loopback, processes of this machine may. The ``Host`` header must name this machine, so that no
site on the web can get at the page through a name that it points to loopback (DNS rebinding).

Beyond loopback, the browser must know the token of the run. It sends the token once, and gets a
cookie for it, which is only good for this page and this process.
"""

from __future__ import annotations

import hmac
import secrets

from pccl.addresses import is_loopback

COOKIE = "pccl_page"
COOKIE_BYTES = 32

TOKEN_CHARACTERS_MAX = 4096


class Access:
    """Decides who may see the page.

    Args:
        host: host on which the page is served.
        token: the secret of the run.

    Raises:
        ValueError: other machines can reach ``host``, and there is no token.
    """

    def __init__(self, host: str, token: bytes | None) -> None:
        self.is_open = is_loopback(host)
        if not self.is_open and token is None:
            raise ValueError(
                f"other machines can reach the page at {host}, so the run needs a token: give the "
                "master one, or serve the page on 127.0.0.1"
            )
        self._token = token
        self.cookie = secrets.token_urlsafe(COOKIE_BYTES)

    def accepts_host(self, header: str) -> bool:
        """Whether a request with this ``Host`` header is meant for this page."""
        if not self.is_open:
            return True  # another site's name does not get this site's cookie
        host, colon, port = header.rpartition(":")
        if colon and port.isdecimal():
            return is_loopback(host)
        return is_loopback(header)

    def accepts_token(self, text: str) -> bool:
        """Whether this is the token of the run. Takes the same time for all wrong ones."""
        if self._token is None or len(text) > TOKEN_CHARACTERS_MAX:
            return False
        return hmac.compare_digest(text.strip().encode(errors="replace"), self._token)

    def accepts_cookie(self, value: str | None) -> bool:
        """Whether a request with this cookie may see the run."""
        if self.is_open:
            return True
        return value is not None and hmac.compare_digest(
            value.encode(errors="replace"), self.cookie.encode()
        )
