"""HTTP requests that are over in time: one deadline for connection, head and body, however slowly they come."""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any


class Exchange:
    """Shuts the connections made in it after ``seconds``, so that whoever reads from one gets an end."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> Exchange:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()

    def watch(self, made: socket.socket) -> None:
        """End this connection too when the time is over."""
        self._sockets.append(made)
        if self.expired:
            self._expire()

    def _expire(self) -> None:
        self.expired = True
        for made in self._sockets:
            with contextlib.suppress(OSError):  # it has ended by itself
                made.shutdown(socket.SHUT_RDWR)


class Request(urllib.request.Request):
    """A POST that belongs to an exchange."""

    def __init__(self, url: str, body: bytes, headers: Mapping[str, str], exchange: Exchange) -> None:
        super().__init__(url, body, dict(headers))
        self.exchange = exchange


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return what opens each ``Request``; the proxies of the environment are used as ever."""
    return urllib.request.build_opener(_Plain(), _Encrypted(), *handlers)


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, host: str, *, exchange: Exchange, **given: Any) -> None:
        super().__init__(host, **given)
        self._exchange = exchange

    def connect(self) -> None:
        """Connect; from then on the exchange watches the socket and can end it."""
        super().connect()
        self._exchange.watch(self.sock)


class _EncryptedConnection(http.client.HTTPSConnection):
    def __init__(self, host: str, *, exchange: Exchange, **given: Any) -> None:
        super().__init__(host, **given)
        self._exchange = exchange

    def connect(self) -> None:
        """Connect and shake hands; from then on the exchange watches the socket and can end it."""
        super().connect()
        self._exchange.watch(self.sock)


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a connection that is watched by the exchange of the ``Request``."""
        assert isinstance(req, Request)
        made: Any = functools.partial(_PlainConnection, exchange=req.exchange)
        return self.do_open(made, req)


class _Encrypted(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        self._checked = ssl.create_default_context()
        super().__init__(context=self._checked)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a connection that is watched by the exchange of the ``Request``."""
        assert isinstance(req, Request)
        made: Any = functools.partial(_EncryptedConnection, exchange=req.exchange)
        return self.do_open(made, req, context=self._checked)
