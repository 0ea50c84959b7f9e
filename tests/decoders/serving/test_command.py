"""`tot serve` as a program: its messages at startup, and options with which it does not start."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tot.decoders.decoder import METHODS


def environment(**more: str) -> dict[str, Any]:
    return {"env": os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | more}


@pytest.mark.processes
def test_the_key_is_taken_from_the_environment_and_never_shown(start: Any) -> None:
    program = start("--host", "0.0.0.0", **environment(TOT_SERVE_KEY="s3cret\r\n"))  # with a line break, as from a file
    url = program.url.replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
    program.process.send_signal(signal.SIGTERM)
    status, out, err = program.end()
    assert (status, out, err) == (0, "", "")
    assert len(program.said) == 1
    assert "s3cret" not in "".join(program.said)


@pytest.mark.processes
def test_other_machines_are_served_with_a_warning_and_a_page_on_request(start: Any) -> None:
    program = start("--host", "0.0.0.0", "--decoder", "seed", "--name", "mine", "--live")
    warning, shown, served = program.said
    assert warning == "tot serve: 0.0.0.0 accepts other machines without an API key: set TOT_SERVE_KEY\n"
    assert "mine (seed) is served at" in served
    url = program.url.replace("0.0.0.0", "127.0.0.1")
    listed = httpx.get(f"{url}/v1/models", headers={"host": "box.example"}).json()["data"]
    names = [model["id"] for model in listed]
    methods = sorted(set(METHODS) - {"fastcot"})  # it needs an answer trigger
    expected = ["mine", *(f"mine:{method}" for method in methods), "mine:vote", "mine:best", "mine:tree"]
    assert [name for name in names if name in expected] == expected  # installed plug-ins may add others
    page = shown.split()[-1].replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(page, headers={"host": "box.example"}).status_code == 200
    assert httpx.post(f"{page}runs/x/stop", headers={"origin": "http://evil.example"}).status_code == 403


@pytest.mark.processes
def test_the_page_of_searches_is_on_loopback_unless_an_option_says_otherwise(start: Any) -> None:
    first, served = start().said
    address = re.fullmatch(r"tot serve: searches are shown at (http://127\.0\.0\.1:\d+/live/[\w-]{22}/)\n", first)
    assert address is not None
    assert "is served at" in served
    assert "new EventSource(" in httpx.get(address[1]).text
    assert httpx.get(f"{address[1]}events", headers={"origin": "http://evil.example"}).status_code == 403
    assert len(start("--no-live").said) == 1


# -- refused options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decoder", "beam"), r"unknown decoder 'beam'.*: choose one of ar, .*"),
        (("--decoder-option", "kk=3"), r"unknown option of ar, .* 'kk' \(did you mean k\?\): choose one of .*"),
        (("--decoder-option", "k"), r"--decoder-option 'k' can't be read: write NAME=VALUE, such as k=4"),
        (("--decoder", "sd", "--decoder-option", "k=no"), r"decoder sd, option k: .*"),
        (("--host", "no.such.host.invalid"), r"--host no\.such\.host\.invalid: .*: give an address of this machine"),
        (("--host", "192.0.2.1"), r"cannot listen on 192\.0\.2\.1, port \d+ \(.*\): give another --port"),
        (("--timeout", "0"), r"timeout = 0\.0: Input should be greater than 0"),
        (("--model", "gpt"), r"unknown model 'gpt': .*"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    tot: Any, folder: Path, options: tuple[str, ...], message: str
) -> None:
    given = ("--model", str(folder)) if "--model" not in options else ()
    status, out, err = tot("serve", "--port", "0", *given, *options)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"tot: {message}\n", err)


def test_a_port_in_use_is_reported(tot: Any, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = tot("serve", "--model", str(folder), "--port", str(port))
    assert status == 2
    assert re.fullmatch(rf"tot: cannot listen on 127\.0\.0\.1, port {port} \(.+\): give another --port\n", err)


def test_an_empty_key_is_refused(tot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOT_SERVE_KEY", " ")
    assert tot("serve", "--port", "0") == (2, "", "tot: TOT_SERVE_KEY is empty: unset it, or set a key\n")
