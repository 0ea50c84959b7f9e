"""The live page's server: patches of growing trees, the list of searches, stopping, and who may read it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from tot import State, Thought, ThoughtTree
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import Message, ModelError
from tot.running import run_to_end
from tot.serving import live
from tot.serving.live import LiveSearches
from tot.serving.revisions import Revisions
from tot.tree.calls import Call, calls_from_json

VOTE = "vote: {search: 'auto:samples=4,together=2,until=0.99'}"


class Page:
    """A saved tree that grows by patches, as the page's script keeps it."""

    def __init__(self) -> None:
        self.seen = 0
        self.saved: dict[str, Any] = {}
        self.calls: dict[int, list[Call]] = {}

    def apply(self, revision: int, patch: dict[str, Any]) -> None:
        if "root" in patch:
            self.saved = {"root": patch["root"], "nodes": {}, "links": []}
        self.saved["nodes"] |= {node["id"]: node for node in patch["nodes"]}
        self.saved["links"] = patch.get("links", self.saved["links"])
        self.calls |= calls_from_json(patch["texts"], patch["calls"])
        self.seen = revision

    def read(self, revisions: Revisions) -> None:
        revisions.scan()
        while (found := revisions.since(self.seen)) is not None:
            self.apply(*json.loads(json.dumps(found)))


def assert_equal(page: Page, tree: ThoughtTree) -> None:
    expected = tree.to_json()
    nodes = [page.saved["nodes"][i] for i in range(len(tree))]
    assert json.loads(json.dumps([page.saved["root"], nodes, page.saved["links"]])) == json.loads(
        json.dumps([expected["root"], expected["nodes"], expected["links"]])
    )
    assert page.calls == tree.calls


def change(tree: ThoughtTree, draw: random.Random) -> None:
    """Change a tree once, as searches do."""
    nodes = list(tree)
    node, other = draw.choice(nodes), draw.choice(nodes)
    kind = draw.randrange(6)
    if kind == 0 or len(nodes) < 3:
        added = tree.add(node, Thought(parts={"thought": f"thought {len(nodes)}"}))
        tree.add_calls({added.id: [_call(f"prompt of {added.id}")]})
    elif kind == 1:
        node.value, node.visits = draw.random(), node.visits + 1
    elif kind == 2:
        tree.add_calls({node.id: [_call("again " * draw.randrange(3))]})
    elif kind == 3:
        tree.prune(node)
    elif kind == 4:
        tree.choose(node)
    elif node.parent is not None and other not in tree.below(node):
        tree.link(other, node, Thought(parts={"thought": "another way"}))


def _call(prompt: str) -> Call:
    return Call(purpose="generate", template="thought", prompt=(Message(role="user", content=prompt),), output="o")


