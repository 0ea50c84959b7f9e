"""Rows of data sets in local files of all formats, and unreadable files."""

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same two rows in every format, and lines of text."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.csv").write_text('question,answer\n2 + 2?,4\n"a, b\nor é?",5\n', encoding="utf-8")
    (tmp_path / "A.JSONL").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "a.txt").write_text("first line\nsecond, é\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_rows_are_the_same_in_every_format(folder: Path, name: str) -> None:
    wanted = [{**one, "answer": str(one["answer"])} for one in ROWS] if name == "a.csv" else ROWS  # CSV cells are text
    assert list(rows(folder / name)) == wanted
    assert row(folder / name, 0) == wanted[0]
    assert row(str(folder / name), 1) == wanted[1]


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    assert list(rows(tmp_path / "a.parquet")) == ROWS


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert list(rows(tmp_path / "a.parquet")) == []


def test_floats_of_a_parquet_file_have_the_digits_that_were_written(tmp_path: Path) -> None:
    small = pa.array([0.1, 1e-20, 16777216.0, 3.3333333], pa.float32())
    large = pa.array([2.0**-20, 1e300, 1 / 3, 0.123456789012345], pa.float64())
    lists = pa.array([[0.1, None]] * 4, pa.list_(pa.float32()))
    pq.write_table(pa.table({"a": small, "b": large, "c": lists}), tmp_path / "a.parquet")
    assert row(tmp_path / "a.parquet", 0)["c"] == [0.1, None]
    assert [(one["a"], one["b"]) for one in rows(tmp_path / "a.parquet")] == [
        (0.1, 2.0**-20), (1e-20, 1e300), (16777216.0, 1 / 3), (3.3333333, 0.123456789012345),
    ]  # fmt: skip


def test_a_compressed_file_is_read_line_by_line(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in ROWS).encode()))
    assert list(rows(packed)) == ROWS
    packed.write_bytes(gzip.compress(b'{"n": 1}\nbad\n' * 9000)[:-20])
    with pytest.raises(OptionError, match=r"a\.jsonl\.gz can't be read"):
        list(read(packed))
    packed.write_bytes(b"no gzip")
    with pytest.raises(OptionError, match=r"a\.jsonl\.gz can't be read"):
        list(read(packed))


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


def test_lines_of_text_are_rows(folder: Path) -> None:
    assert list(rows(folder / "a.txt")) == [{"text": "first line"}, {"text": "second, é"}]


def test_suffixes_are_case_insensitive(folder: Path) -> None:
    assert row(folder / "A.JSONL", 0) == ROWS[0]


def test_rows_are_read_lazily(tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(5000)))
    assert next(rows(many)) == {"n": 0}
    assert row(many, 4999) == {"n": 4999}


@pytest.mark.parametrize("number", [2, 99])
def test_a_missing_row_is_rejected_by_number(folder: Path, number: int) -> None:
    with pytest.raises(OptionError, match=rf"a\.jsonl has no row {number}: rows are counted from 0"):
        row(folder / "a.jsonl", number)


@pytest.mark.parametrize("name", ["a.yaml", "a.tsv", "a", "jsonl"])
def test_an_unknown_format_is_rejected_with_the_known_ones(folder: Path, name: str) -> None:
    (folder / name).write_text("question: 1")
    with pytest.raises(
        OptionError, match=r"unknown kind of data set '.*: choose one of \.csv, \.json, \.jsonl, \.parq"
    ):
        row(folder / name, 0)


def test_a_missing_file_is_rejected_by_name(folder: Path) -> None:
    for name in ("absent.jsonl", ""):
        with pytest.raises(OptionError):
            row(folder / name, 0)
    with pytest.raises(OptionError, match=r"absent\.jsonl: there is no such file"):
        row(folder / "absent.jsonl", 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", b'{"question": '), ("x.json", b"no json"), ("x.parquet", b"PAR0"), ("x.csv", b"a,b\n1,2,3\n\xff")],
)
def test_a_damaged_file_is_a_one_line_error_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=rf"{name} can't be read: .+") as refused:
        row(tmp_path / name, 0)
    assert "\n" not in str(refused.value)


def test_a_real_data_set_has_questions_and_answers(data: Path) -> None:
    first = row(data / "gsm8k_test_0_400.jsonl", 0)
    assert first["question"].startswith("Janet")
    assert first["answer"].endswith("#### 18")


def test_a_bad_line_does_not_affect_other_lines(tmp_path: Path) -> None:
    good = json.dumps(ROWS[1], ensure_ascii=False).encode()
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf{}\n" + b"\n\xff\n" + b"[" * 100_000 + b"\n7\n" + good)
    records = dict(read(tmp_path / "x.jsonl"))
    assert list(records) == ["line 1", "line 3", "line 4", "line 5", "line 6"]
    assert (records["line 1"], records["line 6"]) == ({}, ROWS[1])
    for place in ("line 3", "line 4"):
        assert re.fullmatch(rf".*x\.jsonl can't be read: {place} is not JSON \(.+\)", str(records[place]))
    assert str(records["line 5"]).endswith("x.jsonl can't be read: line 5 is not a JSON object")


def test_rows_of_one_file_may_have_different_types(tmp_path: Path) -> None:
    mixed = [
        {"answer": 4},
        {"answer": "four"},
        {"question": ["x"]},
        {"answer": 2**70},
        {"answer": "2024-01-02"},
        {"answer": [1, "a"]},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in mixed))
    (tmp_path / "x.json").write_text(json.dumps(mixed))
    assert list(rows(tmp_path / "x.jsonl")) == list(rows(tmp_path / "x.json")) == mixed


