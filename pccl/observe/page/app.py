"""The routes of the page, and the headers of every answer."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pccl.observe.page.access import COOKIE, Access
from pccl.observe.page.feed import CLIENTS_MAX, Feed

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The browser loads nothing from elsewhere, runs no inline script, and shows no frame."""

REFUSAL = "open the address that the command with --http has printed: it ends with ?code=...\n"

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class PageGuard:
    """Adds ``HEADERS`` to every answer, and refuses requests that are not for this page."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        if not self._access.accepts_host(headers.get("host", "")):
            refusal = PlainTextResponse("this page has no such host name\n", 421)
            await refusal(scope, receive, with_headers)
        elif headers.get("sec-fetch-site") == "cross-site" and scope["path"] != "/":
            refusal = PlainTextResponse("this page is not for other sites\n", 403)
            await refusal(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


def make_app(feed: Feed, access: Access) -> ASGIApp:
    """Return the application.

    Args:
        feed: the messages for browsers.
        access: who may see the page.
    """

    async def page(request: Request) -> Response:
        code = request.query_params.get("code")
        if not access.accepts(code or request.cookies.get(COOKIE)):
            return PlainTextResponse(REFUSAL, 403)
        if code is None:
            return _file("page.html")
        answer = RedirectResponse("/", 303)  # takes the code out of the address
        # Not "strict": then the redirect of a link in a chat would come without the cookie.
        answer.set_cookie(COOKIE, access.code, httponly=True, samesite="lax")
        return answer

    async def events(request: Request) -> Response:
        if not access.accepts(request.cookies.get(COOKIE)):
            return PlainTextResponse(REFUSAL, 403)
        if feed.clients >= CLIENTS_MAX:
            return PlainTextResponse(f"{CLIENTS_MAX} browsers watch already\n", 503)
        last = request.headers.get("last-event-id", "")
        number = int(last) if last.isascii() and last.isdecimal() and len(last) < 20 else 0
        return StreamingResponse(feed.messages(number), media_type="text/event-stream")

    async def asset(request: Request) -> Response:
        return _file(request.url.path.removeprefix("/"))

    routes = [
        Route("/", page),
        Route("/events", events),
        Route("/page.css", asset),
        Route("/page.js", asset),
    ]
    return PageGuard(Starlette(routes=routes), access)


def _file(name: str) -> Response:
    file = Path(__file__).with_name(name)
    return Response(file.read_bytes(), media_type=TYPES[file.suffix])
