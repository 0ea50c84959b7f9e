"""The forms of calls that models write: their template's, or a list or bare JSON in its place."""

from __future__ import annotations

import json

import pytest

from tests.decoders.test_tools import ARGUMENTS, TEMPLATES, WEATHER, WRITTEN, Walk, codec_of, request
from tot.decoders import Message, Sampling, load_decoder
from tot.decoders.engine.text import TextCodec
from tot.decoders.tools import CallStream


@pytest.mark.real
def test_the_embedded_model_calls_a_function_in_every_lossless_decoder(smollm2: str) -> None:
    ask = Message(role="user", content="What is the weather in Paris?")  # language: ok
    asked = request(prompt=(ask,), tools=(WEATHER,), tool_choice="weather", sampling=Sampling(max_tokens=60))
    texts = {}
    with load_decoder("ar", smollm2) as decoder:
        for method in ("ar", "jacobi", "lookahead"):
            other = load_decoder(method, engine=decoder.engine)
            (completion,) = other.generate([asked])
            texts[method] = completion.text
        content, (call,) = decoder.read_calls(completion)
    assert len(set(texts.values())) == 1
    assert (content, call.name, json.loads(call.arguments)["city"]) == ("", "weather", "Paris")
    assert completion.finish_reason == "eos"
    assert completion.usage.forced_tokens > 5


BARE = [
    '{"name": "now", "arguments": {}}',
    '```json\n[\n  {"name": "now", "parameters": {}}\n]\n```',
    ' [{"name":"now","arguments":{}}]',
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", BARE)
def test_a_text_of_nothing_but_calls_has_calls_in_every_form(name: str, text: str) -> None:
    form = codec_of(name).calls
    content, (call,) = form.parse(text)
    assert (content, call.name, call.arguments) == ("", "now", "{}")
    stream = CallStream(form)
    pieces = [piece for letter in text for piece in stream.feed(letter)] + [*stream.feed("", final=True)]
    assert [(piece, call and call.name) for piece, call in pieces if piece] == [("{}", "now")]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now"}',
        '{"name": "now", "arguments": 3}',
        '{"name": "now", "age": {}}',
        'Use {"name": "now", "arguments": {}}',
        '```json\n{"name": "now", "arguments": {}}\n``` is a call',
        "```python\nprint()\n```",
        "",
    ],
)
def test_a_text_with_more_than_calls_is_text(text: str) -> None:
    for name in ("hermes", "mistral"):
        form = codec_of(name).calls
        assert form.parse(text) == (text, [])
        stream = CallStream(form)
        pieces = [piece for letter in text for piece, _ in stream.feed(letter)]
        assert "".join([*pieces, *(piece for piece, _ in stream.feed("", final=True))]) == text


@pytest.mark.parametrize(("reply", "native"), [("<tool_call>\n{", True), ('{"name": ', False)])
def test_one_reply_decides_whether_a_model_writes_the_form_of_its_template(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, reply: str, native: bool
) -> None:
    with load_decoder("ar", smollm2) as decoder:
        monkeypatch.setattr(decoder.tokenizer, "chat_template", TEMPLATES["hermes"])
        monkeypatch.setattr(decoder, "_begin_call", lambda: reply)
        decoder.engine.codec = TextCodec(decoder.tokenizer)
        asked = request(tool_choice="required", sampling=Sampling(max_tokens=100))
        (completion,) = decoder.generate([asked])
        assert decoder.calls.native == native
        assert completion.text.startswith("<tool_call>" if native else '[{"name": "')
        assert decoder.read_calls(completion)[1][0].name in ("weather", "now")


def test_a_model_that_does_not_write_its_templates_form_writes_a_list(
    smollm2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_decoder("ar", smollm2) as decoder:
        monkeypatch.setattr(decoder.tokenizer, "chat_template", TEMPLATES["args"])
        decoder.engine.codec = TextCodec(decoder.tokenizer)
        assert decoder.engine.codec.calls.native
        assert not decoder.calls.native
        assert decoder.engine.codec.calls is decoder.calls


@pytest.mark.parametrize("tagged", [False, True])
def test_llama_may_write_its_python_tag_before_a_call(tagged: bool) -> None:
    tag, legal = "<|python_tag|>", WRITTEN["llama"]
    codec = codec_of("llama")
    if tagged:  # the chat template writes the tag
        codec.tokenizer.chat_template = TEMPLATES["llama"].replace('{"name"', tag + '{"name"')
        codec = TextCodec(codec.tokenizer)
    assert codec.calls.native
    for choice, text in (("auto", True), ("required", False)):
        walk = Walk(codec, tool_choice=choice)
        assert [walk.accepts(one) for one in (tag + legal, legal, "Hm.", "<b>")] == [True, True, text, text]
        for wrong in (tag, f"{tag}weather.call(city='Rome')", tag + legal.replace("3", "33"), f"Hm. {tag}{legal}"):
            assert not walk.accepts(wrong)
    assert not Walk(codec_of("llama", form="hermes")).accepts(tag + legal)  # the tag is text
    content, (call,) = codec.calls.parse(codec.decode(codec.encode_control(tag + legal)))
    assert (content, call.arguments) == ("", ARGUMENTS)
    stream = CallStream(codec.calls)
    pieces = [piece for one in (tag, *legal) for piece in stream.feed(one)]
    assert "".join(text for text, call in pieces if call) == ARGUMENTS
    assert all(call for _, call in pieces)
