"""`tot report` without a browser: the page, pictures, text, the numbers of an evaluation, and invalid input."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import Observation, State, Thought, ThoughtTree
from tot.cli.app import main
from tot.decoders import OptionError, TaskError
from tot.evaluation.overview import evaluation_page
from tot.report.page import embedded, tree_page
from tot.report.plots import losses

HOSTILE = (
    "</script><script>alert(1)</script> --> <img src=x onerror=alert(1)> $\\frac{1}{0}$ \x00\x1b\u2028\u202e\ud800 &"
)


@pytest.fixture
def tree() -> ThoughtTree:
    tree = ThoughtTree(State(question=f"q {HOSTILE}"))
    a = tree.add(tree.root, Thought(parts={"thought": HOSTILE}), value=2.5, visits=3)
    b = tree.add(tree.root, Thought(parts={"thought": "b"}), value=math.inf)
    c = tree.add(a, Thought(parts={"thought": "c " * 50_000}), value=4.0, terminal=True)
    tree.link(b, c, Thought(parts={"thought": "other way"}))
    tree.prune(b)
    tree.choose(c)
    return tree


@pytest.fixture
def saved(tree: ThoughtTree, tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "tot.run", "version": 2, "answer": "9", "tree": tree.to_json()})
    )
    return tmp_path / "run.json"


@pytest.fixture
def report(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `tot report`; return its status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return main(["report", *map(str, arguments)]), *capfd.readouterr()

    return run


def blocks(page: str) -> dict[str, Any]:
    """Return the JSON data of a page by element id."""
    elements = re.findall(r'<script type="application/json" id="([^"]+)">([^<]*)</script>', page)
    return {name: json.loads(data) for name, data in elements}


# -- the page ---------------------------------------------------------------------------------------------------


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_data_is_ascii_without_markup_and_round_trips(data: Any) -> None:
    text = embedded(data)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == data
    assert json.loads(embedded({"a": [math.inf, -math.inf, math.nan, 1.5]})) == {"a": ["∞", "−∞", "–", 1.5]}


def test_a_page_has_the_whole_tree_and_the_facts_of_its_run(tree: ThoughtTree) -> None:
    page = "".join(tree_page(tree, {"answer": "9"}))
    data = blocks(page)["tree-0"]
    assert data.pop("run") == {"answer": "9"}
    assert data["nodes"][2]["value"] == "∞"
    data["nodes"][2]["value"] = math.inf
    assert data == tree.to_json()


def test_thoughts_add_no_element_to_the_page(tree: ThoughtTree) -> None:
    plain = "".join(tree_page(ThoughtTree(State(question="q")), {}))
    page = "".join(tree_page(tree, {"answer": HOSTILE}))
    tags = re.compile(r"<[a-zA-Z/!][^>]*>")
    assert [tag for tag in tags.findall(page) if "id=" in tag] == [tag for tag in tags.findall(plain) if "id=" in tag]
    assert len(tags.findall(page)) == len(tags.findall(plain))
    assert page.encode()


def test_the_policy_allows_only_one_script_and_one_style_by_hash(tree: ThoughtTree) -> None:
    page = "".join(tree_page(tree, {}))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (style,), (script,) = (
        re.findall(r"<style>(.*?)</style>", page, re.S),
        re.findall(r"<script>(.*?)</script>", page, re.S),
    )
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy.replace("&#39;", "'") == (
        f"default-src 'none'; style-src '{hashes[0]}'; script-src '{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]+", page))
    assert addresses == {"http://www.w3.org"}  # the SVG namespace, which is not fetched


@pytest.mark.parametrize(
    "file", [file for file in (files("tot.report") / "viewer").iterdir() if file.name.endswith(".js")]
)
def test_no_script_parses_text_as_markup_or_code(file: Any) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
    assert not re.findall(rf"{markup}|\beval\b|new Function", file.read_text())


# -- the command ------------------------------------------------------------------------------------------------


def test_the_page_is_written_beside_the_run(report: Any, saved: Path) -> None:
    assert report(saved) == (0, f"report: {saved.with_suffix('.html')}\n", "")
    assert blocks(saved.with_suffix(".html").read_text())["tree-0"]["run"] == {"answer": "9"}
    assert [path.name for path in saved.parent.iterdir() if path.name.startswith(".")] == []


def test_the_suffix_selects_the_picture_format(report: Any, saved: Path, tmp_path: Path) -> None:
    assert report(saved, "--out", tmp_path / "t.png")[0] == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert report(saved, "--out", tmp_path / "t.SVG")[0] == 0
    assert ElementTree.parse(tmp_path / "t.SVG").getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.json", None, "absent.json does not exist: give a run that `tot solve --out` wrote, or a folder"),
        ("broken.json", "{", "broken.json can't be read as JSON: "),
        ("list.json", "[]", "list.json is not a tree of thoughts: save one with "),
        ("empty.json", "", "empty.json can't be read as JSON: "),
        (
            "none.json",
            '{"format": "tot.tree", "version": 2, "root": {"question": "q"}, "nodes": []}',
            "the tree is damaged: ",
        ),
        (
            "new.json",
            '{"format": "tot.tree", "version": 9}',
            "new.json has version 9 of tot.tree: this program reads 2",
        ),
        (
            "trace.jsonl",
            '{"format": "tot.checkpoint", "version": 2}\n{"step": "expand", "tree": [3]}\n',
            "trace.jsonl is damaged: ",
        ),
    ],
)
def test_an_invalid_run_is_rejected_in_one_line(
    report: Any, tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    status, out, err = report(tmp_path / name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
    assert not (tmp_path / name).with_suffix(".html").exists()


def test_a_file_that_cannot_be_written_is_named(report: Any, saved: Path, tree: ThoughtTree, tmp_path: Path) -> None:
    for name in ("no/folder/t.html", "no/folder/t.png", "no/folder/t.svg"):
        error = f"tot: {tmp_path / name} can't be written: No such file or directory; give another file\n"
        assert report(saved, "--out", tmp_path / name)[::2] == (2, error)
    with pytest.raises(TaskError, match=r"nowhere/tree\.html can't be written: .+; give another file"):
        tree.report(tmp_path / "nowhere" / "tree.html")
    kinds = "choose one of .graphml, .html, .png, .svg"
    error = f"tot: --out tree.pdf: unknown kind of report '.pdf': {kinds}\n"
    assert report(saved, "--out", "tree.pdf")[::2] == (2, error)


# -- methods of a tree ------------------------------------------------------------------------------------------


def test_a_tree_prints_as_text(tree: ThoughtTree) -> None:
    lines = repr(tree).split("\n")
    assert len(lines) == 4
    assert lines[0].startswith("q </script>")
    assert lines[1].startswith("├── ★  2.50  3 visits  </script>")
    assert lines[2].startswith("│   └── ★  4.00  c c c")
    assert lines[3] == "└── ·   inf  b"
    assert not re.findall(r"[\x00-\x09\x0b-\x1f\u202e\ud800]", repr(tree))


def test_a_tree_from_python_has_the_same_page_and_pictures_without_pyplot(tree: ThoughtTree, tmp_path: Path) -> None:
    tree.report(tmp_path / "tree.html")
    assert (tmp_path / "tree.html").read_text(encoding="utf-8") == "".join(tree_page(tree, {}))
    (tmp_path / "losses.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    for figure in (tree.plot(), losses(tmp_path / "losses.jsonl")):
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_large_tree_prints_its_chosen_and_first_thoughts() -> None:
    tree = ThoughtTree(State(question="q"))
    for i in range(200):
        tree.add(tree.root, Thought(parts={"thought": f"thought {i}"}))
    tree.choose(tree[180])
    lines = repr(tree).splitlines()
    assert lines[-1] == "… and 150 more thoughts"
    assert len(lines) == 52
    assert sum("★" in line and "thought 179" in line for line in lines) == 1


def test_a_jupyter_picture_contains_selectable_text(tree: ThoughtTree) -> None:
    drawing = ElementTree.fromstring(tree._repr_svg_() or "")
    texts = ["".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert any("<script>alert(1)</script>" in text.replace("\n", "") for text in texts)
    assert {element.tag.rpartition("}")[2] for element in drawing.iter()}.isdisjoint({"script", "img", "image", "a"})
    assert {"4", "2.5", "b", "inf"} <= set(texts)


def test_a_picture_has_observations_and_no_mathematics_and_no_control_characters() -> None:
    tree = ThoughtTree(State(question="$\\frac{1}{0}$ or 5"))
    seen = Observation(text="$x$ is\n" + "wrong " * 50)
    tree.add(tree.root, Thought(parts={"thought": "a\x00b\x1b\ud800c"}, observation=seen))
    drawing = ElementTree.fromstring(tree._repr_svg_() or "")
    texts = ["".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["$\\frac{1}{0}$ or 5", "a�b��c", "⇒ $x$ is wrong wrong wrong wrong …"]


def test_without_matplotlib_jupyter_gets_no_picture(tree: ThoughtTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.tree.tree.find_spec", lambda name: None)
    assert tree._repr_svg_() is None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="plots need matplotlib: pip install matplotlib"):
        tree.plot()


def test_a_figure_has_a_box_per_thought_and_a_line_per_edge(tree: ThoughtTree) -> None:
    (axes,) = tree.plot().axes
    assert [text.get_bbox_patch() is not None for text in axes.texts] == [True] * len(tree)
    assert [len(edges.get_paths()) for edges in axes.collections] == [1, 1, 2]  # plain, links, chosen


# -- an evaluation ----------------------------------------------------------------------------------------------


def test_an_overview_has_the_numbers_and_every_tree(evaluation: Callable[..., Path], tree: ThoughtTree) -> None:
    folder = evaluation([1.0, 0.0, 1.0, 1.0], tree)
    page = "".join(evaluation_page(folder))
    data = blocks(page)
    overview = data.pop("evaluation")
    assert sorted(data) == ["tree-0", "tree-2", "tree-3"]  # the search of sample 1 failed before its first thought
    assert overview["title"] == "letters on questions.jsonl with tiny, bfs:thoughts=3"
    assert overview["finished"]
    figures = {name: (value, note) for name, value, note in overview["figures"]}
    assert figures["Score"] == ("75.0%", "95%: 30.1% to 95.4%")
    assert figures["New tokens"] == ("60", "15 per sample")
    assert figures["Failed"] == ("1", "searches, and 2 invalid rows")
    assert figures["Wall time"] == ("6.0 s", "1.5 s per question, loading included")
    assert figures["Latency"] == ("1.5 s", "mean of a search, while others run")
    assert [sample["tree"] for sample in overview["samples"]] == ["tree-0", None, "tree-2", "tree-3"]
    assert [sample["seconds"] for sample in overview["samples"]] == [0.0, 1.0, 2.0, 3.0]
    scores = overview["charts"][0]["bars"]
    assert (scores[0]["height"], scores[-1]["height"], sum(bar["height"] for bar in scores)) == (1, 3, 4)
    assert data["tree-2"]["run"]["reference"] == HOSTILE[:20]


def test_an_overview_of_failed_searches_has_no_score(evaluation: Callable[..., Path], tree: ThoughtTree) -> None:
    folder = evaluation([0.0, 0.0], tree)
    lines = (folder / "samples.jsonl").read_text().splitlines()
    (folder / "samples.jsonl").write_text(f"{lines[1]}\n")
    overview = blocks("".join(evaluation_page(folder)))["evaluation"]
    assert overview["figures"][0] == ["Score", "none", "every search failed"]
    assert [chart["title"] for chart in overview["charts"]] == ["New tokens per sample", "Latency in seconds"]


def test_an_unfinished_evaluation_shows_its_samples_so_far(evaluation: Callable[..., Path], tree: ThoughtTree) -> None:
    folder = evaluation([1.0, 0.0], tree)
    (folder / "results.json").unlink()
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"id": "2-0", "ind')
    overview = blocks("".join(evaluation_page(folder)))["evaluation"]
    assert not overview["finished"]
    assert len(overview["samples"]) == 2


def test_a_damaged_tree_is_named_and_the_others_are_included(
    evaluation: Callable[..., Path], tree: ThoughtTree
) -> None:
    folder = evaluation([1.0, 0.0, 1.0], tree)
    (folder / "trees" / "0-0.json").write_text("{")
    data = blocks("".join(evaluation_page(folder)))
    assert sorted(data) == ["evaluation", "tree-2"]
    assert "0-0.json can't be read as JSON" in data["evaluation"]["samples"][0]["error"]


def test_the_report_of_an_evaluation_is_a_page_in_its_folder(
    report: Any, evaluation: Callable[..., Path], tree: ThoughtTree
) -> None:
    folder = evaluation([1.0], tree)
    assert report(folder) == (0, f"report: {folder / 'report.html'}\n", "")
    assert (folder / "report.html").exists()
    status, _, err = report(folder, "--out", "t.png")
    assert (status, "an evaluation needs a .html file" in err) == (2, True)


@pytest.mark.parametrize("samples", [None, "", "{}\n", "[]\n", "not JSON\n"])
def test_an_evaluation_without_samples_is_rejected_in_one_line(
    report: Any, evaluation: Callable[..., Path], tree: ThoughtTree, samples: str | None
) -> None:
    folder = evaluation([1.0], tree)
    (folder / "samples.jsonl").unlink()
    if samples is not None:
        (folder / "samples.jsonl").write_text(samples)
    status, out, err = report(folder)
    assert (status, out, err.count("\n")) == (2, "", 1)
    damaged = f"{folder}/samples.jsonl, line 1 is damaged: delete that line, then continue with --resume\n"
    assert err.endswith(damaged) if samples else f"{folder} has no readable samples: " in err


def test_a_folder_without_an_evaluation_is_rejected(report: Any, tmp_path: Path) -> None:
    status, _, err = report(tmp_path)
    assert (status, err) == (2, f"tot: {tmp_path} is not the folder of an evaluation: it has no config.yaml\n")
