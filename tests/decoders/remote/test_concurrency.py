"""One decoder from any thread and event loop, and servers that are slow, send too much or fail for many requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from tot.decoders import Budget, Completion, Message, Meter, ModelError, Request, RequestError, Sampling, load_decoder


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling))


def texts(done: list[list[Any]]) -> list[str]:
    return [one.text for completions in done for one in completions]


def until(true: Any) -> None:
    """Wait for a condition for at most ten seconds."""
    ends = time.monotonic() + 10
    while not true() and time.monotonic() < ends:
        time.sleep(0.005)
    assert true()


# -- concurrency --------------------------------------------------------------------------------------------------


def test_all_requests_of_a_call_are_in_flight_at_once(server: Any, remote: Any) -> None:
    server.wait_for = 40  # no reply before all requests have arrived, so fewer at once would hang
    done = remote().generate([ask(f"q{i}") for i in range(40)])
    assert (len(done), server.most_in_flight) == (40, 40)


def test_concurrency_limits_all_loops_and_threads_together(server: Any, remote: Any) -> None:
    decoder = remote(concurrency=4)
    server.wait_for = 4
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda i: decoder.generate([ask(f"{i} {j}") for j in range(5)]), range(6)))
    assert (sum(map(len, done)), server.most_in_flight) == (30, 4)


async def complete(decoder: Any, requests: list[Request], meter: Meter | None = None) -> list[list[Completion]]:
    return list(await asyncio.gather(*decoder.start(requests, meter)))


# -- loops --------------------------------------------------------------------------------------------------------


def test_generate_works_inside_a_running_loop(server: Any, remote: Any) -> None:
    decoder = remote()

    async def notebook() -> list[str]:
        alone = [one.text for one in decoder.generate([ask()])]
        return alone + texts(await complete(decoder, [ask()]))

    first, second = asyncio.run(notebook())
    assert first == second


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_cancelling_drops_only_its_own_requests_in_flight(server: Any, remote: Any) -> None:
    decoder = remote()
    server.slow = "a"

    async def search() -> list[str]:
        dropped = asyncio.create_task(complete(decoder, [ask(f"a{i}") for i in range(3)]))
        other = asyncio.create_task(complete(decoder, [ask("b")]))
        while server.in_flight < 3:
            await asyncio.sleep(0.005)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        until(lambda: server.cut_off == 3)
        return texts(await complete(decoder, [ask("c")])) + texts(await other)

    assert len(asyncio.run(search())) == 2
    assert server.cut_off == 3


def test_a_call_that_fails_drops_its_other_requests(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        return (400, {"error": "no"}) if body["messages"][0]["content"] == "bad" else server.hashed(path, body)

    server.reply = reply
    decoder = remote()
    server.wait_for = 3
    server.slow = "s"
    with pytest.raises(RequestError, match="no"):
        decoder.generate([ask("s1"), ask("s2"), ask("bad")])
    until(lambda: server.in_flight == 0)
    assert server.cut_off == 2


def test_closing_cancels_waiting_requests_and_refuses_later_ones(server: Any, remote: Any) -> None:
    decoder = remote()
    server.slow = "q"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decoder.generate, [ask()])
        until(lambda: server.in_flight == 1)
        decoder.close()
        with pytest.raises(CancelledError):
            waiting.result(10)
    with pytest.raises(RequestError, match="closed: make a new one"):
        decoder.generate([ask()])
    decoder.close()


def test_an_unclosed_decoder_leaves_no_thread_and_no_warning(server: Any, remote: Any) -> None:
    script = f"""
import gc, threading, warnings
warnings.simplefilter("error")
from tot.decoders import Request, load_decoder
first = load_decoder("openai", "tiny", base_url="{server.url}")
assert first.generate([Request(prompt="q")])[0].text
assert any(thread.name == "tot-remote" for thread in threading.enumerate())
del first
gc.collect()
assert not any(thread.name == "tot-remote" for thread in threading.enumerate())
second = load_decoder("openai", "tiny", base_url="{server.url}")
second.generate([Request(prompt="q")])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- budgets ------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_budget_are_not_sent(server: Any, remote: Any) -> None:
    meter = Meter(Budget(tokens=12))
    done = asyncio.run(complete(remote(concurrency=2), [ask(f"q{i}", temperature=1, n=2) for i in range(20)], meter))
    reasons = [one.finish_reason for completions in done for one in completions]
    assert [len(completions) for completions in done] == [2] * 20
    assert 4 <= reasons.count("eos") <= 6  # six tokens per request, and one more may have been in flight
    assert reasons.count("budget") == 40 - reasons.count("eos")
    assert {one.text for completions in done for one in completions if one.finish_reason == "budget"} == {""}
    assert len(server.posts) == reasons.count("eos") / 2


def test_a_time_limit_ends_requests_in_flight(server: Any, remote: Any, fault: Any) -> None:
    server.always = fault(delay=30)
    decoder = remote()
    ((completion,),) = asyncio.run(complete(decoder, [ask()], Meter(Budget(seconds=0.3))))
    assert (completion.text, completion.finish_reason, completion.usage.new_tokens) == ("", "budget", 0)
    until(lambda: server.cut_off == 1)


PASSING = [408, 409, 429, 500, 502, 503, 504, 529]


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
