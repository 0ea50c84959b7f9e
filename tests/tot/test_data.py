"""Rows of data sets in local files of all formats and on the hub, and unreadable files."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tot.decoders import OptionError
from tot.evaluation.data import read, row, rows

ROWS = [{"question": "2 + 2?", "answer": 4}, {"question": "a, b\nor é?", "answer": 5}]
LINES = "".join(json.dumps(one) + "\n" for one in ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same two rows in every format."""
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "A.JSONL").write_text(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(LINES)
    (tmp_path / "a.csv").write_text('question,answer\n2 + 2?,4\n"a, b\nor é?",5\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a [1].parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.jsonl.gz", "a.json", "lines.json", "a.csv", "a [1].parquet"])
def test_rows_are_the_same_in_every_format(folder: Path, name: str) -> None:
    expected = [{**one, "answer": str(one["answer"])} for one in ROWS] if name == "a.csv" else ROWS  # cells are text
    assert list(rows(folder / name)) == expected
    assert row(str(folder / name), 1) == expected[1]
    for number in (2, 99):
        with pytest.raises(OptionError, match=rf"{re.escape(name)} has no row {number}: rows are counted from 0"):
            row(folder / name, number)


def test_values_of_a_parquet_file_are_what_was_written(tmp_path: Path) -> None:
    """32-bit floats have their digits; dates and decimals are text."""
    day, price = datetime.date(2024, 1, 2), decimal.Decimal("3.10")
    columns = {
        "small": pa.array([0.1, 1e-20], pa.float32()),
        "large": pa.array([2.0**-20, 1 / 3], pa.float64()),
        "list": pa.array([[0.1, None], []], pa.list_(pa.float32())),
        "day": [day, None],
        "price": [price, None],
        "days": [[day], None],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert list(rows(tmp_path / "a.parquet")) == [
        {"small": 0.1, "large": 2.0**-20, "list": [0.1, None], "day": "2024-01-02", "price": "3.10",
         "days": ["2024-01-02"]},
        {"small": 1e-20, "large": 1 / 3, "list": []},
    ]  # fmt: skip
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert list(rows(tmp_path / "a.parquet")) == []


def test_a_file_of_an_installed_package_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "my_rows"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (folder / "a.jsonl").rename(package / "data" / "a.jsonl")
    monkeypatch.syspath_prepend(str(folder))
    assert list(rows("package:my_rows/data/a.jsonl")) == ROWS
    with pytest.raises(OptionError, match=r"b\.jsonl: there is no such file"):
        list(rows("package:my_rows/data/b.jsonl"))
    with pytest.raises(OptionError, match=r"no_rows/a\.jsonl: this package is not installed: pip install no-rows"):
        list(rows("package:no_rows/a.jsonl"))


def test_rows_are_read_lazily(tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(5000)) + "bad")
    assert (next(rows(many)), row(many, 4999)) == ({"n": 0}, {"n": 4999})


@pytest.mark.parametrize("name", ["a.yaml", "a.tsv", "a", "jsonl"])
def test_an_unknown_format_is_rejected_with_the_known_ones(folder: Path, name: str) -> None:
    (folder / name).write_text("question: 1")
    with pytest.raises(
        OptionError, match=r"unknown kind of data set '.*: choose one of \.csv, \.json, \.jsonl, \.parq"
    ):
        row(folder / name, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", b'{"question": '),
        ("x.json", b"no json"),
        ("x.parquet", b"PAR0"),
        ("x.csv", b"a,b\n1,2,3\n\xff"),
        ("x.jsonl.gz", b"no gzip"),
        ("x.jsonl.gz", gzip.compress(b'{"n": 1}\nbad\n' * 9000)[:-20]),
    ],
)
def test_a_damaged_or_missing_file_is_a_one_line_error_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(OptionError, match=rf"{name}: there is no such file"):
        row(tmp_path / name, 0)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=rf"{name} can't be read: .+") as refused:
        list(rows(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_utf_8_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    for name in ("a.csv", "a.json", "a.txt"):
        (tmp_path / name).write_bytes("question,answer\nq,1\n".encode("utf-16"))
        with pytest.raises(OptionError, match=r"can't be read: 'utf-8' codec .*: save it as UTF-8"):
            list(rows(tmp_path / name))


def test_a_bad_line_does_not_affect_other_lines(tmp_path: Path) -> None:
    good = json.dumps(ROWS[1], ensure_ascii=False).encode()
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf{}\n" + b"\n\xff\n" + b"[" * 100_000 + b"\n7\n" + good)
    records = dict(read(tmp_path / "x.jsonl"))
    assert list(records) == ["line 1", "line 3", "line 4", "line 5", "line 6"]
    assert (records["line 1"], records["line 6"]) == ({}, ROWS[1])
    for place in ("line 3", "line 4"):
        assert re.fullmatch(r"is not JSON \(.+\)", str(records[place]))
    assert records["line 5"] == "is not a JSON object"
    assert row(tmp_path / "x.jsonl", 4) == ROWS[1]
    with pytest.raises(OptionError, match=r"x\.jsonl can't be read: line 5 is not a JSON object"):
        row(tmp_path / "x.jsonl", 3)


def test_rows_of_one_file_may_have_different_types(tmp_path: Path) -> None:
    answers = [4, "four", 2**70, "2024-01-02", [1, "a"], {"a": []}]
    mixed = [{"answer": answer} for answer in answers] + [{"question": ["x"]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in mixed))
    (tmp_path / "x.json").write_text(json.dumps(mixed))
    assert list(rows(tmp_path / "x.jsonl")) == list(rows(tmp_path / "x.json")) == mixed


def test_a_csv_cell_is_its_literal_text(tmp_path: Path) -> None:
    cells = ["NA", "null", "007", "3.10", "1e5", "true", "12345678901234567890123", "2024-01-02"]
    (tmp_path / "x.csv").write_text("question,answer\n" + "".join(f"q,{cell}\n" for cell in cells) + "s,\n")
    assert list(rows(tmp_path / "x.csv")) == [{"question": "q", "answer": cell} for cell in cells] + [{"question": "s"}]


def test_a_bad_csv_row_is_named_by_its_first_line(tmp_path: Path) -> None:
    cells = 'question, answer\n"two\nlines",1\n"x"y,2\nHow many, please?,5\nq,7,\n"open,3\nr,4\n'
    (tmp_path / "a.csv").write_text(cells)
    assert list(read(tmp_path / "a.csv")) == [
        ("line 2", {"question": "two\nlines", "answer": "1"}),
        ("line 4", "is not CSV (',' expected after '\"')"),
        ("line 5", "has 3 cells, and the header 2: put quotes around cells with commas"),
        ("line 6", {"question": "q", "answer": "7"}),
        ("line 7", "is not CSV (unexpected end of data)"),
    ]
    (tmp_path / "a.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(OptionError, match=r"a\.csv can't be read: two columns are named 'a': rename one"):
        list(rows(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "question\nq\n", {"question": "q"}),
        ("x.txt", "q\n", {"text": "q"}),
        ("x.json", '[{"question": "q"}]', {"question": "q"}),
        ("x.json", '{"question": "q"}\n{"question": "r"}\n', {"question": "q"}),
        ("x.jsonl", '{"question": "q"}\n', {"question": "q"}),
    ],
)
def test_a_byte_order_mark_is_not_part_of_a_row(tmp_path: Path, name: str, text: str, expected: dict[str, str]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert row(tmp_path / name, 0) == expected


def test_lines_of_text_are_rows_without_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\u2028é\n\n \r\nc\r\n", encoding="utf-8", newline="")
    assert dict(read(tmp_path / "x.txt")) == {"line 1": {"text": "a\u2028é"}, "line 4": {"text": "c"}}


def test_missing_values_are_omitted_and_lone_surrogates_replaced(tmp_path: Path) -> None:
    lines = '{"question": "q", "answer": null}\n{"answer": NaN}\n{"question": "a \\ud835 b", "options": ["\\udc00"]}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    assert list(rows(tmp_path / "a.jsonl")) == [{"question": "q"}, {}, {"question": "a ? b", "options": ["?"]}]


# -- the hub ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "arguments"),
    [("org/name:test", ("org/name", None)), ("org/name.v2:main:test", ("org/name.v2", "main"))],
)
def test_a_split_of_the_hub_is_streamed(
    monkeypatch: pytest.MonkeyPatch, source: str, arguments: tuple[str, str]
) -> None:
    calls = []

    def load(*arguments: str, **options: object) -> list[dict[str, object]]:
        calls.append((arguments, options))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    assert list(read(source)) == [("row 1", ROWS[0]), ("row 2", ROWS[1])]
    assert calls == [(arguments, {"split": "test", "streaming": True})]


def test_a_data_set_that_the_hub_does_not_give_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(OptionError, match=r"org/name:test .* \(no network\): .* or give a local file with --data"):
        list(rows("org/name:test"))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(OptionError, match=r"^org/name:test can't be read: no network$"):
        list(rows("org/name:test"))
    with pytest.raises(OptionError, match=r"or a data set on the hub, as org/name:split"):
        list(rows("org/name"))
