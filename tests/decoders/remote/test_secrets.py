"""The key comes from the environment and goes to the server, in a header; nowhere else."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

import pytest

from tot.decoders import Message, OptionError, Request, TotError, load_decoder


def ask() -> Request:
    return Request(prompt=(Message(role="user", content="q"),))


def test_the_key_goes_to_the_server_in_its_header_only(server: Any, remote: Any, key: str) -> None:
    remote().generate([ask()])
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {key}"}
    assert key not in json.dumps([[asked.path, asked.body] for asked in server.asked])


def test_without_a_key_a_server_that_needs_none_is_asked_all_the_same(
    server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert len(remote().generate([ask()])) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422, 429, 500])
def test_a_server_that_repeats_the_key_in_all_it_says_does_not_get_it_printed(
    server: Any, remote: Any, fault: Any, key: str, caplog: Any, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    server.models = [f"model-{key}"]
    said = {"error": {"message": f"key {key} is bad", "code": key}}
    server.always = fault(status, raw=json.dumps(said).encode())
    decoder = remote(retries=1)
    with pytest.raises(TotError) as caught:
        decoder.generate([ask()])
    shown = (
        "".join(traceback.format_exception(caught.value)) + repr(decoder) + repr(decoder.options) + repr(vars(decoder))
    )
    assert key not in shown + caplog.text
    assert caught.value.__cause__ is None


def test_a_key_in_the_middle_of_nonsense_is_not_printed(server: Any, remote: Any, fault: Any, key: str) -> None:
    server.always = fault(raw=b"{}", headers={"content-type": f"text/{key}"})
    with pytest.raises(TotError) as caught:
        remote(retries=0).generate([ask()])
    assert key not in str(caught.value)
    assert "text/…" in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "key"])
def test_the_key_is_no_option(name: str) -> None:
    with pytest.raises(OptionError, match=r"the key is no option.*OPENAI_API_KEY") as caught:
        load_decoder("openai", "tiny", base_url="http://127.0.0.1:1/v1", **{name: "sk-given"})
    assert "sk-given" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://me:sk-given@127.0.0.1:1/v1",
        "http://sk-given@127.0.0.1:1/v1",
        "http://127.0.0.1:1/v1?api-key=sk-given",
        "http://127.0.0.1:1/v1#sk-given",
    ],
)
def test_an_address_with_a_key_in_it_is_refused_unseen(address: str) -> None:
    with pytest.raises(OptionError, match="address without user, password or query") as caught:
        load_decoder("openai", "tiny", base_url=address)
    assert "sk-given" not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "password", "Authorization", "x-api-key"])
def test_a_field_that_looks_like_a_key_is_refused_unseen(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} looks like a key") as caught:
        load_decoder("openai", "tiny", base_url="http://127.0.0.1:1/v1", extra=json.dumps({name: "sk-given"}))
    assert "sk-given" not in str(caught.value)
