"""Headless Chromium on a page, trees made from paths, and evaluation folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tot import State, Thought, ThoughtTree
from tot.decoders.files import write_text
from tot.report.page import tree_page

if TYPE_CHECKING:
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement


class Browser:
    """A browser window on a page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        result: list[str] = self.js(
            "return [...document.querySelectorAll(arguments[0])].map(({ textContent }) => textContent.toWellFormed())",
            selector,
        )
        return result

    @property
    def heading(self) -> str:
        """Return the title of the panel."""
        return self.find("#panel h2").text

    @property
    def open_thoughts(self) -> int:
        """Return the number of cards with a position, in the window or not."""
        return int(self.js("return view.layout.cards.length"))

    @property
    def shown(self) -> int:
        """Return the number of cards that are elements of the page."""
        return len(self.texts(".card"))

    @property
    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Headless Chromium. In CI it must exist, unless TOT_WITHOUT_CHROMIUM says that it could not be installed."""
    program, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver_program is None:
        if "CI" in os.environ and "TOT_WITHOUT_CHROMIUM" not in os.environ:
            pytest.fail("Chromium is not installed: apt-get install chromium chromium-driver")
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
    if os.geteuid() == 0:  # as in containers, which lack the support for Chromium's own sandbox
        arguments.append("--no-sandbox")
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver_program)) as driver:
        yield Browser(driver)


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Callable[..., Browser]:
    """Write a tree's page and open it."""

    def make(tree: ThoughtTree, **run: Any) -> Browser:
        write_text(tmp_path / "page.html", tree_page(tree, run))
        chromium.open(tmp_path / "page.html")
        return chromium

    return make


@pytest.fixture
def grown() -> Callable[..., ThoughtTree]:
    """Make a tree from paths, parents first: grown("a", "a/b"). The last one is chosen."""

    def make(*paths: str, question: str = "q") -> ThoughtTree:
        tree = ThoughtTree(State(question=question))
        named = {"": tree.root}
        for number, path in enumerate(paths):
            parent, _, text = path.rpartition("/")
            named[path] = tree.add(named[parent], Thought(parts={"thought": text}), value=float(number))
        tree.choose(named[paths[-1]])
        return tree

    return make


@pytest.fixture
def evaluation(tmp_path: Path) -> Callable[..., Path]:
    """Make an evaluation folder from scores and a tree, as `tot eval` writes it; sample 1 failed."""

    def make(scores: Sequence[float], tree: Any) -> Path:
        folder = tmp_path / "evaluation"
        (folder / "trees").mkdir(parents=True)
        (folder / "config.yaml").write_text(
            "format: tot.evaluation\nversion: 1\ntask: letters\ndata: a/questions.jsonl\nmodel: tiny\n"
            "record: {search: {name: 'bfs:thoughts=3'}}\n"
        )
        (folder / "results.json").write_text('{"bad_rows": 2, "searched": 4, "wall_seconds": 6.0}')
        usage = {"generate": {"calls": 3, "prompt_tokens": 7, "new_tokens": 15}}
        with (folder / "samples.jsonl").open("w") as file:
            for i, score in enumerate(scores):
                sample = {
                    "id": f"{i}-0", "index": i, "repeat": 0, "question": tree.state(tree.root).question,
                    "answer": f"{i}", "reference": "</script><script>ale", "score": score, "solved": False,
                    "parse_failure": False, "unreadable": 0, "thoughts": 3, "stopped": None,
                    "error": "it failed" if i == 1 else None,
                    "usage": usage, "measured": {"seconds": float(i), "forwards": 9, "drafted": 0, "accepted": 0},
                }  # fmt: skip
                file.write(json.dumps(sample) + "\n")
                if i != 1:
                    (folder / "trees" / f"{i}-0.json").write_text(json.dumps(tree.to_json()))
        return folder

    return make
