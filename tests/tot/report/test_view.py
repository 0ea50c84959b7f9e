"""The tree view in headless Chromium: keyboard, search, zoom, colours, large trees, light and dark themes."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.keys import Keys

from tot import State, Thought, ThoughtTree

pytestmark = pytest.mark.slow


def wide(*counts: int) -> ThoughtTree:
    """A tree with the given number of children at each level."""
    tree = ThoughtTree(State(question="q"))
    level = [tree.root]
    for count in counts:
        level = [
            tree.add(node, Thought(parts={"thought": f"thought {i} after {node.id}"}), value=i / count)
            for node in level
            for i in range(count)
        ]
    return tree


def test_arrow_keys_navigate_and_enter_collapses(opened: Any, grown: Any) -> None:
    browser = opened(grown("a", "b", "b/c", "b/d", "a/e"))
    walked = []
    for key in (
        Keys.HOME,
        Keys.ARROW_RIGHT,
        Keys.ARROW_DOWN,
        Keys.ARROW_RIGHT,
        Keys.ARROW_DOWN,
        Keys.ARROW_UP,
        Keys.END,
    ):
        browser.press(key)
        walked.append(browser.heading)
    assert walked == [
        "Question", "Thought 0.0", "Thought 0.1", "Thought 0.1.0", "Thought 0.1.1", "Thought 0.1.0", "Thought 0.0.0",
    ]  # fmt: skip
    browser.press(Keys.ARROW_LEFT, Keys.ENTER)
    selected = browser.find("[aria-selected=true]")
    assert (selected.get_attribute("aria-expanded"), selected.get_attribute("aria-level")) == ("false", "2")
    assert browser.open_thoughts == 5
    browser.press(Keys.ARROW_RIGHT)
    assert browser.heading == "Thought 0.0.0"
    assert browser.js("return document.activeElement.getAttribute('aria-activedescendant')") == "thought-5"


def test_collapsing_an_ancestor_selects_it(opened: Any, grown: Any) -> None:
    browser = opened(grown("a", "a/b", "a/b/c"))
    browser.js("view.select(view.tree.end)")
    browser.js("document.querySelector('#thought-1 .toggle').click()")
    assert browser.heading == "Thought 0.0"
    assert browser.shown == 2


def test_a_search_covers_collapsed_thoughts_counts_and_wraps_around(opened: Any, grown: Any) -> None:
    browser = opened(grown("apple", "apple/pear", "plum", "plum/APPLE pie", "fig"))
    browser.press(Keys.HOME, Keys.ENTER)
    assert browser.shown == 1
    browser.press("/", "a", "p", "p", "l")
    assert (browser.find("#found").text, browser.heading) == ("1 of 2", "Thought 0.0")
    assert browser.texts("#panel mark") == ["appl"]
    browser.press(Keys.ENTER)
    assert (browser.find("#found").text, browser.heading) == ("2 of 2", "Thought 0.1.0")
    assert browser.texts("#panel mark") == ["APPL"]
    browser.press(Keys.ESCAPE, "n")
    assert browser.heading == "Thought 0.0"
    browser.press("p")
    assert browser.heading == "Thought 0.1.0"
    assert len(browser.texts(".card.match")) == 2
    browser.press("/", "x")
    assert browser.find("#found").text == "none"


def test_two_thousand_thoughts_are_expanded_and_drawn_if_they_fit(opened: Any) -> None:
    browser = opened(wide(9, 10, 21))  # 1,990
    assert browser.open_thoughts == 1 + 9 + 90 + 1890
    assert browser.shown < 100  # only cards in the window
    browser.js("view.fit(true); view.move(9, 5); view.draw()")
    assert browser.shown == 1990


def test_a_larger_tree_is_partly_collapsed(opened: Any) -> None:
    browser = opened(wide(3, 500, 4))  # 1 + 3 + 1,500 + 6,000
    assert browser.open_thoughts <= 2000
    assert browser.js("return view.tree.nodes[1].open")
    assert browser.open_thoughts >= 1 + 3 + 1500
    assert browser.shown < 100  # only cards in the window
    browser.press("/", "thought 3 after 1503")  # a collapsed one
    assert (browser.find("#found").text, browser.heading) == ("1 of 1", "Thought 0.2.499.3")


def test_the_wheel_zooms_at_the_pointer_and_dragging_pans(opened: Any, grown: Any) -> None:
    browser = opened(grown("a", "a/b"))
    canvas = browser.find("#canvas")
    place = """const { x, y, width, height } = byId("thought-1").getBoundingClientRect();
      return [x + width / 2, y + height / 2, width]"""
    x, y, width = browser.js(place)
    browser.js(
        """byId("canvas").dispatchEvent(
          new WheelEvent("wheel", { deltaY: -200, clientX: arguments[0], clientY: arguments[1], cancelable: true }));
        view.draw()""",
        x,
        y,
    )
    zoomed = browser.js(place)
    assert zoomed[:2] == pytest.approx([x, y], abs=0.5)
    assert zoomed[2] > 1.2 * width
    corner = (-canvas.size["width"] // 2 + 20, -canvas.size["height"] // 2 + 20)
    drag = ActionChains(browser.driver).move_to_element_with_offset(canvas, *corner)
    drag.click_and_hold().move_by_offset(40, 30).move_by_offset(20, 10).release().perform()
    browser.js("view.draw()")
    assert browser.js(place)[:2] == pytest.approx([x + 60, y + 40], abs=1)
    browser.press(Keys.HOME)
    before, zoom = browser.js("return [view.at.y, view.at.zoom]")
    ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ARROW_DOWN).key_up(Keys.SHIFT).perform()
    assert browser.js("return view.at.y") == before - 80
    assert browser.heading == "Question"  # the picture moved, the selection did not
    browser.press("-", "-")
    assert browser.js("return view.at.zoom") == pytest.approx(0.64 * zoom)


def test_a_two_finger_gesture_zooms_about_its_centre_and_pans(opened: Any, grown: Any) -> None:
    browser = opened(grown("a", "a/b"))
    browser.js("view.select(view.tree.end)")
    place = """view.draw(); const { x, y, width, height } = byId("thought-1").getBoundingClientRect();
      return [x + width / 2, y + height / 2, width]"""
    x, y, width = browser.js(place)
    fingers = [PointerInput("touch", f"finger {number}") for number in (1, 2)]
    for finger, side in zip(fingers, (-1, 1), strict=True):
        finger.create_pointer_move(0, int(x) + 40 * side, int(y))
        finger.create_pointer_down(button=0)
        finger.create_pointer_move(50, int(x) + 60 * side + 30, int(y) + 20)
        finger.create_pointer_up(0)
    actions = ActionBuilder(browser.driver)
    actions.devices = fingers
    actions.perform()
    moved = browser.js(place)
    assert moved == pytest.approx([x + 30, y + 20, 1.5 * width], abs=3)
    assert browser.heading == "Thought 0.0.0"  # the initial selection: nothing was clicked


def test_colours_follow_the_selected_measure(opened: Any, grown: Any) -> None:
    tree = grown("a", "b", "c")
    tree[1].visits, tree[2].visits, tree[3].visits = 5, 1, 3
    browser = opened(tree)
    share = "return [1, 2, 3].map((id) => byId(`thought-${id}`).style.getPropertyValue('--share'))"
    assert browser.js(share) == ["0.0%", "50.0%", "100.0%"]
    browser.js("byId('measure').value = 'visits'; byId('measure').dispatchEvent(new Event('change')); view.draw()")
    assert browser.js(share) == ["100.0%", "0.0%", "50.0%"]
    assert browser.texts("#low, #high") == ["1", "5"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_follow_the_system_and_the_button_with_enough_contrast(opened: Any, theme: str, grown: Any) -> None:
    browser = opened(grown("a", "a/b"))
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        paper, contrasts = brightness(browser, "body"), {}
        for selector in (
            "#panel h2",
            "#panel .numbers dt",
            ".card p",
            ".card footer",
            ".value",
            ".search output",
            "summary",
        ):
            if browser.texts(selector):
                contrasts[selector] = contrast(browser, selector)
        assert (paper > 0.5) == (theme == "light")
        assert {selector: ratio for selector, ratio in contrasts.items() if ratio < 4.5} == {}
        assert len(contrasts) >= 5
        browser.press("d")
        assert (brightness(browser, "body") > 0.5) != (theme == "light")
        browser.find("#theme").click()
        assert brightness(browser, "body") == paper
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


COLOURS = """const parse = (colour) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
let element = document.querySelector(arguments[0]);
const ink = parse(getComputedStyle(element).color);
while (element && parse(getComputedStyle(element).backgroundColor)[3] === 0) element = element.parentElement;
return [ink, parse(getComputedStyle(element ?? document.body).backgroundColor)];"""


def luminance(colour: list[float]) -> float:
    """WCAG 2.2's relative luminance of red, green and blue from 0 to 255."""
    parts = [value / 255 for value in colour[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def brightness(browser: Any, selector: str) -> float:
    return luminance(browser.js(COLOURS, selector)[1])


def contrast(browser: Any, selector: str) -> float:
    """WCAG 2.2's contrast ratio of a text to its background."""
    darker, lighter = sorted(map(luminance, browser.js(COLOURS, selector)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_leaf_has_its_answer_and_share_and_no_latex(opened: Any, grown: Any) -> None:
    tree = grown(r"so \frac{1}{2} \times \boxed{36} \( x \)", "other")
    tree[1].answer, tree[1].share = "36", 0.8
    browser = opened(tree, answer="36", votes=[4, 5])
    assert browser.texts("#thought-1 p") == ["36 so (1)/(2) × 36 x"]
    assert "80% of votes" in browser.texts("#thought-1 footer")[0]
    assert browser.texts("#thought-2 p") == ["other"]
    assert browser.heading == "Thought 0.1"
    assert "4 of 5" in browser.texts("#panel .numbers")[0]
