"""The HTTP server: a listening socket, uvicorn and a graceful shutdown.

SIGTERM or SIGINT stops the server: new requests get 503, and running requests may finish within the grace time. The
remaining requests are cancelled with an error, and `serve` returns. A second SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
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


class Server(uvicorn.Server):
    """Serves an app. Closes idle connections after `_IDLE_SECONDS`, or earlier if they take most file descriptors.

    With a service, it finishes the requests before it closes its socket, so that new clients get an error, not a
    refused connection.
    """

    def __init__(self, app: ASGIApp, service: Service | None = None, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called when the signal handlers are set; earlier connections wait in the socket."""
        config = uvicorn.Config(
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
        super().__init__(config)
        self._service = service
        self._ready = ready
        self._idle: dict[Any, tuple[float, Any]] = {}
        """By connection: the time since when it has no other request, and its last request."""
        self._lacked_descriptors = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        self._ready()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop. It reports each attempt to accept a connection without a free file descriptor."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self._lacked_descriptors:
            self._lacked_descriptors = True
            log.warning("no free file descriptors: idle connections are closed, and new ones wait")

    async def on_tick(self, counter: int) -> bool:
        self._close_idle()
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Close connections that are idle too long, and the longest idle ones if too few descriptors are left."""
        known, now = self._idle, time.monotonic()
        self._idle = {}
        for connection in self.server_state.connections:
            request = getattr(connection, "cycle", None)
            if request is None or request.response_complete:
                since, last = known.get(connection, (now, None))
                self._idle[connection] = (since if last is request else now), request
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        excess = 0 if limit == resource.RLIM_INFINITY else len(self.server_state.connections) - limit * 3 // 4
        for connection, (since, _) in sorted(self._idle.items(), key=lambda item: item[1][0]):
            if excess > 0 or now - since > _IDLE_SECONDS:
                connection.transport.abort()
                excess -= 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (service := self._service) is not None:
            clock = asyncio.get_running_loop().time
            service.stop_admitting()
            deadline = clock() + service.limits.grace
            while service.running and clock() < deadline and not self.force_exit:
                await asyncio.sleep(_POLL_SECONDS)
            while service.running and clock() < deadline + _FLUSH_SECONDS:
                service.cancel_all()  # again, as waiting requests are admitted
                await asyncio.sleep(_POLL_SECONDS)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises OptionError if the address or port is unusable."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except OSError as error:
        raise OptionError(f"--host {host}: {error.strerror}: give an address of this machine") from None
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OptionError(f"cannot listen on {host}, port {port} ({reason}): give another --port") from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket: http://host:port."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, service: Service, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM, shut down gracefully and return; the signal has no other effect."""
    # uvicorn raises the signal again for the previous handlers: these ignore it.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(Server(app, service, ready).serve(sockets=[listening]))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
