"""The report page in headless Chromium: navigation, search, and no execution of hostile thoughts.

One test covers all of it. The others, here and in test_view.py, are `slow` and cover one aspect each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tot import State, Thought, ThoughtTree
from tot.decoders import Message, Usage
from tot.decoders.files import write_text
from tot.decoders.request import Part
from tot.evaluation.overview import evaluation_page
from tot.tree.calls import Call

HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "end of script": '</script><script>window.hacked = 1</script><script type="application/json">',
    "end of comment": "--> <!-- <img src=x onerror='window.hacked = 1'>",
    "handler": "<svg onload=window.hacked=1>&lt;b&gt;</svg>",
    "template": "{{ 7 * 7 }} ${7*7} javascript:window.hacked=1",
    "control": "a\x00b\x1b[31mc\x07\x7f\x85",
    "right to left": "abc \u202egnp.exe\u202c \u2066def",
    "half a character": "x\ud800y\udfffz",
    "separators": "one\u2028two\u2029three\ufffe",
    "long": "word " * 20_000,
    "nothing": "",
    "spaces": " \n\t ",
}


def test_a_page_opens_navigates_searches_and_survives_hostile_thoughts(opened: Any, grown: Any) -> None:
    tree = grown("a", "a/b", "c", "c/the end")
    for text in HOSTILE.values():
        tree.add(tree[3], Thought(parts={"thought": text}))
    browser = opened(tree, answer=HOSTILE["end of script"])
    assert browser.heading == "Thought 0.1.0"  # the chosen answer is selected
    assert browser.texts("#panel .text") == ["the end", "c", "the end", HOSTILE["end of script"]]
    assert browser.open_thoughts == len(tree)
    browser.press(Keys.HOME)
    assert browser.heading == "Question"
    assert browser.texts("#panel .text")[1] == HOSTILE["end of script"]  # the answer, beside the question
    browser.press(Keys.ARROW_RIGHT, Keys.ENTER)
    assert browser.open_thoughts == len(tree) - 1
    browser.press("/", "B", Keys.ENTER)
    assert browser.find("#found").text.startswith("2 of ")
    browser.press(Keys.ESCAPE, "?")
    assert browser.find("#keys").is_displayed()
    assert browser.js("return window.hacked") is None
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_thought_is_displayed_verbatim(opened: Any, kind: str) -> None:
    text = HOSTILE[kind]
    tree = ThoughtTree(State(question=text or "q"))
    node = tree.add(tree.root, Thought(parts={text: text, "other": text}), world=text)
    part = Part("approximate", text, 1)
    message = Message(role="user", content=text.encode("utf-8", "replace").decode() or "?")
    tree.calls[node.id] = [
        Call(purpose="generate", template=text, prompt=(message,), parts=(part,), choices={text: -1.0}),
    ]
    tree.choose(node)
    browser = opened(tree, stopped=text)
    browser.js("view.select(view.tree.end)")
    browser.js("document.querySelectorAll('details').forEach((details) => { details.open = true })")
    visible = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda found: chr(0x2400 + ord(found[0])), text)
    visible = re.sub(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda found: f"⟨U+{ord(found[0]):04X}⟩", visible)
    assert browser.texts("#panel .part .text")[0] == re.sub("[\ud800-\udfff]", "\ufffd", visible)
    assert browser.js("return document.scripts.length") == 2
    assert browser.js("return document.images.length + document.querySelectorAll('#panel svg').length") == 0
    assert browser.js("return window.hacked") is None
    assert browser.complaints == []


@pytest.mark.slow
def test_the_content_security_policy_blocks_injected_elements(opened: Any, grown: Any) -> None:
    browser = opened(grown("a"))
    browser.js(
        """const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.hacked = 2'>");
        document.body.insertAdjacentHTML("beforeend", "<p id=styled style='color: red'>x</p>");"""
    )
    assert browser.js("return window.hacked") is None
    assert browser.js("return getComputedStyle(byId('styled')).color") != "rgb(255, 0, 0)"
    refused = browser.driver.execute_async_script(
        "fetch('https://example.org/').then(() => arguments[0]('fetched'), () => arguments[0]('refused'))"
    )
    assert refused == "refused"
    assert any("Content Security Policy" in message for message in browser.complaints)


@pytest.mark.slow
def test_exact_approximate_and_never_decoded_prompts_are_distinguished(opened: Any, grown: Any) -> None:
    tree = grown("a")
    kinds = ["exact", "approximate", "undecoded", "trigger", "step"]
    parts = tuple(Part(kind, "" if kind == "undecoded" else f"{kind} text", 7) for kind in kinds)
    prompt = (
        Message(role="user", content="first, and whole " * 500),
        Message(role="assistant", content="go on:"),  # language: ok
    )
    tree.calls[1] = [Call(purpose="generate", template="thought", prompt=prompt, output="…", parts=parts)]
    tree[1].usage = Usage(approximate_tokens=7, undecoded_tokens=30, new_tokens=13, forced_tokens=4, masked_tokens=9)
    browser = opened(tree)
    browser.js("view.select(view.tree.end)")
    assert [browser.texts(f"#panel .output .{kind}") for kind in kinds] == [
        ["exact text"], ["approximate text"], ["7 tokens never decoded"], ["trigger text"], ["step text"],
    ]  # fmt: skip
    looks = browser.js(
        """return [...document.querySelectorAll("#panel .output > *")].map((element) => {
          const { backgroundColor, backgroundImage, fontWeight, borderLeftWidth } = getComputedStyle(element);
          return [backgroundColor, backgroundImage, fontWeight, borderLeftWidth].join(" ");
        })"""
    )
    assert len(set(looks)) == len(kinds)
    numbers = dict(zip(browser.texts("#panel .numbers dt"), browser.texts("#panel .numbers dd"), strict=True))
    counts = ("new tokens", "approximate tokens", "tokens never decoded", "forced tokens", "masked tokens")
    assert [numbers[count] for count in counts] == ["13", "7", "30", "4", "9"]
    assert browser.texts("#panel .message pre") == []  # rendered when the prompt is opened
    browser.driver.execute_async_script(
        """const details = document.querySelector("#panel .call details");
        details.addEventListener("toggle", () => arguments[0]());
        details.querySelector("summary").click()"""
    )
    assert browser.texts("#panel .message pre") == [message.content for message in prompt]


@pytest.mark.slow
def test_an_evaluation_page_links_every_tree(chromium: Any, evaluation: Any, tmp_path: Path, grown: Any) -> None:
    folder = evaluation([1.0, 0.0, 0.5, 1.0], grown("a", "a/b", question=HOSTILE["end of script"]))
    write_text(tmp_path / "page.html", evaluation_page(folder))
    chromium.open(tmp_path / "page.html")
    assert chromium.texts(".figure dd")[:2] == ["62.5%", "95%: 21.9% to 90.8%"]
    assert len(chromium.texts("figure svg")) == 3
    assert chromium.texts("tbody td:nth-child(3)") == ["0", "it failed", "2", "3"]
    assert chromium.texts("tbody td:nth-child(5)") == ["1", "failed", "0.5", "1"]
    chromium.find("th:nth-child(7) button").click()
    chromium.find("th:nth-child(7) button").click()
    assert chromium.texts("tbody td:first-child") == ["3", "2", "1", "0"]
    chromium.js(
        """const kind = document.querySelector(".heading select");
        kind.value = "wrong";
        kind.dispatchEvent(new Event("change"))"""
    )
    assert chromium.heading == "Question"
    chromium.find("tbody a").click()
    assert chromium.heading == "Thought 0.0.0"
    chromium.press(Keys.HOME)
    assert chromium.texts("#panel .text") == [HOSTILE["end of script"], "2", "</script><script>ale"]
    chromium.press("o")
    assert chromium.find("#overview").is_displayed()
    assert chromium.js("return window.hacked") is None
    assert chromium.complaints == []


def test_values_are_displayed_along_the_text(opened: Any, grown: Any) -> None:
    tree = grown("a", "a/<b>", "a/<b>/c")
    for node in list(tree)[1:]:
        node.visits = 4 - node.depth
    browser = opened(tree)
    browser.js("view.select(view.tree.end)")
    assert browser.texts("#panel .path .text") == ["a", "<b>", "c"]
    assert browser.texts("#panel .path .value") == ["0", "1", "2"]
    colours = "return [...document.querySelectorAll('.path li')].map((row) => getComputedStyle(row).borderLeftColor)"
    assert len(set(browser.js(colours))) == 3
    browser.js("view.measure('visits')")
    assert browser.texts("#panel .path .value") == ["3", "2", "1"]
    browser.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert browser.heading == "Thought 0.0"
    assert browser.texts("#panel .path") == []  # the panel has no other text


@pytest.mark.slow
def test_thinking_is_collapsed_with_its_length(opened: Any, grown: Any) -> None:
    tree = grown("a")
    thinking = "\U0001f3b9 is <b>it</b> 7?\n</think>\n\n"
    tree[1].thought = Thought(parts={"thought": thinking + "It is 7."}, thinking=len(thinking))
    parts = (Part("thinking", "is it 7?", 5), Part("closing", "\n</think>\n\n"), Part("exact", "It is 7.", 4))
    tree.calls[1] = [Call(purpose="generate", template="thought", prompt=(), output="It is 7.", parts=parts)]
    browser = opened(tree)
    browser.js("view.select(view.tree.end)")
    assert browser.texts("#panel .part > details > summary") == ["Thinking, 5 words"]
    assert browser.texts("#panel .part > .text") == ["It is 7."]
    assert browser.texts("#panel .part > details .text") == []
    assert browser.texts("#panel .output .thinking summary") == ["Thinking, 5 tokens"]
    browser.driver.execute_async_script(
        """const details = document.querySelector("#panel .part > details");
        details.addEventListener("toggle", () => arguments[0]());
        details.querySelector("summary").click()"""
    )
    (text,) = browser.texts("#panel .part > details .text")
    assert text.split() == thinking.split()
