"""Files of searches: their options, and errors that name the file, the search and the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tot.cli.app import main
from tot.decoders import OptionError
from tot.serving.searches import load_searches


def test_a_file_replaces_the_default_searches(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "searches.yaml"
    file.write_text("sums: {task: gsm8k, until: 0.9, budget_seconds: 20, max_tokens: 99}\nopen: {search: best-of-n}\n")
    searches = load_searches(file, chat("a"))
    assert list(searches) == ["sums", "open", ""]
    task, config = searches["sums"]
    assert (task.name, config.until, config.max_tokens) == ("gsm8k", 0.9, 99)
    assert config.budget is not None
    assert config.budget.seconds == 20
    assert searches["open"][0].name == "ask"


def test_the_documented_file_is_valid(chat: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    file = tmp_path / "searches.yaml"
    file.write_text(re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0])
    assert list(load_searches(file, chat("a"))) == ["math", "deep", ""]


def test_without_a_sandbox_there_is_no_code(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.serving.searches.can_confine", lambda: True)
    assert list(load_searches(None, chat("a"))) == ["vote", "best", "tree", "code", ""]
    monkeypatch.setattr("tot.serving.searches.can_confine", lambda: False)
    assert list(load_searches(None, chat("a"))) == ["vote", "best", "tree", ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vote: {untl: 0.9}", r"search vote: unknown field 'untl' \(did you mean until\?\): choose one of .*"),
        ("vote: {until: high}", "search vote: until = 'high': Input should be a valid number.*"),
        ("vote: {search: bsf}", r"search vote: unknown search 'bsf' \(did you mean bfs\?\).*"),
        ("vote: {search: 'bfs:breadth=0'}", "search vote: search bfs, option breadth: .*"),
        ("vote: {task: askk}", r"search vote: unknown task 'askk' .*"),
        ("vote: {model: big}", "search vote, field model: all searches share the server's decoder.*"),
        ("vote: {search: cot, until: 0.9}", "search vote: search cot, option until: unknown.*"),
        ("vote: {budget_tokens: -1}", "search vote: budget.tokens = -1: .*"),
        ("vote: {calibration: none.json}", "search vote: calibrations none.json can't be read.*"),
        ("'a b': {}", "search 'a b': use letters, digits, dots and hyphens only"),
        ("1: {}", "search 1: use letters, digits, dots and hyphens only"),
        ("jacobi: {}", "search jacobi: the name of a decoder: choose another name"),
        ("[vote]", r".*has no options: write lines such as `vote: {task: gsm8k, until: 0\.95}`"),
        ("vote: fast", "search 'vote': write its options, such as `vote: .*"),
        ("vote: {", ".*can't be read as YAML: .*"),
    ],
)
def test_errors_name_the_file_the_search_and_the_field(chat: Any, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "searches.yaml"
    file.write_text(text)
    with pytest.raises(OptionError) as error:
        load_searches(file, chat("a"), ("jacobi",))
    assert "searches.yaml" in str(error.value)
    assert re.search(message, str(error.value))


def test_a_reproducible_search_needs_float32(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "searches.yaml"
    file.write_text("exact: {search: self-consistency, reproducible: true}")
    decoder = chat("a")
    assert load_searches(file, decoder)["exact"][1].reproducible
    decoder.model = type("Model", (), {"dtype": "torch.bfloat16"})()
    with pytest.raises(OptionError, match=r"search exact: .* in float32, but this decoder's model is in bfloat16"):
        load_searches(file, decoder)


def test_a_missing_file_is_reported_in_one_line(smollm2: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", smollm2, "--port", "0", "--searches", "none.yaml"]) == 2
    err = capfd.readouterr().err
    assert err == "tot: none.yaml can't be read as YAML: No such file or directory\n"


def test_a_name_that_occurs_twice_is_refused(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "searches.yaml"
    for text, name in (("vote: {}\nmath: {}\nvote: {}\n", "vote"), ("vote: {until: 0.5, until: 0.9}\n", "until")):
        file.write_text(text)
        with pytest.raises(OptionError, match=f"can't be read as YAML: {name} occurs 2 times"):
            load_searches(file, chat("a"))
