"""Connections without a request: they are closed after a time, and at once if they take most file descriptors."""

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


def test_a_connection_that_sends_no_whole_request_is_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_IDLE_SECONDS", 0.5)
    server = serve()
    for before, sent in ((b"", b""), (b"", HALF), (WHOLE, b""), (WHOLE, HALF)):
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


def test_the_longest_idle_connections_give_way_if_they_take_most_descriptors(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    idle = []
    for count in range(1, 5):
        idle.append(connect(server, HALF))
        server.wait_until(lambda count=count: len(server.server._idle) == count)
    monkeypatch.setattr(serving.resource, "getrlimit", lambda _: (4, 4))  # room for three connections
    assert is_closed(idle[0])
    assert httpx.get(f"{server.url}/health").status_code == 200
    idle[-1].settimeout(0.5)
    with pytest.raises(TimeoutError):
        idle[-1].recv(1)


def test_missing_descriptors_are_logged_once(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    for _ in range(3):
        server.server._on_error(loop, {"message": "m", "exception": OSError(errno.EMFILE, "too many open files")})
    assert caplog.messages == ["no free file descriptors: idle connections are closed, and new ones wait"]
    server.server._on_error(loop, {"message": "another error"})
    assert caplog.messages[1:] == ["another error"]
    loop.close()
