"""The HTTP server: a listening socket, uvicorn and a graceful shutdown.

SIGTERM or SIGINT stops the server: new requests get 503, and running requests may finish within the grace time. The
remaining requests are cancelled with an error, and `serve` returns. A second SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tot.decoders.errors import OptionError
from tot.decoders.serving.service import Service

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 3
"""Seconds to send the last replies after decoding has ended."""
_POLL_SECONDS = 0.05
_IDLE_SECONDS = 75
"""Seconds that an idle connection stays open: longer than in clients, since closing it first can lose a request."""


def quiet(app: ASGIApp) -> uvicorn.Config:
    """Return the configuration of a server that logs no requests and trusts no proxy."""
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        timeout_keep_alive=_IDLE_SECONDS,
    )


class Server(uvicorn.Server):
    """Closes connections without a request after `_IDLE_SECONDS`, and the longest idle one if descriptors run out."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(quiet(app))
        self._idle: dict[Any, tuple[Any, float]] = {}
        """By connection: its last request, and the time since when the connection has no other."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            if isinstance(one, _Listening):
                one.make_room = self._close_one

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self._update_idle()
            for connection, (_, since) in self._idle.items():
                if time.monotonic() - since > _IDLE_SECONDS:
                    connection.transport.abort()
        return await super().on_tick(counter)

    def _update_idle(self) -> None:
        known, now = self._idle, time.monotonic()
        last = {one: getattr(one, "cycle", None) for one in self.server_state.connections}
        idle = {one: request for one, request in last.items() if request is None or request.response_complete}
        self._idle = {
            one: known[one] if one in known and known[one][0] is request else (request, now)
            for one, request in idle.items()
        }

    def _close_one(self) -> bool:
        """Close the connection that is idle for the longest time. Return False if all have a request."""
        self._update_idle()
        if self._idle:
            longest = min(self._idle, key=lambda one: self._idle[one][1])
            longest.transport.abort()
            self.server_state.connections.discard(longest)
        return bool(self._idle)


class HTTPServer(Server):
    """Finishes requests before it closes its socket, so that new clients get an error, not a refused connection."""

    def __init__(self, app: ASGIApp, service: Service, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called when the signal handlers are set; earlier connections wait in the socket."""
        super().__init__(app)
        self._service = service
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service, clock = self._service, asyncio.get_running_loop().time
        for gate in service.gates.values():
            gate.closed = True
        deadline = clock() + service.limits.grace
        while self._busy and clock() < deadline and not self.force_exit:
            await asyncio.sleep(_POLL_SECONDS)
        while self._busy and clock() < deadline + _FLUSH_SECONDS:  # waiting requests are admitted and cancelled too
            service.cancel_all()
            await asyncio.sleep(_POLL_SECONDS)
        await super().shutdown(sockets)

    @property
    def _busy(self) -> bool:
        return any(gate.running or gate.waiting for gate in self._service.gates.values())


class _Listening(socket.socket):
    """A listening socket that closes an idle connection, or else a new one, if no file descriptors are free.

    asyncio would retry immediately, log each attempt and leave clients waiting.
    """

    make_room: Callable[[], bool] = staticmethod(lambda: False)
    """Closes an idle connection, and returns whether it did."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._logged = False

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            accepted = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if not self._logged:
                log.warning("no free file descriptors: idle or new connections are closed until some are free")
            self._logged = True
            if not self.make_room():
                self._refuse()
            raise BlockingIOError(errno.EAGAIN, "no free file descriptors") from None
        self._logged = False
        return accepted

    def _refuse(self) -> None:
        """Accept one connection with the spare descriptor and close it."""
        if self._spare is not None:
            os.close(self._spare)
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):
            self._spare = None
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises OptionError if the address or port is unusable."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = _Listening(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"--host {host}: {error.strerror}: give an address of this machine") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise OptionError(f"cannot listen on {host}, port {port} ({error.strerror}): give another --port") from None
    return listening


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket: http://host:port."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, service: Service, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM, shut down gracefully and return; the signal has no other effect."""
    # uvicorn raises the signal again for the previous handlers: these ignore it.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(HTTPServer(app, service, ready).serve(sockets=[listening]))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
