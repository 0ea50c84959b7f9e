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


def error_of(reply: httpx.Response) -> str:
    body = reply.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


# -- keys ------------------------------------------------------------------------------------------


def test_without_the_key_only_the_health_check_works(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "k3y-ünd-more"
    server = serve(key=key)
    paths = ("/v1/models", "/metrics", "/v1/completions", "/nowhere", "/openapi.json")
    for given in (None, "", "Bearer", f"Bearer {key}x", f"Bearer {key[:-1]}", key, f"bearer {key}"):
        headers = {} if given is None else {"authorization": given.encode()}
        for path in paths:
            reply = httpx.get(server.url + path, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert "an API key is required" in error_of(reply)
            assert "k3y" not in reply.text
    assert httpx.get(f"{server.url}/health").status_code == 200
    right = {"authorization": f"Bearer {key}".encode()}
    assert server.post(TEXT, **ASKED, headers=right).status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers=right).status_code == 200
    assert "k3y" not in caplog.text


# -- hosts and pages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::", ""]
)
def test_a_foreign_host_name_is_refused(server: Any, host: str) -> None:
    reply = server.post(TEXT, **ASKED, headers={"host": host})
    assert reply.status_code == 403
    assert "the Host header names another machine" in error_of(reply)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.1.2.3:8000", "[::1]:8000"])
def test_this_machines_own_names_are_accepted(server: Any, host: str) -> None:
    assert server.post(TEXT, **ASKED, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example", "file://", "x", ""]
)
def test_pages_of_other_sites_are_refused(serve: Any, server: Any, origin: str) -> None:
    for target in (server, serve(hosts=None)):
        reply = target.post(TEXT, **ASKED, headers={"origin": origin})
        assert reply.status_code == 403
        assert "requests from other origins" in error_of(reply)


def test_pages_of_this_machine_and_allowed_hosts_are_accepted(serve: Any, server: Any) -> None:
    assert server.post(TEXT, **ASKED, headers={"origin": "http://localhost:3000"}).status_code == 200
    allowing = serve(hosts=["Box.example"])
    for headers in ({"host": "box.example:8000"}, {"origin": "https://BOX.example"}):
        assert allowing.post(TEXT, **ASKED, headers=headers).status_code == 200
    assert allowing.post(TEXT, **ASKED, headers={"host": "evil.example"}).status_code == 403
    assert serve(hosts=None).post(TEXT, **ASKED, headers={"host": "anything.example"}).status_code == 200


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_content_types_that_a_page_can_post_without_preflight_are_refused(server: Any, kind: str) -> None:
    reply = server.post(TEXT, content=json.dumps(ASKED), headers={"content-type": kind} if kind else {})
    assert reply.status_code == 415
    assert "send application/json" in error_of(reply)


def test_json_with_a_charset_is_accepted_and_compressed_json_is_not(server: Any) -> None:
    content = json.dumps(ASKED)
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
    headers = {"content-type": "application/json"}
    for content in (b"".join(chunks(size)), chunks(size)):  # with a Content-Length, and in chunks without one
        reply = server.post(TEXT, content=content, headers=headers)
        assert reply.status_code == 413
        assert error_of(reply) == "the body is larger than this server's limit of 1500 bytes"
    with server.client() as client, pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="x" * size)
    assert refused.value.status_code == 413
    assert server.post(TEXT, **ASKED).status_code == 200


def test_a_body_exactly_at_the_limit_is_accepted(serve: Any) -> None:
    content = json.dumps(ASKED).encode()
    server = serve(max_body=len(content))
    headers = {"content-type": "application/json"}
    assert server.post(TEXT, content=content, headers=headers).status_code == 200
    assert server.post(TEXT, content=content + b" ", headers=headers).status_code == 413


def connected(server: Any, head: str) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.encode())
    return connection


POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_an_announced_gigabyte_is_refused_before_it_is_sent(server: Any) -> None:
    with connected(server, f"{POST}Content-Length: 1000000000\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_arrive_times_out(serve: Any) -> None:
    server = serve(body_timeout=0.3)
    with connected(server, f"{POST}Content-Length: 1000\r\n\r\n" + '{"model"') as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_disconnects_in_mid_body_does_no_harm(server: Any) -> None:
    with connected(server, f"{POST}Content-Length: 1000\r\n\r\n" + '{"model"'):
        pass
    assert server.post(TEXT, **ASKED).status_code == 200


def test_http_1_0_needs_no_host(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for version, statuses in (("1.0", ("200",)), ("1.1", ("400", "403"))):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(f"GET /health HTTP/{version}\r\n\r\n".encode())
            assert client.recv(999).split()[1].decode() in statuses
