"""Connections without a request: they are closed after a time, and at once if another needs their descriptor."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any

import httpx2 as httpx
import pytest

from tot.decoders.serving import server as serving

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def connect(server: Any, sent: bytes = b"") -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def answered(connection: socket.socket, sent: bytes) -> bool:
    connection.sendall(sent)
    reply = b""
    while not reply.endswith(b"}"):
        reply += connection.recv(65536)
    return reply.startswith(b"HTTP/1.1 200")


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("before", [b"", WHOLE])
@pytest.mark.parametrize("sent", [b"", HALF])
def test_a_connection_that_sends_no_whole_request_is_closed(
    serve: Any, monkeypatch: pytest.MonkeyPatch, before: bytes, sent: bytes
) -> None:
    monkeypatch.setattr(serving, "_IDLE_SECONDS", 0.5)
    server = serve()
    connection = connect(server)
    assert not before or answered(connection, before)
    connection.sendall(sent)
    assert is_closed(connection)


def test_a_connection_with_requests_stays_open(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_IDLE_SECONDS", 1.5)
    connection = connect(serve())
    for _ in range(6):
        assert answered(connection, WHOLE)
        time.sleep(0.5)
    connection.close()


def test_idle_connections_give_way_if_no_descriptors_are_free(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    idle = [connect(server, HALF) for _ in range(3)]
    server.wait_until(lambda: len(server.server.server_state.connections) == 3)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")] * 2

    def scarce(listening: Any) -> Any:
        if failures and isinstance(listening, serving._Listening):
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    assert httpx.get(f"{server.url}/health").status_code == 200
    closed = [connection for connection in idle if _ended(connection)]
    assert (len(closed), failures) == (2, [])


def _ended(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return is_closed(connection)
    except TimeoutError:
        return False


def test_all_busy_connections_leave_none_to_close() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    async def run() -> bool:
        return serving.Server(app)._close_one()

    assert not asyncio.run(run())