@pytest.mark.parametrize("seed", range(8))
def test_a_page_that_loses_its_connection_at_any_time_gets_the_whole_tree(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("tot.serving.revisions._PATCH", 3)
    draw = random.Random(seed)
    tree = ThoughtTree(State(question="q"))
    revisions, page, other = Revisions(tree), Page(), Page()
    for _ in range(300):
        change(tree, draw)
        if draw.random() < 0.3:
            revisions.scan()
            while draw.random() < 0.7 and (found := revisions.since(page.seen)) is not None:
                page.apply(*found)
        if draw.random() < 0.05:
            other.read(revisions)
            assert_equal(other, tree)
    page.read(revisions)
    assert_equal(page, tree)
    fresh = Page()
    fresh.read(revisions)
    assert_equal(fresh, tree)
    assert revisions.since(page.seen) is None
    assert len(page.saved["nodes"]) > 20
    for unknown in (-1, 10**9):
        assert revisions.since(unknown)[1]["root"]["question"] == "q"  # type: ignore[index]
    page.saved["nodes"].clear()
    tree[3].value = 3.0
    page.read(revisions)
    assert [*page.saved["nodes"]] == [3]  # only changes are sent


def test_a_bounded_number_of_ended_searches_and_thoughts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_ENDED", 3)
    monkeypatch.setattr(live, "_THOUGHTS", 50)
    runs = LiveSearches()

    def run(thoughts: int) -> None:
        with runs.run("vote", f"question {thoughts}") as one:
            tree = ThoughtTree(State(question="q"))
            for i in range(thoughts):
                tree.add(tree.root, Thought(parts={"thought": str(i)}))
            meter = SimpleNamespace(new_tokens=1, seconds=2.0, seconds_left=None)
            one.run = SimpleNamespace(tree=tree, meter=meter)  # type: ignore[assignment]

    with runs.run("vote", "still running"):
        for thoughts in (1, 2, 3, 4, 5):
            run(thoughts)
        assert [status["question"] for status in runs.statuses[:-1]] == ["question 5", "question 4", "question 3"]
        run(46)
        assert [status["question"] for status in runs.statuses[:-1]] == ["question 46"]  # with the next one, 51
        run(60)
        assert [status["question"] for status in runs.statuses] == ["question 60", "still running"]
        assert {status["state"] for status in runs.statuses} == {"running", "cancelled"}


# -- over HTTP -------------------------------------------------------------------------------------


@contextmanager
def events(server: Any, run: str = "", last: int | None = None) -> Iterator[Iterator[tuple[str, Any, int]]]:
    """Read events as (name, data, id)."""
    headers = {} if last is None else {"last-event-id": str(last)}

    def read(lines: Iterator[str]) -> Iterator[tuple[str, Any, int]]:
        event: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
            elif "event" in event:
                yield event["event"], json.loads(event["data"]), int(event.get("id", 0))
                event = {}

    with httpx.stream("GET", f"{server.live}events", params={"run": run}, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield read(reply.iter_lines())


@contextmanager
def searching(server: Any, user: Any, **body: Any) -> Iterator[tuple[str, list[Any]]]:
    """Ask in another thread. Yield the run's id and a list that gets the reply."""
    replies: list[Any] = []
    asking = threading.Thread(
        target=lambda: replies.append(server.post(model="chat:vote", messages=user("<b>a?</b>"), **body))
    )
    asking.start()
    server.wait_until(lambda: server.runs.statuses and server.runs.statuses[0]["line"])
    yield server.runs.statuses[0]["id"], replies
    server.decoder.free.set()
    asking.join(60)
    assert not asking.is_alive()


def test_a_search_is_listed_and_its_tree_grows(serve: Any, chat: Any, user: Any) -> None:
    server = serve(chat("7", "7", "wait 8", "wait 9"), VOTE)
    with events(server) as listed, searching(server, user) as (run, replies):
        assert next(listed)[:2] == ("status", [])
        (status,) = next(data for _, data, _ in listed if data and data[0]["line"].startswith("7 ("))
        assert (status["question"], status["name"], status["state"]) == ("<b>a?</b>", "chat:vote", "running")
        assert status["id"] == run
        page = Page()
        with events(server, run) as grown:
            for name, data, number in grown:
                if name == "tree":
                    page.apply(number, data)
                elif name == "status" and "2 thoughts" in data["line"]:
                    break
        first = page.seen
        server.decoder.free.set()
        with events(server, run, last=first) as grown:  # a page that reconnects
            got = list(grown)
        assert [name for name, _, _ in got][-2:] == ["status", "end"]
        assert "root" not in next(data for name, data, _ in got if name == "tree")
        for name, data, number in got:
            if name == "tree":
                page.apply(number, data)
    (reply,) = replies
    assert got[-1][1]["answer"] == reply.json()["choices"][0]["message"]["content"] == "7"
    assert got[-2][1]["state"] == "ended"
    assert "s left" not in got[-2][1]["line"]
    assert got[-2][1]["line"].startswith("7 · level 1, ")
    assert reply.json()["tot"]["certainty"] is None  # no calibration was fitted for this task
    assert sorted(page.saved["nodes"]) == list(range(reply.json()["tot"]["thoughts"] + 1))
    with events(server, run) as again:  # the whole state, after the end
        kinds = [name for name, _, _ in again]
    assert kinds == ["tree", "status", "end"]


def test_a_stopped_search_answers_with_the_best_so_far(serve: Any, chat: Any, user: Any) -> None:
    server = serve(chat("7", "7", "wait 8", "wait 9"), VOTE)
    with searching(server, user) as (run, replies):
        server.wait_until(lambda: "2 thoughts" in server.runs.statuses[0]["line"])
        assert httpx.post(f"{server.live}runs/{run}/stop").status_code == 204
        server.wait_until(lambda: bool(replies))
        assert not server.decoder.free.is_set()
    reply = replies[0].json()
    assert reply["choices"][0]["message"]["content"] == "7"
    assert reply["tot"]["stopped"] == server.runs.statuses[0]["state"] == "stopped on the live page"
    assert server.decoder.cancelled >= 1
    assert httpx.post(f"{server.live}runs/{run}/stop").status_code == 204  # it has ended: nothing changes


def test_a_search_that_is_stopped_before_it_begins_asks_nothing(serve: Any, chat: Any) -> None:
    decoder, runs = chat("7"), LiveSearches()
    with runs.run("vote", "a?") as run:
        run.stop()  # the model is loading
        config = SearchConfig.of(None, {"decoder": decoder, "search": "self-consistency:samples=4"})
        run.solution = run_to_end(run_search("ask", "a?", config, watch=run.watch))
    assert decoder.requests == []
    assert (run.solution, run.ended["answer"], run.status["state"]) == (None, None, "stopped on the live page")


def test_a_cancelled_and_a_failed_search_are_listed_as_such(serve: Any, chat: Any, user: Any) -> None:
    class Failing(chat):  # type: ignore[misc]
        async def _all(self, request: Any, meter: Any) -> Any:
            raise ModelError("no <b>weights</b>")

    server = serve(chat("wait"), VOTE)
    body = {"model": "chat:vote", "messages": user("a?")}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.5)
    server.wait_until(lambda: server.runs.statuses[0]["state"] == "cancelled")
    failing = serve(Failing("a"), VOTE)
    assert failing.post(model="chat:vote", messages=user("a?")).status_code >= 400
    (status,) = failing.runs.statuses
    assert status["state"] == "failed"
    with events(failing, status["id"]) as got:
        *_, (name, data, _) = got
    assert (name, data) == ("end", {"error": "no <b>weights</b>"})


def test_only_the_token_opens_the_page(serve: Any, chat: Any) -> None:
    server = serve(chat("a"), key="s3cret")
    page = httpx.get(server.live)
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page.text)
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    assert policy[1].endswith("form-action &#39;none&#39;; connect-src &#39;self&#39;")
    assert server.pages.path not in page.text
    for wrong in ("x", "é", server.pages.path.split("/")[2][:-1], ""):
        for path in ("", "events", "events?run=x"):
            assert httpx.get(f"{server.url}/live/{wrong}/{path}").status_code == 404, (wrong, path)
        assert httpx.post(f"{server.url}/live/{wrong}/runs/x/stop").status_code == 404
    assert httpx.get(f"{server.live}events?run=unknown").status_code == 404
    assert httpx.post(f"{server.live}runs/unknown/stop").status_code == 404
    assert httpx.get(f"{server.live}runs/unknown/stop").status_code == 405
    assert httpx.post(server.live).status_code == 405
    assert httpx.get(f"{server.live}events?run=x", headers={"last-event-id": "x"}).status_code == 422
    assert httpx.get(f"{server.url}/v1/models").status_code == 401  # the other routes need the key


