"""The server's life: a socket, uvicorn over it, and an end in order.

SIGTERM or SIGINT stops it: from then on new requests get 503, those that run may end within the grace time, what is
left is cancelled (and told so), and the process goes on to its own end. A second SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tot.decoders.errors import OptionError
from tot.decoders.serving.service import Service

log = logging.getLogger(__name__)

_LAST_WORDS = 3
"""Seconds for replies to leave once nothing is decoded any more."""
_LOOK = 0.05


class HTTPServer(uvicorn.Server):
    """Drains before it closes its socket, so that whoever still comes is told rather than refused a connection."""

    def __init__(self, app: ASGIApp, service: Service, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called once signals are heeded; connections wait in the socket from before."""
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )
        self._service = service
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service, clock = self._service, asyncio.get_running_loop().time
        service.gate.closed = True
        deadline = clock() + service.limits.grace
        while self._busy and clock() < deadline and not self.force_exit:
            await asyncio.sleep(_LOOK)
        while self._busy and clock() < deadline + _LAST_WORDS:  # those that waited are let in, and cancelled too
            service.cancel_all()
            await asyncio.sleep(_LOOK)
        await super().shutdown(sockets)

    @property
    def _busy(self) -> bool:
        return bool(self._service.gate.running or self._service.gate.waiting)


class _Listening(socket.socket):
    """A listening socket that refuses connections while the process has no file descriptors left.

    asyncio would try again at once, log each try, and leave clients waiting.
    """

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._said = False

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            accepted = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if not self._said:
                log.warning("no file descriptors are left: new connections are refused until some are free")
            self._said = True
            self._refuse()
            raise BlockingIOError(errno.EAGAIN, "no file descriptors are left") from None
        self._said = False
        return accepted

    def _refuse(self) -> None:
        """Accept one connection by the spare descriptor, and close it."""
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
    """A socket that listens; port 0 takes a free one. Raises OptionError."""
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
        raise OptionError(f"can't listen at {host}, port {port} ({error.strerror}): give another --port") from None
    return listening


def address_of(listening: socket.socket) -> str:
    """Where clients find it: http://host:port."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, service: Service, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until told to stop, in good order: the signal that stopped it goes no further."""
    # uvicorn raises again the signals it was stopped by, for whoever had them before: that is us.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(HTTPServer(app, service, ready).serve(sockets=[listening]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
