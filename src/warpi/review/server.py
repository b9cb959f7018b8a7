"""HTTP server of the review page, for a person who has the printed link with its secret token.

It listens on this machine only, unless another address is given.
"""

import hmac
import io
import json
import secrets
import socket
import sqlite3
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from warpi.errors import UserError
from warpi.review.page_requests import Json, RequestRefused, ReviewSession
from warpi.review.reviewed_labels import corrected_csv

LOCAL = "127.0.0.1"
_ASSETS = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
_ASSETS |= {"/copies.js": ("copies.js", "text/javascript")}
_ASSETS |= {"/page.css": ("page.css", "text/css"), "/icon.svg": ("icon.svg", "image/svg+xml")}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MAX_BYTES = 1 << 20  # of a request
_MAX_CONNECTIONS = 200  # at once; more are closed without a response
_IDLE_SECONDS = 60  # between two requests of a connection, and for a client that does not read the response
_REQUEST_SECONDS = 10  # from the first byte of a request to its last


class Server(ThreadingHTTPServer):
    """HTTP server with one thread per connection, so that a slow client does not delay others."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        review: ReviewSession,
        port: int = 0,
        host: str = LOCAL,
        people: Mapping[str, ReviewSession] | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        """Each of the `people` has a session and a token. `tls`: paths of the certificate and its private key."""
        self.review = review
        self.sessions = {secrets.token_urlsafe(32): review}
        self.token = next(iter(self.sessions))
        self.tokens = {name: secrets.token_urlsafe(32) for name in people or {}}
        self.sessions |= {self.tokens[name]: session for name, session in (people or {}).items()}
        self.scheme = "https" if tls else "http"
        context = _read_certificate(*tls) if tls else None
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as e:
            where = f"port {port}" if host == LOCAL else f"{host}, port {port}"
            raise UserError(f"cannot listen on {where}: {e}; choose another --port, or 0 for a free one") from e
        if context is not None:  # the TLS handshake is done in the thread of the connection
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.host = socket.gethostname() if host in ("0.0.0.0", "") else host  # as the link names it
        self.hosts = {f"{name}:{self.server_port}" for name in (LOCAL, "localhost", self.host)}
        self.free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.cookie = f"warpi_{self.server_port}"  # cookies are shared among the ports of a host

    @property
    def link(self) -> str:
        return self.link_with(self.token)

    def link_with(self, token: str) -> str:
        return f"{self.scheme}://{self.host}:{self.server_port}/?token={token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a new thread; close it if there are too many."""
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnect, or that do not use TLS with a server that does."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()


