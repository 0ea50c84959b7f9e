"""The live page in headless Chromium: a tree that grows while the user looks at it, reconnecting, and stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tot import State, Thought, ThoughtTree
from tot.decoders import Budget, Message, Meter
from tot.decoders.serving.app import guarded
from tot.decoders.serving.server import Server as HTTPServer
from tot.decoders.serving.server import address_of, listen
from tot.serving.live import LiveSearch, LiveSearches
from tot.serving.pages import Pages
from tot.serving.revisions import Revisions
from tot.tree.calls import Call

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">\x1b\u202e'


class Server:
    """A server of the live page, with a search that the test grows."""

    def __init__(self) -> None:
        self.runs = LiveSearches()
        self.closed = False
        api = guarded()
        self._server = HTTPServer(api)
        pages = Pages(self.runs, "Searches", lambda: self.closed or self._server.should_exit)
        api.include_router(pages.router)
        self._listening = listen("127.0.0.1", 0)
        self.url = address_of(self._listening) + pages.path
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), daemon=True)
        self._thread.start()
        self.tree = ThoughtTree(State(question=HOSTILE))
        self.meter = Meter(Budget(seconds=600))
        self._context = self.runs.run(HOSTILE, HOSTILE)
        self.run: LiveSearch = self._context.__enter__()
        self.stopped: list[str] = []
        session = SimpleNamespace(tree=self.tree, meter=self.meter, stop=self.stopped.append)
        self.run.run, self.run.revisions = session, Revisions(self.tree)  # type: ignore[assignment]
        self.run._loop = SimpleNamespace(call_soon_threadsafe=lambda stop, why: stop(why))  # type: ignore[assignment]

    @property
    def page(self) -> str:
        return f"{self.url}#run-{self.run.id}"

    def add(self, text: str, parent: int = 0, **fields: Any) -> int:
        node = self.tree.add(self.tree[parent], Thought(parts={"thought": text}), **fields)
        message = Message(role="user", content=f"prompt of {text}")
        self.tree.add_calls({node.id: [Call(purpose="generate", template="thought", prompt=(message,), output=text)]})
        self.meter.count(new_tokens=10, nodes=1)
        return node.id

    def end(self) -> None:
        if self.run.ended is None:
            self._context.__exit__(None, None, None)

    def stop(self) -> None:
        self.end()
        self._server.should_exit = True
        self._thread.join(60)
        self._listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def wait(true: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def page(chromium: Any, server: Server) -> Iterator[Any]:
    """A browser on the page of the search."""
    chromium.driver.get("about:blank")
    chromium.driver.get_log("browser")
    chromium.driver.get(server.page)
    yield chromium
    assert chromium.js("return window.hacked") is None
    assert chromium.complaints == []
    chromium.driver.get("about:blank")


def test_the_tree_grows_and_keeps_what_the_user_sees(page: Any, server: Server) -> None:
    first, second = server.add("one", value=1.0), server.add(HOSTILE, value=2.0)
    wait(lambda: page.js("return view.tree?.nodes.length") == 3)
    assert page.heading == "Question"
    server.add("one one", first, value=3.0)
    wait(lambda: page.js("return view.layout.cards.length") == 4)  # new children are shown
    page.press(Keys.ARROW_RIGHT, Keys.ENTER)  # collapse "one", and search for later texts
    page.press("/", *"zwei", Keys.ESCAPE)
    assert (page.heading, page.find("#found").text) == ("Thought 0.0", "none")
    place = page.js("return view.toWindow(view.selected)")
    server.add("zwei", second, value=4.0)
    server.add("eins zwei", first, value=0.5)
    server.add("three", value=0.2)
    wait(lambda: page.js("return view.tree.nodes.length") == 7)
    assert page.js("return view.tree.nodes[1].open") is False
    assert page.open_thoughts == 5
    assert page.heading == "Thought 0.0"
    assert page.js("return view.toWindow(view.selected)") == pytest.approx(place)  # although the layout has changed
    assert page.find("#found").text == "0 of 2"
    assert page.js("return [view.scale.low, view.scale.high]") == [0.2, 4]
    server.tree[first].value = 9.0
    wait(lambda: "9" in page.texts("#panel .numbers dd"))
    assert page.texts("#panel .output") == ["one"]
    assert page.js("return view.tree.calls(view.tree.nodes[5])[0].prompt[0].content") == "prompt of eins zwei"
    server.run.leading = HOSTILE, "83% sure"
    wait(lambda: "83% sure" in page.find("#state").text)
    shown = page.find("#state").text
    assert shown.startswith(
        "running · </script><script>window.hacked = 1</scr… (83% sure) · level 2, 6 thoughts, 60 tokens"
    )
    assert shown.endswith(" s left")
    server.tree.choose(server.tree[4])
    server.end()
    wait(lambda: not page.find("#stop").is_displayed())
    wait(lambda: page.js("return live.source.readyState") == 2)
    assert page.find("#state").text.startswith("cancelled · ")
    page.press(Keys.HOME)
    assert page.texts("#panel .part h3") == ["Ended"]


def test_a_page_that_reconnects_misses_nothing(page: Any, server: Server) -> None:
    server.add("one")
    wait(lambda: page.js("return view.tree?.nodes.length") == 2)
    page.js("live.saved.same = true; live.source.addEventListener('open', () => { live.opened = true })")
    server.closed = True
    wait(lambda: page.find("#state").text == "Connecting again …")
    for text in ("two", "three"):
        server.add(text, 1)
    server.closed = False
    wait(lambda: page.js("return live.opened && view.tree.nodes.length") == 4)
    assert page.js("return live.saved.same")  # it got the changes, not the whole tree again
    assert page.js("return view.tree.nodes.map(({ text }) => text)")[1:] == ["one", "two", "three"]
    wait(lambda: page.find("#state").text.startswith("running"))


def test_searches_are_listed_and_one_is_stopped(page: Any, server: Server) -> None:
    server.add("one")
    with server.runs.run("other", "Why?"):
        pass
    wait(lambda: page.find("#back").is_displayed())
    page.find("#back").click()
    wait(lambda: len(page.texts("#overview tbody tr")) == 2)
    assert page.texts("#overview tbody td:first-child") == ["cancelled", "running"]
    assert page.texts("#overview a")[0] == "Why?"
    assert page.texts("#overview td:nth-child(4)")[1].startswith("level 1, 1 thoughts, 10 tokens")
    assert not page.find("#stop").is_displayed()
    page.js("document.querySelectorAll('#overview a')[1].focus()")
    server.add("two")
    wait(lambda: "2 thoughts" in page.texts("#overview td:nth-child(4)")[1])
    assert page.js("return document.activeElement.hash") == f"#run-{server.run.id}"  # a new link has the focus
    page.press(Keys.ENTER)
    wait(lambda: page.js("return view.tree?.nodes.length") == 3)
    page.find("#stop").click()
    wait(lambda: server.stopped == ["stopped on the live page"])
    page.press("o")
    wait(lambda: page.find("#overview").is_displayed())
    page.js("document.querySelector('#overview a').click()")  # a search that ended before it began
    wait(lambda: page.texts("#panel .part .text") == ["Why?", "cancelled"])
    assert page.find("#state").text == "cancelled"
    page.driver.get(f"{server.url}#run-forgotten")
    wait(lambda: page.find("#state").text == "The server does not have this search any more.")
    assert "404" in page.complaints[0]


def test_a_tree_of_5000_thoughts_stays_usable_while_it_grows(page: Any, server: Server) -> None:
    parents = [0]
    for i in range(5000):
        parents.append(server.add(f"thought {i}", parents[i // 4], value=float(i % 7)))
        if i == 2500:
            wait(lambda: page.js("return view.tree?.nodes.length > 2000"))
            page.js("view.select(view.tree.nodes[7])")
            page.find("#canvas").click()
    wait(lambda: page.js("return view.tree.nodes.length") == 5001)
    assert page.open_thoughts < 3000
    assert page.shown < 100
    page.press("/", *"thought 4999", Keys.ENTER)
    assert page.find("#found").text == "1 of 1"
    assert page.texts("#panel .text")[0] == "thought 4999"


def test_both_themes_and_a_pressed_pointer(page: Any, server: Server) -> None:
    server.add("one")
    wait(lambda: page.js("return view.tree?.nodes.length") == 2)
    colours = set()
    for _ in range(2):
        page.press("d")
        colours.add(page.js("return getComputedStyle(byId('stop')).color + getComputedStyle(byId('state')).color"))
    assert len(colours) == 2
    page.js("dispatchEvent(new PointerEvent('pointerdown', { button: 0 }))")
    server.add("two")
    wait(lambda: page.js("return live.saved.nodes.length") == 3)
    assert page.js("return view.tree.nodes.length") == 2  # a click would miss an element that is replaced
    page.js("dispatchEvent(new Event('pointerup'))")
    wait(lambda: page.js("return view.tree.nodes.length") == 3)
