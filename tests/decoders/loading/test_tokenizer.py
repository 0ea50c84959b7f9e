"""Tokenizers and chat templates read without transformers give its tokens and texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ModelError
from tot.decoders.models.gguf_reader import read_gguf
from tot.decoders.models.gguf_tokenizer import build_tokenizer
from tot.decoders.models.loading import open_model
from tot.decoders.models.model_names import KNOWN_MODELS
from tot.decoders.models.tokenizer import Tokenizer

TEXTS = [
    *("hello  world", "a  5 and 12\n\n  3", "<|im_start|>user\nhe's 40 % <|im_end|>", "héllo ½ 東京 🙂", "", "   "),
    *("<think>hello<|tool|>", "<b>x</b> </s>", "\t\ttab\r\n x", "def f(x):\n    return  x\n", "x " * 500),
]
CHAT = [{"role": "user", "content": " Hi <b>&\n"}, {"role": "assistant", "content": "Yo"}]


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that two tokenizers agree on tokens, special tokens and chats."""
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert {str(token): token.special for token in ours.added_tokens_decoder.values()} == {
        str(token): token.special for token in theirs.added_tokens_decoder.values()
    }
    if ours.chat_template is not None:
        for opens in (True, False):
            expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opens)
            assert ours.apply_chat_template(CHAT, add_generation_prompt=opens) == expected


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "place"))


def changed(place: Path, **settings: Any) -> Path:
    path = place / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return place


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token": {"__type": "AddedToken", "content": "<|tool|>", "lstrip": False, "special": True}},
        {"eos_token": "<|new|>", "unk_token": None},
        {"additional_special_tokens": ["<|im_start|>", "<|other|>"]},
        {"extra_special_tokens": {"image_token": "<image>"}, "chat_template": "{{ image_token }}{{ bos_token }}"},
        {"add_bos_token": True, "add_eos_token": True, "model_max_length": 5},
        {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]},
    ],
    ids=str,
)
def test_a_folders_tokenizer_equals_that_of_transformers(place: Path, settings: dict[str, Any]) -> None:
    if "chat_template" in settings:
        (place / "chat_template.jinja").unlink()
    changed(place, **settings)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(place)
    ours = Tokenizer.read(place)
    if isinstance(theirs.chat_template, dict):
        theirs.chat_template = theirs.chat_template["default"]
    assert_same(ours, theirs)


def test_settings_of_training_in_a_tokenizer_file_do_not_cut_or_fill_texts(place: Path) -> None:
    backend = Backend.from_file(str(place / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(place / "tokenizer.json"))
    codec = TextCodec(Tokenizer.read(place))
    assert codec.decode(codec.encode("hello hello hello hello")) == "hello hello hello hello"
    assert len(codec.encode("x")) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_saved_tokenizer_is_read_by_transformers(family: str, tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", family, **({"pre": "qwen2"} if family != "llama" else {}))
    ours = build_tokenizer(read_gguf(made.path).metadata)
    ours.save_pretrained(tmp_path / "saved")
    assert_same(ours, AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert_same(Tokenizer.read(tmp_path / "saved"), ours)


@pytest.mark.real
def test_the_embedded_models_tokenizer_equals_that_of_transformers(smollm: Any, smollm2: str, tmp_path: Path) -> None:
    smollm.tokenizer.save_pretrained(tmp_path)
    assert_same(smollm.tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path))
    path = KNOWN_MODELS[smollm2].gguf()
    assert path is not None
    file: Any = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    assert file.get_vocab() == smollm.tokenizer.get_vocab()


def test_a_folder_without_a_tokenizer_file_is_converted_by_transformers(place: Path) -> None:
    content = json.loads((place / "tokenizer.json").read_text())
    (place / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (place / "merges.txt").write_text("\n".join(content["model"]["merges"]))
    (place / "tokenizer.json").unlink()
    changed(place, tokenizer_class="GPT2Tokenizer", unk_token="<|endoftext|>")
    loaded = open_model(place)
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)
    assert TextCodec(loaded.tokenizer).encode("hello") == [content["model"]["vocab"]["hello"]]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        (
            "tokenizer.json",
            ["", "{}", '{"model": 5}', "[1]", '{"version": "1.0", "added_tokens": [7]}'],
            r"tokenizer\.json can't be read \(.+\): download it again",
        ),
        ("tokenizer_config.json", ["[", "[1]"], r"can't be loaded \(.+\): download it or save it again"),
        ("special_tokens_map.json", ["[", "[1]"], r"can't be loaded \(.+\): download it or save it again"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    place: Path, one_line: Callable[..., str], name: str, contents: list[str], message: str
) -> None:
    for content in contents:
        (place / name).write_text(content)
        with pytest.raises(ModelError, match=message) as error:
            Engine(open_model(place), 100)
        one_line(error)


# -- chat templates ----------------------------------------------------------------------------------------------


def render(template: str, **settings: Any) -> str:
    backend = Backend.from_str(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    ours = Tokenizer(backend, {"chat_template": template, **settings})
    return ours.apply_chat_template(CHAT, add_generation_prompt=True)


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content }}\n  {% endif %}\n{% endfor %}\nend",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools is defined }}{{ documents == None }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% generation %}{% set x = 5 %}inner {{ messages[0].content }}{% endgeneration %}{{ x is defined }}",
    "{{ dict(a=1) }}{{ messages[0].content.strip() }}{{ messages[1]['content'][::-1] }}{{ pad_token is defined }}",
    "{%- macro turn(m) -%}[{{ m.role | upper }}]{%- endmacro -%}{{ turn(messages[0]) }}{{ strftime_now('%y')[2:] }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template: str, tokenizer: PreTrainedTokenizerFast) -> None:
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()} | {"bos_token": "<B>"}
    expected = tokenizer.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True, bos_token="<B>"
    )
    assert render(template, **named) == expected


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no system role') }}", TemplateError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", SecurityError),
        ("{{ namespace(__class__=1) }}", SecurityError),
        ("{{ dict.mro() }}", TemplateError),
        ("{% broken", TemplateError),
    ],
)
def test_templates_cannot_leave_the_sandbox(template: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        render(template)


def test_a_tokenizer_without_a_template_says_so() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        render(None)  # type: ignore[arg-type]