class _TimedReader(io.RawIOBase):
    """The bytes that a client sends. A request must be complete `_REQUEST_SECONDS` after its first byte."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline: float | None = None  # None: no byte of the next request has arrived

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = _IDLE_SECONDS if self.deadline is None else self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was sent too slowly")
        self.connection.settimeout(left)
        try:
            n = self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(_IDLE_SECONDS)
        if self.deadline is None:
            self.deadline = time.monotonic() + _REQUEST_SECONDS
        return n


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "warpi", ""
    timeout = _IDLE_SECONDS
    wbufsize = -1  # send headers and content together: Nagle's algorithm would delay the second of two small packets

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.reader = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self.reader)

    def handle_one_request(self) -> None:
        self.reader.deadline = None
        super().handle_one_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Respond to malformed requests and unsupported methods without echoing the request."""
        self.close_connection = True
        self.request_version = self.protocol_version  # HTTP/0.9 has no headers
        self._send(HTTPStatus(code), "text/plain", HTTPStatus(code).phrase.encode(), {"Connection": "close"})

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def _respond(self, handle: Callable[[str, Mapping[str, str]], None]) -> None:
        """Check and handle a request; send the reason if it is refused."""
        try:
            try:
                self._check_and_handle(handle)
            except RequestRefused as e:
                self.close_connection = True  # an unread body must not be parsed as the next request
                is_page = self.path.partition("?")[0] == "/"
                kind = "text/plain" if is_page else "application/json"
                text = e.reason if is_page else json.dumps({"error": e.reason})
                self._send(e.status, kind, text.encode(), {"Connection": "close"})
        except ConnectionError:
            self.close_connection = True  # the tab was closed

    def _check_and_handle(self, handle: Callable[[str, Mapping[str, str]], None]) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            raise RequestRefused("invalid URL") from None
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self._check_sender(url.path, query)
        try:
            handle(url.path, query)
        except UserError as e:
            raise RequestRefused(str(e), HTTPStatus.CONFLICT) from e
        except sqlite3.Error as e:  # for example a full disk; the page reports it and keeps the decision
            raise RequestRefused(f"Decisions cannot be stored: {e}", HTTPStatus.INSUFFICIENT_STORAGE) from e

    def _check_sender(self, path: str, query: Mapping[str, str]) -> None:
        """Accept only requests from our own page, in a browser that opened the link.

        Host: another name that resolves to 127.0.0.1 is refused (DNS rebinding). Origin and Sec-Fetch-Site: pages from
        other origins, including other ports of this machine, cannot use the cookie of this browser.
        """
        server = self.server
        headers = self.headers
        if headers.get("Host") not in server.hosts:
            raise RequestRefused("unknown host name", HTTPStatus.MISDIRECTED_REQUEST)
        origin = headers.get("Origin")
        site = headers.get("Sec-Fetch-Site", "none")
        own_origins = {f"{server.scheme}://{host}" for host in server.hosts}
        if (origin is not None and origin not in own_origins) or (origin is None and self.command != "GET"):
            raise RequestRefused("requests from other pages are refused", HTTPStatus.FORBIDDEN)
        if path != "/" and site not in ("same-origin", "none"):
            raise RequestRefused("requests from other pages are refused", HTTPStatus.FORBIDDEN)
        in_link = query.get("token", "") if path == "/" and self.command == "GET" else ""
        sent = (in_link, self._cookie_token())
        self.token = next((known for token in sent for known in server.sessions if _is_same(token, known)), "")
        if not self.token:
            raise RequestRefused("open the link that warpi review printed when it started", HTTPStatus.FORBIDDEN)

    def _cookie_token(self) -> str:
        """The token in the cookie. http.cookies fails on malformed cookies, which other ports of this host may set."""
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.server.cookie), "")

    def _get(self, path: str, query: Mapping[str, str]) -> None:
        review = self.server.sessions[self.token]
        items = review.items
        match path.strip("/").split("/"):
            case _ if path in _ASSETS:
                self._asset(path)
            case ["api", "session"]:
                self._json(review.session())
            case ["api", "items"]:
                self._json(review.list_items(query))
            case ["api", "pairs"]:
                self._json(review.pairs(query))
            case ["api", "preview"]:
                self._json(review.preview(query))
            case ["api", "progress"]:
                self._json(review.progress())
            case ["api", "near", row]:
                self._json(review.near(_id(row), query))
            case ["api", "corrected.csv"]:
                review.check_sees_all()
                content = corrected_csv(items, review.store.current_decisions()).encode(errors="surrogateescape")
                extra = {"Content-Disposition": 'attachment; filename="corrected.csv"'}
                self._send(HTTPStatus.OK, "text/csv; charset=utf-8", content, extra)
            case ["api", "copies"]:
                self._json(review.copy_groups())
            case ["api", "copies", group]:
                self._json(review.copy_group(_id(group)))
            case ["copy", at]:
                self._picture(review.check_copies().picture(_id(at)))
            case ["picture", row]:
                self._picture(items.picture(_id(row)))
            case ["trusted", k]:
                self._picture(items.trusted_picture(_id(k)))
            case _:
                raise RequestRefused("not found", HTTPStatus.NOT_FOUND)

    def _post(self, path: str, query: Mapping[str, str]) -> None:  # noqa: ARG002
        review = self.server.sessions[self.token]
        verbs = {
            "/api/decide": review.decide,
            "/api/accept": review.accept,
            "/api/copies": review.keep_copy,
            "/api/undo": review.undo,
            "/api/export": review.export,
        }
        if path not in verbs:
            raise RequestRefused("not found", HTTPStatus.NOT_FOUND)
        self._json(verbs[path](self._body()))

    def _body(self) -> Json:
        if self.headers.get_content_type() != "application/json":  # forms of other pages cannot send this type
            raise RequestRefused("Content-Type must be application/json", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= _MAX_BYTES):
            raise RequestRefused(
                f"Content-Length is required and must be at most {_MAX_BYTES} bytes",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise RequestRefused("the request body is not valid JSON") from None
        if not isinstance(request, dict):
            raise RequestRefused("the request body must be a JSON object")
        return request

    def _asset(self, path: str) -> None:
        name, kind = _ASSETS[path]
        content = (resources.files("warpi.review") / "assets" / name).read_bytes()
        secure = "; Secure" if self.server.scheme == "https" else ""
        cookie = f"{self.server.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/{secure}"
        self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", content, {"Set-Cookie": cookie} if path == "/" else {})

    def _picture(self, picture: tuple[str, bytes] | None) -> None:
        if picture is None:
            raise RequestRefused("there is no image", HTTPStatus.NOT_FOUND)
        self._send(HTTPStatus.OK, *picture, {})

    def _json(self, content: Json) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(content, allow_nan=False).encode(), {})

    def _send(self, status: HTTPStatus, kind: str, content: bytes, extra: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **extra, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, so that the link stays visible in the terminal."""


def _is_same(token: str, known: str) -> bool:
    """Compare tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(token.encode(), known.encode())


def _read_certificate(certificate: Path, private_key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key)
    except (OSError, ValueError) as e:
        raise UserError(
            f"cannot use the certificate {certificate} with the private key {private_key}: {e}; pass PEM files"
        ) from e
    return context


def _id(text: str) -> int:
    """Parse the number of an item in a URL; anything else is answered with 404."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefused("not found", HTTPStatus.NOT_FOUND)
    return int(text)
