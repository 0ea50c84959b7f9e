"""One decoder from any thread and any event loop: concurrent, limited, cancelled, budgeted, closed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from tot.decoders import Budget, Completion, Message, Meter, Request, RequestError, Sampling


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


def test_a_rationale_that_the_budget_ended_has_no_answer(server: Any, remote: Any) -> None:
    request = ask().model_copy(update={"answer_trigger": " So:"})
    ((completion,),) = asyncio.run(complete(remote(), [request], Meter(Budget(tokens=0))))
    assert (completion.finish_reason, completion.text, server.posts) == ("budget", "", [])
    ((cut,),) = asyncio.run(complete(remote(), [request], Meter(Budget(tokens=1))))
    assert (cut.finish_reason, len(server.posts), [part.kind for part in cut.parts]) == (
        "budget",
        1,
        ["exact", "trigger", "exact"],
    )