def test_a_server_stops_while_pages_are_open(serve: Any, chat: Any, user: Any) -> None:
    server = serve(chat("7"), VOTE)
    server.post(model="chat:vote", messages=user("a?"))
    with events(server) as listed:
        assert next(listed)[1][0]["state"] == "ended"
        server.stop()
        assert list(listed) == []


# -- tot solve --live ------------------------------------------------------------------------------


def test_solve_shows_its_tree_until_the_page_has_all_of_it(tot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, Any, int]] = []
    reading: list[threading.Thread] = []
    opened = threading.Event()

    def open_page(line: str) -> None:
        address, _, run = line.rpartition(" ")[2].partition("#run-")

        def read() -> None:
            with events(SimpleNamespace(live=address), run) as stream:
                for event in stream:
                    got.append(event)
                    opened.set()

        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/live/[\w-]{20,}/", address)
        reading.append(threading.Thread(target=read))
        reading[0].start()

    class Decoder:
        name = "scripted"

        def generate(self, requests: Any) -> Any:
            assert opened.wait(60)  # the page is open before the first thought
            from tot.decoders import Completion, Usage

            return [Completion("It is 7.", (), 0.0, "eos", Usage(new_tokens=5)) for _ in requests for _ in range(3)]

    monkeypatch.setattr("tot.report.terminal.complain", open_page)
    monkeypatch.setattr("tot.decoders.engine.open_models.shared_engines", lambda *_, **__: nullcontext([None]))
    monkeypatch.setattr("tot.llm.decoders.load_decoder", lambda *_, **__: nullcontext(Decoder()))
    monkeypatch.setattr("tot.llm.decoders.has_chat_template", lambda _: False)
    status, out, err = tot("solve", "ask", "How many?", "--search", "self-consistency:samples=3", "--live", "--json")
    assert (status, err) == (0, "")
    reading[0].join(60)
    assert [name for name, _, _ in got][-1] == "end"
    end = got[-1][1]
    assert end["answer"] == json.loads(out)["answer"]
    page = Page()
    for name, data, number in got:
        if name == "tree":
            page.apply(number, data)
    assert len(page.saved["nodes"]) == 4
    assert [node.get("chosen", False) for node in page.saved["nodes"].values()].count(True) == 2
