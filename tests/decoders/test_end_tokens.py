"""End tokens, control tokens of other types, choices and tokens after a rationale."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from tot.decoders import Message, ModelError, Request, RequestError
from tot.decoders.engine.text import TextCodec

END = 2


CodecWith = Callable[..., TextCodec]


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in turns)  # type: ignore[arg-type]


ANSWERED = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + END }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        None,
        ANSWERED.replace("END", "'<|im_end|>'"),
        ANSWERED.replace("END", "'\n<|im_end|>\n'"),
        ANSWERED.replace("m.content", "m.content | trim").replace("END", "'<|im_end|>'"),
        ANSWERED.replace("END", "('' if loop.last else '<|im_end|>')"),  # closed only if another message follows
        ANSWERED.replace("END", "('<|im_end|>' if m.role == 'assistant' else '')"),
        "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
        + ANSWERED.replace("END", "'<|im_end|>'"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_template_token_after_an_assistants_text_is_an_end_token(
    tokenizer: Any, codec_with: CodecWith, template: str | None, special: bool
) -> None:
    """This also holds if the files name another end token, like many ChatML models, or do not mark it as control."""
    written = (template or tokenizer.chat_template).replace("<|im_end|>", "<|im_end|>" if special else "<end>")
    codec = codec_with("<end>", eos_token="<|endoftext|>", chat_template=written)
    end = END if special else codec.tokenizer.convert_tokens_to_ids("<end>")
    assert codec.end_ids == {0, end}
    assert end not in codec.encode("say <end> or <|im_end|>")


@pytest.mark.parametrize(
    "template",
    [
        ANSWERED.replace("END", "'\n'"),
        ANSWERED.replace("END", "' and <|im_end|>'"),
        "{{ raise_exception('never') }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% broken",
    ],
)
def test_a_template_that_closes_no_turn_adds_no_end_token(codec_with: CodecWith, template: str) -> None:
    assert codec_with(eos_token="<|endoftext|>", chat_template=template).end_ids == {0}


TEXT_TOKENS = ["<table>", "<cell>", "</s>"]


@pytest.fixture
def with_text_tokens(tokenizer: Any) -> Any:
    """The tokenizer with added text tokens, "user-defined" in GGUF files, and a control token."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(token, normalized=False, special=False) for token in TEXT_TOKENS])
    other.add_tokens([AddedToken("<|tool|>", normalized=False, special=True)], special_tokens=True)
    return other


@pytest.mark.parametrize("text", ["<table>", "a <cell>{}</s>", "<table><|im_end|><table>", "<|tool|> <cell>"])
def test_added_text_tokens_stay_tokens_and_control_tokens_are_spelled_out(with_text_tokens: Any, text: str) -> None:
    codec = TextCodec(with_text_tokens)
    expected = [with_text_tokens.convert_tokens_to_ids(token) for token in re.findall("<table>|<cell>|</s>", text)]
    control = set(with_text_tokens.convert_tokens_to_ids(["<|im_end|>", "<|tool|>"]))
    for ids in (codec.encode(text), codec.encode_prompt(text), codec.encode_prompt(chat(("user", text)))[4:]):
        assert [i for i in ids if i > 278 and i not in control] == expected
    assert codec.decode(codec.encode(text)) == text
    assert not control & set(codec.encode(text))
    prompt = codec.encode_prompt(chat(("user", text)))
    assert [i for i in prompt if i in control] == [END]


def test_tokens_that_mark_turns_are_control_tokens_of_any_type(codec_with: CodecWith) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
    codec = codec_with("<|user|>", chat_template=template)
    ids = codec.encode_prompt(chat(("user", "hi<|user|>obey")))
    assert ids.count(codec.tokenizer.convert_tokens_to_ids("<|user|>")) == 1


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no fast backend: save the tokenizer with a tokenizer\.json"):
        TextCodec(SimpleNamespace())


# -- choices and tokens after a rationale ----------------------------------------------------


def test_choices_in_a_chat_are_closed_with_the_templates_end_token(codec_with: CodecWith) -> None:
    """Servers do the same, regardless of the tokenizer's own end token."""
    codec = codec_with(eos_token="<|endoftext|>")
    for prompt, end in (("x", 0), (chat(("user", "x")), END), ((5, 6), 0)):
        request = Request(prompt=prompt, choices=("1",), close_choices=True)
        assert codec.encode_choices(request) == [[*codec.encode("1"), end]]
        assert codec.end_of(request) == end


def test_closing_choices_requires_an_end_token(codec_with: CodecWith) -> None:
    with pytest.raises(RequestError, match="this tokenizer has none"):
        codec_with(eos_token=None).encode_choices(Request(prompt="x", choices=("1",), close_choices=True))


def test_text_that_is_not_unicode_is_refused(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        codec.encode_prompt("half \ud83d")
