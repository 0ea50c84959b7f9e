"""Servers that cannot be reached, are slow, send too much, or fail for many requests at once."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import pytest

from tot.decoders import Message, ModelError, Request, RequestError, Sampling, load_decoder
from tot.decoders.errors import ServerError

PASSING = [408, 409, 429, 500, 502, 503, 504, 529]


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling))


def text_of(server: Any) -> str:
    """Return the server's reply to its last received body."""
    return server.hashed("", server.posts[-1].body)[0]["text"]


def test_a_refused_connection_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ModelError, match=rf"server at http://127\.0\.0\.1:{port}/v1 does not answer .*: start it"):
            load_decoder("openai", "tiny", base_url=f"http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize("has_key", [True, False])
def test_a_wrong_key_is_reported_before_any_request(
    server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch, has_key: bool
) -> None:
    if not has_key:
        monkeypatch.delenv("OPENAI_API_KEY")
    server.models_status = 401
    refused = "the key in OPENAI_API_KEY$" if has_key else "a request without a key: set OPENAI_API_KEY$"
    with pytest.raises(ModelError, match=rf"rejects \(401\) {refused}"):
        remote()
    assert server.posts == []


@pytest.mark.parametrize("status", [404, 405, 500])
def test_a_server_without_a_list_of_models_is_used_anyway(server: Any, remote: Any, status: int) -> None:
    server.models_status = status
    (completion,) = remote().generate([ask()])
    assert completion.text == text_of(server)


# -- many at once -------------------------------------------------------------------------------------------------


def test_with_all_faults_at_once_no_reply_is_lost_or_doubled(
    server: Any, remote: Any, fault: Any, broken: dict[str, Any]
) -> None:
    kinds = [*broken.values(), *(fault(status) for status in PASSING), fault(429, {"retry-after": "0.01"})]
    server.faults += kinds * 4
    requests = [ask(f"q{i}", temperature=1, n=2, seed=i) for i in range(60)]
    done = remote(retries=100, concurrency=16).generate(requests)
    bodies = {asked.body["messages"][0]["content"]: asked.body for asked in server.posts}
    expected = [reply["text"] for i in range(60) for reply in server.hashed("", bodies[f"q{i}"])]
    assert [one.text for one in done] == expected
    assert len(set(expected)) == 120
    assert len(server.posts) == 60 + len(kinds) * 4
    assert sum(one.usage.new_tokens for one in done) == 360


# -- slow servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [{"delay": 30.0}, {"drip": 0.02}])  # a drip has short gaps between bytes
def test_a_server_that_is_always_slow_is_reported(server: Any, remote: Any, fault: Any, slow: dict[str, float]) -> None:
    server.always = fault(**slow)
    with pytest.raises(ModelError, match=r"no complete reply in 0\.3 s, 2 times"):
        remote(timeout=0.3, retries=1).generate([ask()])


def test_a_temporary_server_outage_is_waited_out(server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.decoders.remote.client._LONGEST_WAIT", 0.5)
    decoder = remote(retries=20)
    decoder.generate([ask("before")])
    server.stop()
    server.start(after=0.5)
    (completion,) = decoder.generate([ask("after")])
    assert completion.text == text_of(server)


# -- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_above_the_limit_is_refused_without_a_retry(
    server: Any, remote: Any, fault: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.remote.client._MAX_REPLY", 2**20)
    raw = json.dumps({"choices": [{"message": {"content": "a" * 2**20}}]}).encode()
    server.always = fault(
        raw=gzip.compress(raw) if packed else raw, headers={"Content-Encoding": "gzip"} if packed else {}
    )
    with pytest.raises(RequestError, match="its reply is larger than 1 MiB; check base_url, or lower n or max_tokens"):
        remote().generate([ask()])
    assert len(server.posts) == 1


def test_a_compressed_reply_below_the_limit_is_read(server: Any, remote: Any, fault: Any) -> None:
    raw = json.dumps({"choices": [{"message": {"content": "a" * 2**20}}]}).encode()
    server.always = fault(raw=gzip.compress(raw), headers={"Content-Encoding": "gzip"})
    assert remote().generate([ask(max_tokens=8000)])[0].text == "a" * 2**20
    with pytest.raises(RequestError, match=r"ignores a limit: a text has 1,048,576 characters, and max_tokens is 100"):
        remote().generate([ask(max_tokens=100)])


def test_a_huge_list_of_models_is_reported(server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.decoders.remote.client._MAX_REPLY", 1000)
    server.models = ["x" * 2000]
    with pytest.raises(ServerError, match=r"lists no models: its reply is larger than"):
        remote()
