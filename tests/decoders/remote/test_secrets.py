"""The key is read from the environment and sent to the server in a header, and appears nowhere else."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from tot.decoders import Message, ModelError, OptionError, Request, TotError, load_decoder


def ask() -> Request:
    return Request(prompt=(Message(role="user", content="q"),))


def test_the_key_is_sent_in_its_header_only(server: Any, remote: Any, key: str) -> None:
    remote().generate([ask()])
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {key}"}
    assert key not in json.dumps([[asked.path, asked.body] for asked in server.asked])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422, 429, 500])
def test_a_key_that_a_server_repeats_in_its_messages_is_not_printed(
    server: Any, remote: Any, fault: Any, key: str, caplog: Any, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    server.models = [f"model-{key}"]
    reply = {"error": {"message": f"key {key} is bad", "code": key}}
    server.always = fault(status, raw=json.dumps(reply).encode())
    decoder = remote(retries=1)
    with pytest.raises(TotError) as caught:
        decoder.generate([ask()])
    printed = (
        "".join(traceback.format_exception(caught.value)) + repr(decoder) + repr(decoder.options) + repr(vars(decoder))
    )
    assert key not in printed + caplog.text
    assert caught.value.__cause__ is None


# -- keys that cannot be sent in a header -------------------------------------------------------------------------


@pytest.mark.parametrize("blanks", ["{}\n", "{}\r\n", " {}", "\t{} \r", "{}\u2028"])
def test_whitespace_around_a_key_is_removed(
    server: Any, remote: Any, key: str, monkeypatch: pytest.MonkeyPatch, blanks: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", blanks.format(key))
    remote().generate([ask()])
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {key}"}


@pytest.mark.parametrize("sign", ["\n", "\r", "\x7f", "\t", "…", "é", "\u200b", "\udce9"])
def test_a_key_that_no_header_can_carry_is_refused_by_its_variable_name_and_never_printed(
    server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, sign: str
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", f"sk-first{sign}second")
    with pytest.raises(OptionError, match="OPENAI_API_KEY contains a line break") as caught:
        remote()
    printed = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert not any(part in printed for part in ("sk-first", "second"))
    assert server.asked == []


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_an_empty_key_counts_as_no_key(server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch, blank: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", blank)
    server.models_status = 401
    with pytest.raises(ModelError, match="a request without a key: set OPENAI_API_KEY"):
        remote()


@pytest.mark.parametrize("key", ['sk-"quoted"\\', "sk/with=signs&"])
def test_a_key_is_not_printed_in_another_spelling(
    server: Any, remote: Any, fault: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for words in (json.dumps({"input": [key]}), quote(key, safe="")):
        server.always = fault(400, raw=json.dumps({"error": {"message": words}}).encode())
        with pytest.raises(TotError) as caught:
            remote().generate([ask()])
        assert not any(spelled in str(caught.value) for spelled in (key, json.dumps(key)[1:-1], quote(key, safe="")))


# -- proxies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
def test_a_server_on_this_machine_is_used_without_a_proxy(
    server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    for host in ("127.0.0.1", "localhost"):
        (completion,) = remote(base_url=f"http://{host}:{server.port}/v1", retries=0).generate([ask()])
        assert completion.text.startswith("reply")


@pytest.mark.parametrize("address", ["foo://me:hidden@host", "http://me:hidden@host:port", "socks5://me:hidden@host:1"])
def test_an_unusable_proxy_is_refused_without_printing_it(
    remote: Any, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    with pytest.raises(OptionError, match="the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used") as caught:
        remote()
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


# -- options ------------------------------------------------------------------------------------------------------

SECRET_NAMES = [
    *("api_key", "password", "Authorization", "x-api-key", "apiKey", "apikey", "passwd", "accessToken"),
    *("client_secret", "db_password_hash", "bearer"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: "sk-given"}, "the API key is not an option") for name in ("api_key", "key")),
        *(
            ({"base_url": f"http://{address}"}, "address must not contain a user, password or query")
            for address in ("me:sk-given@host/v1", "sk-given@host/v1", "host/v1?api-key=sk-given", "host/v1#sk-given")
        ),
        *(({"extra": json.dumps({name: "sk-given"})}, f"{name} looks like a secret") for name in SECRET_NAMES),
        *(
            ({"extra": json.dumps({"headers": [{name: "sk-given"}]})}, f"{name} looks like a secret")
            for name in SECRET_NAMES
        ),
    ],
)
def test_a_key_in_an_option_is_refused_without_printing_it(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=f"{message}.*OPENAI_API_KEY") as caught:
        load_decoder("openai", "tiny", **{"base_url": "http://127.0.0.1:1/v1"} | options)
    assert "sk-given" not in str(caught.value)