@pytest.mark.parametrize(
    "cell", ["NA", "null", "None", "007", "3.10", "1e5", "true", "12345678901234567890123", "2024-01-02", "-0", "#N/A"]
)
def test_a_csv_cell_is_its_literal_text(tmp_path: Path, cell: str) -> None:
    (tmp_path / "x.csv").write_text(f"question,answer\nq,{cell}\nr,18\ns,\n")
    assert list(rows(tmp_path / "x.csv")) == [
        {"question": "q", "answer": cell},
        {"question": "r", "answer": "18"},
        {"question": "s"},
    ]


def test_a_csv_row_with_too_many_cells_is_rejected_by_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("question,answer\nHow many, please?,5\nq,6\nr,7,\n")
    records = dict(read(tmp_path / "x.csv"))
    assert "line 2 has 3 cells, and the header 2" in str(records["line 2"])
    assert records["line 3"] == {"question": "q", "answer": "6"}
    assert records["line 4"] == {"question": "r", "answer": "7"}
    with pytest.raises(OptionError, match="line 2 has 3 cells"):
        row(tmp_path / "x.csv", 0)
    assert row(tmp_path / "x.csv", 1) == {"question": "q", "answer": "6"}


@pytest.mark.parametrize(
    ("name", "text", "records"),
    [
        ("x.csv", "question\nq\n", {"question": "q"}),
        ("x.txt", "q\n", {"text": "q"}),
        ("x.json", '[{"question": "q"}]', {"question": "q"}),
        ("x.json", '{"question": "q"}\n{"question": "r"}\n', {"question": "q"}),
        ("x.jsonl", '{"question": "q"}\n', {"question": "q"}),
    ],
)
def test_a_byte_order_mark_is_not_part_of_a_row(tmp_path: Path, name: str, text: str, records: dict[str, str]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert row(tmp_path / name, 0) == records


def test_blank_lines_of_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\u2028b\n\n \r\nc\r\n", encoding="utf-8", newline="")
    assert dict(read(tmp_path / "x.txt")) == {"line 1": {"text": "a\u2028b"}, "line 4": {"text": "c"}}


def test_a_row_after_a_bad_line_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "q0"}\n{"question": broken\n{"question": "q2"}\n')
    assert row(tmp_path / "x.jsonl", 2) == {"question": "q2"}
    with pytest.raises(OptionError, match="line 2 is not JSON"):
        row(tmp_path / "x.jsonl", 1)


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("org/name:test", ("org/name", None)),
        ("org/name.v2:main:test", ("org/name.v2", "main")),
    ],
)
def test_a_split_of_the_hub_is_streamed(
    monkeypatch: pytest.MonkeyPatch, source: str, arguments: tuple[str, str]
) -> None:
    calls = []

    def load(*arguments: str, **options: object) -> list[dict[str, object]]:
        calls.append((arguments, options))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("tot.evaluation.data._reach_hub", lambda source, name: None)
    assert list(read(source)) == [("row 1", ROWS[0]), ("row 2", ROWS[1])]
    assert calls == [(arguments, {"split": "test", "streaming": True})]


def test_a_data_set_missing_on_the_hub_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: str, **options: object) -> None:
        raise FileNotFoundError("no such\nrepository")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("tot.evaluation.data._reach_hub", lambda source, name: None)
    with pytest.raises(OptionError, match=r"^org/name:test can't be read: no such repository$"):
        list(rows("org/name:test"))
    with pytest.raises(OptionError, match=r"or a data set on the hub, as org/name:split"):
        list(rows("org/name"))


def test_a_missing_value_is_omitted_from_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": null}\n{"question": "r", "answer": NaN}\n')
    assert list(rows(tmp_path / "a.jsonl")) == [{"question": "q"}, {"question": "r"}]


def test_dates_and_decimals_of_a_parquet_file_are_text(tmp_path: Path) -> None:
    day, price = [datetime.date(2024, 1, 2)], [decimal.Decimal("3.10")]
    pq.write_table(pa.table({"day": day, "price": price, "days": [day], "n": [18]}), tmp_path / "a.parquet")
    assert list(rows(tmp_path / "a.parquet")) == [
        {"day": "2024-01-02", "price": "3.10", "days": ["2024-01-02"], "n": 18}
    ]


def test_a_lone_surrogate_in_a_row_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a \\ud835 b", "options": ["\\udc00"]}\n')
    assert list(rows(tmp_path / "a.jsonl")) == [{"question": "a ? b", "options": ["?"]}]


def test_a_bad_csv_row_is_named_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question, answer\n"two\nlines",1\n"x"y,2\n"open,3\nr,4\n')
    records = list(read(tmp_path / "a.csv"))
    assert records[0] == ("line 2", {"question": "two\nlines", "answer": "1"})
    assert [(place, str(bad).partition(": ")[2]) for place, bad in records[1:]] == [
        ("line 4", "line 4 is not CSV (',' expected after '\"')"),
        ("line 5", "line 5 is not CSV (unexpected end of data)"),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.txt"])
def test_a_file_that_is_not_utf_8_is_rejected_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("question,answer\nq,1\n".encode("utf-16"))
    with pytest.raises(OptionError, match=r"can't be read: 'utf-8' codec .*: save it as UTF-8"):
        list(rows(tmp_path / name))


def test_a_hub_out_of_reach_is_an_error_at_once_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(OptionError, match=r"org/name:test .* \(no network\): .* or give a local file with --data"):
        list(rows("org/name:test"))
