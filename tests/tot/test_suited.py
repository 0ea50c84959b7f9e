"""The default prompt style of a task: it depends on the model, the search and the decoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import Model, SearchConfig, evaluate, solve
from tot.decoders import LocalDecoder, OptionError, load_decoder
from tot.decoders.models.model_names import has_chat_template, warn_of_no_template
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.evaluation.config import read_yaml
from tot.llm.decoders import _warn_of_few_shot
from tot.tasks import GSM8K, MultipleChoice


def prompts(task: Any = GSM8K, **options: Any) -> str:
    return SearchConfig.of(None, options).suited(task).prompts.kind


def test_a_model_with_a_chat_template_gets_chat_prompts(tiny: Any, monkeypatch: Any) -> None:
    with tiny() as decoder:
        assert prompts(decoder=decoder) == prompts(decoder={"generate": decoder}) == "chat"
        assert prompts(decoder=decoder, prompts="papers") == "papers"
        assert prompts(model=decoder.model, tokenizer=decoder.tokenizer) == "chat"
        monkeypatch.setattr(decoder.tokenizer, "chat_template", None)
        assert prompts(decoder=decoder) == "papers"
        assert prompts(decoder=decoder, prompts="chat") == "chat"
        assert prompts(model=decoder.model, tokenizer=decoder.tokenizer) == "papers"


def test_a_model_without_a_chat_template_gets_few_shot_prompts_with_one_warning(
    tiny: Any, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base.gguf"
    base.write_bytes(b"GGUF and no template")
    with tiny() as decoder:
        monkeypatch.setattr(decoder.tokenizer, "chat_template", None)
        object_given = {"model": decoder.model, "tokenizer": decoder.tokenizer}
        for options in ({"model": base}, {"decoder": decoder}, object_given):
            warn_of_no_template.cache_clear()
            caplog.clear()
            assert prompts(**options, prompts="chat") == "chat"
            assert prompts(**options, prompts="papers") == prompts(**options, search="rap") == "papers"
            assert not caplog.messages
            assert prompts(**options) == prompts(**options) == "papers"
            (message,) = caplog.messages
            assert message.startswith(
                "the model has no chat template: messages become one text without their roles, and"
            )
            assert "few-shot prompts, by default in many calls (search='cot' makes one)" in message


def test_a_server_gets_chat_prompts() -> None:
    where = {"base_url": "http://127.0.0.1:1/v1"}
    assert prompts(model=Model("m", "openai", where)) == "chat"
    with RemoteDecoder("m", RemoteOptions(**where)) as decoder:
        assert prompts(decoder=decoder) == "chat"


def test_decoders_and_searches_that_need_marked_texts_get_the_papers_prompts(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny() as decoder, load_decoder("pdos", engine=decoder.engine) as needing:
        model: dict[str, Any] = {"model": decoder.model, "tokenizer": decoder.tokenizer}
        named: dict[str, Any] = {"decoder": {"evaluate": "pdos"}, **model}
        for options in ({"decoder": needing}, {"decoder": {"generate": decoder, "evaluate": needing}}, named):
            _warn_of_few_shot.cache_clear()
            caplog.clear()
            assert prompts(**options, prompts="papers") == "papers"
            assert prompts(**options, prompts="chat") == "chat"
            assert not caplog.messages
            assert prompts(**options) == prompts(**options) == "papers"
            (message,) = caplog.messages
            assert message.startswith("decoder pdos needs few-shot prompts, which replace the model's chat")
        assert prompts(search="rap", **model) == "papers"
        assert prompts(search="mcts", **model) == "chat"


def test_fastcot_uses_chat_prompts_and_cuts_their_whole_solutions(tiny: Any) -> None:
    with tiny() as plain, load_decoder("fastcot", engine=plain.engine, cap=3) as cutting:
        assert prompts(decoder=cutting) == "chat"
        asked: dict[str, Any] = {"search": "cot", "max_tokens": 20}
        for task, question in ((GSM8K, "What is 1 + 1?"), (MultipleChoice, "Which?\nA) this\nB) that")):
            cut, whole = (solve(task, question, decoder=one, **asked) for one in (cutting, plain))
            assert cut.usage.undecoded_tokens > 0
            assert task.triggers["chain"] in cut.tree[1].thought.text
            assert whole.usage.undecoded_tokens == 0
            assert task.triggers["chain"] not in whole.tree[1].thought.text  # the model announces the answer itself


def named(key: bytes, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value


@pytest.mark.parametrize(
    ("content", "chats"),
    [
        (b"", False),
        (b"G", False),
        (b"GGUF" + named(b"tokenizer.chat_template", b"{{ messages }}"), True),
        (b"GGUF" + named(b"tokenizer.chat_template", b""), False),
        (b"GGUF" + named(b"tokenizer.chat_template.tool_use", b"{{ tools }}"), False),
        (b"GGUF" + named(b"general.name", b"tokenizer.chat_template"), False),
        (b"GGUF" + named(b"tokenizer.chat_template", b"")[:-3], False),
        (b"GGUF" + named(b"tokenizer.chat_template", b"")[:-8] + b"\xff" * 8, False),
    ],
)
def test_gguf_metadata_determines_the_prompt_style(tmp_path: Path, content: bytes, chats: bool) -> None:
    """Empty and truncated files, and other mentions of chat templates, count as no template."""
    (tmp_path / "any.gguf").write_bytes(content)
    assert has_chat_template(tmp_path / "any.gguf") == chats


def test_an_evaluation_records_its_prompt_style(tiny: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    common: dict[str, Any] = {"search": "cot", "max_tokens": 4, "out": tmp_path / "out"}

    def run(decoder: LocalDecoder, **options: Any) -> None:
        evaluate(GSM8K, rows, decoder=decoder, **common, **options)

    with tiny() as decoder:
        run(decoder)
        config = tmp_path / "out" / "config.yaml"
        written = yaml.safe_load(config.read_text())
        assert written["prompts"] == read_yaml(config)["prompts"] == "chat"
        with pytest.raises(OptionError, match="prompts was chat, now papers"):
            run(decoder, resume=True, prompts="papers")
        run(decoder, resume=True)
