"""Access control by keys, hosts and origins, and limits on the type, size and speed of bodies."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

TEXT = "/v1/completions"
ASKED = {"model": "tiny", "prompt": "Hm.", "max_tokens": 2}
JSON = {"content-type": "application/json"}


def error_of(reply: httpx.Response) -> str:
    body = reply.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def test_without_the_key_only_the_health_check_works(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "k3y-ünd-more"
    server = serve(key=key)
    for given in (None, "", "Bearer", f"Bearer {key}x", f"Bearer {key[:-1]}", key, f"bearer {key}"):
        headers = {} if given is None else {"authorization": given.encode()}
        for path in ("/v1/models", "/metrics"):
            reply = httpx.get(server.url + path, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert "an API key is required" in error_of(reply)
            assert "k3y" not in reply.text
        assert server.post(TEXT, **ASKED, headers=headers).status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.post(TEXT, **ASKED, headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
    assert "k3y" not in caplog.text


# -- hosts and pages -------------------------------------------------------------------------------


def test_foreign_host_names_are_refused(server: Any) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::", ""):
        reply = server.post(TEXT, **ASKED, headers={"host": host})
        assert reply.status_code == 403, host
        assert "the Host header names another machine" in error_of(reply)
        assert "--allowed-host" in error_of(reply)
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "127.1.2.3:8000", "[::1]:8000"):
        assert server.post(TEXT, **ASKED, headers={"host": host}).status_code == 200, host


def test_pages_of_other_sites_are_refused(serve: Any, server: Any) -> None:
    for target in (server, serve(hosts=None)):
        for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example", "file://", "x", ""):
            reply = target.post(TEXT, **ASKED, headers={"origin": origin})
            assert reply.status_code == 403, origin
            assert "requests from other origins" in error_of(reply)
    assert server.post(TEXT, **ASKED, headers={"origin": "http://localhost:3000"}).status_code == 200


def test_allowed_hosts_are_accepted(serve: Any) -> None:
    allowing = serve(hosts=["Box.example"])
    for headers in ({"host": "box.example:8000"}, {"origin": "https://BOX.example"}):
        assert allowing.post(TEXT, **ASKED, headers=headers).status_code == 200
    assert allowing.post(TEXT, **ASKED, headers={"host": "evil.example"}).status_code == 403
    assert serve(hosts=None).post(TEXT, **ASKED, headers={"host": "anything.example"}).status_code == 200


# -- bodies ----------------------------------------------------------------------------------------


def test_only_json_which_a_page_cannot_post_without_preflight_is_accepted(server: Any) -> None:
    content = json.dumps(ASKED)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        reply = server.post(TEXT, content=content, headers={"content-type": kind} if kind else {})
        assert reply.status_code == 415
        assert "send application/json" in error_of(reply)
    json_type = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post(TEXT, content=content, headers=json_type).status_code == 200
    reply = server.post(TEXT, content=content, headers={**json_type, "content-encoding": "gzip"})
    assert reply.status_code == 415
    assert "the body is compressed" in error_of(reply)


def chunks(size: int) -> Iterator[bytes]:
    yield b'{"model": "tiny", "prompt": "'
    for _ in range(size // 1000):
        yield b"x" * 1000
    yield b'"}'


@pytest.mark.parametrize("size", [2000, 500_000])
def test_a_body_over_the_limit_is_refused_with_or_without_content_length(serve: Any, size: int) -> None:
    server = serve(max_body=1500)
    for content in (b"".join(chunks(size)), chunks(size)):  # with a Content-Length, and in chunks without one
        reply = server.post(TEXT, content=content, headers=JSON)
        assert reply.status_code == 413
        assert error_of(reply) == "the body is larger than this server's limit of 1500 bytes"
    with server.client() as client, pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="x" * size)
    assert refused.value.status_code == 413
    content = json.dumps(ASKED).encode().ljust(1500)
    assert server.post(TEXT, content=content, headers=JSON).status_code == 200  # exactly at the limit
    assert server.post(TEXT, content=content + b" ", headers=JSON).status_code == 413


def connected(server: Any, head: str) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode())
    return connection


POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_bodies_that_do_not_arrive_do_no_harm(serve: Any) -> None:
    server = serve(body_timeout=0.3)
    with connected(server, f"{POST}Content-Length: 1000000000\r\n\r\n") as connection:  # refused before it is sent
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
    with connected(server, f"{POST}Content-Length: 1000\r\n\r\n" + '{"model"') as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    with connected(server, f"{POST}Content-Length: 1000\r\n\r\n" + '{"model"'):
        pass  # the client disconnects
    assert server.post(TEXT, **ASKED).status_code == 200


def test_http_1_0_needs_no_host(server: Any) -> None:
    for version, statuses in (("1.0", ("200",)), ("1.1", ("400", "403"))):
        with connected(server, f"GET /health HTTP/{version}\r\n\r\n") as client:
            assert client.recv(999).split()[1].decode() in statuses
