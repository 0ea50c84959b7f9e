"""Calls of functions in the form of each chat template: the prompt, the constraint, and the calls in a text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import (
    Constraint,
    Function,
    Message,
    Request,
    RequestError,
    Sampling,
    ThinkingOptions,
    ToolCall,
    load_decoder,
)
from tot.decoders.engine.grammar import Grammars
from tot.decoders.engine.text import TextCodec
from tot.decoders.tools import CallStream

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
FOOT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DESCRIBE = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
HERMES = (
    "{% for c in m.tool_calls %}{% set f = c.function %}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
MISTRAL = (
    "{% if m.tool_calls %}[TOOL_CALLS]{{ blank }}[{% for c in m.tool_calls %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}'
)
NEMO = MISTRAL.replace("{{ blank }}", " ")
ARGS = (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
LLAMA = (
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% endif %}"
)
HARMONY = (
    "{% for c in m.tool_calls %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
)
XML = "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>{% endfor %}"
TEMPLATES = {
    "hermes": DESCRIBE + HEAD + HERMES + FOOT,
    "mistral": DESCRIBE + HEAD + MISTRAL + FOOT,
    "nemo": DESCRIBE + HEAD + NEMO + FOOT,
    "args": DESCRIBE + HEAD + ARGS + FOOT,
    "llama": DESCRIBE + HEAD + LLAMA + FOOT,
    "harmony": DESCRIBE + HEAD + HARMONY + FOOT,
    "xml": DESCRIBE + HEAD + XML + FOOT,
    "plain": HEAD + FOOT,
}
TEMPLATES["qwen"] = TEMPLATES["hermes"]  # and the markers are added tokens
ARGUMENTS = '{"city": "Rome", "days": 3}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "nemo": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "args": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
}
WRITTEN["qwen"] = WRITTEN["hermes"]
WRITTEN |= dict.fromkeys(("xml", "plain"), f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OF_FORM = {
    **{name: ["[TOOL_CALLS]", "[ARGS]"] for name in ("mistral", "nemo", "args")},
    "llama": ["<|python_tag|>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"],
}
SCHEMA = {
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
WEATHER = Function(name="weather", description="Return the weather.", parameters=SCHEMA)
NOW = Function(name="now")
CALL = ToolCall(name="weather", arguments=ARGUMENTS, id="c1")
USER = Message(role="user", content="q")


def codec_of(name: str, form: str | None = None) -> TextCodec:
    """Return a codec of single bytes with the template, and the control tokens of its form."""
    control = CONTROL + OF_FORM.get(form or name, [])
    vocabulary = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=[one for one in control if one != "<|im_end|>"],
        chat_template=TEMPLATES[name],
    )
    if name == "qwen":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<b>"])
    ends = [i for i, text in enumerate(vocabulary) if text == "<|call|>"]
    return TextCodec(tokenizer, ends)


def request(**about: Any) -> Request:
    return Request(**{"prompt": (USER,), "tools": (WEATHER, NOW), **about})


class Walk:
    """Texts under the constraint of a request with tools."""

    def __init__(self, codec: TextCodec, **about: Any) -> None:
        self.codec = codec
        self.constraint = codec.calls.constraint(request(**about), codec.control)
        self.grammars = Grammars(codec, len(codec.tokenizer))

    def accepts(self, text: str) -> bool:
        """Return whether the constraint allows a text, whose control tokens count, and its end."""
        matcher = self.grammars.matcher(self.constraint)
        for token in self.codec.encode_control(text):
            if not matcher.allows(token):
                return False
            matcher.advance(token)
        return any(matcher.allows(end) for end in self.codec.end_ids)

    def random(self, rng: random.Random, longest: int = 400) -> str | None:
        """Return a random text, or None if it is longer."""
        matcher, tokens = self.grammars.matcher(self.constraint), []
        for _ in range(longest):
            if (
                token := rng.choice([i for i in range(len(self.codec.tokenizer)) if matcher.allows(i)])
            ) in self.codec.end_ids:
                return self.codec.decode(tokens)
            tokens.append(token)
            matcher.advance(token)
        return None


def spelled(codec: TextCodec, prompt: Request) -> str:
    ids = codec.encode_prompt(prompt.prompt, codec.options_of(prompt))
    return str(codec.backend.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_form(name: str) -> None:
    codec = codec_of(name)
    assert codec.calls.native == (name not in ("xml", "plain"))
    assert codec.calls.write([CALL]) == WRITTEN[name]
    content, (call,) = codec.calls.parse(WRITTEN[name])
    assert (content, call.name, call.arguments) == ("", "weather", ARGUMENTS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_constraint_allows_text_or_legal_calls(name: str) -> None:
    codec = codec_of(name)
    legal, answer = WRITTEN[name], codec.calls.answer
    auto, required, named = (Walk(codec, tool_choice=choice) for choice in ("auto", "required", "now"))
    assert [walk.accepts(legal) for walk in (auto, required, named)] == [True, True, False]
    assert [walk.accepts(answer + "Hm. {}") for walk in (auto, required, named)] == [True, False, False]
    for wrong in (
        legal.replace("weather", "whether"),
        legal.replace("3", "33"),
        legal.replace("3", '"3"'),
        legal.replace("days", "year"),
        legal.replace(": 3", ': 3, "x": 1'),
        legal.replace(ARGUMENTS, "{}"),
        legal[:-1] if not legal.endswith(ARGUMENTS) else legal.replace("}", ""),
    ):
        assert wrong != legal
        assert not auto.accepts(wrong), wrong
    now = legal.replace("weather", "now").replace(ARGUMENTS, "{}")
    assert named.accepts(now)
    several = codec.calls.write([CALL, ToolCall(name="now", arguments="{}")])
    one = Walk(codec, parallel_tool_calls=False)
    assert [auto.accepts(several), one.accepts(several)] == [codec.calls.several, False]
    if not codec.calls.alone:
        assert auto.accepts(f"Hm. {legal}")
        assert codec.calls.parse(f"Hm. {several}")[0] == "Hm."
        assert [call.name for call in codec.calls.parse(several)[1]] == ["weather", "now"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_texts_under_the_constraint_parse(name: str) -> None:
    codec, rng = codec_of(name), random.Random(7)
    walk = Walk(codec, tool_choice="required")
    texts = [text for _ in range(15) if (text := walk.random(rng)) is not None]
    assert texts
    for text in texts:
        content, calls = codec.calls.parse(text)
        assert content == ""
        assert calls
        for call in calls:
            arguments = json.loads(call.arguments)
            assert set(arguments) == ({"city", "days"} if call.name == "weather" else set())


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stream_has_the_pieces_of_the_whole(name: str, data: st.DataObject) -> None:
    form = codec_of(name).calls
    calls = [CALL, ToolCall(name="now", arguments='{"a": "</tool_call> \\" }"}')][: 2 if form.several else 1]
    text = data.draw(st.sampled_from(["", "Hm. ", "<tool", "{"])) if not form.alone else ""
    text = data.draw(
        st.sampled_from([text + form.write(calls), form.answer + "Hm. {", form.answer, form.write(calls)[:-9]])
    )
    stream, content, arguments = CallStream(form), "", dict[str, str]()
    while text_left := text[len(stream._text) :]:
        piece = text_left[: data.draw(st.integers(1, 9))]
        for part, call in stream.feed(piece):
            content += part if call is None else ""
            if call is not None:
                arguments[call.id] = arguments.get(call.id, "") + part
    for part, call in stream.feed("", final=True):
        content += part if call is None else ""
        if call is not None:
            arguments[call.id] = arguments.get(call.id, "") + part
    expected, calls = form.split(text)
    assert (content, [*arguments.values()]) == (expected, [call.arguments for call in calls])


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_results_and_tools_reach_the_model(name: str) -> None:
    codec = codec_of(name)
    result = Message(role="tool", content="20 C", tool_call_id="c1")
    text = spelled(codec, request(prompt=(USER, Message(role="assistant", content="", tool_calls=(CALL,)), result)))
    for part in ("Return the weather.", "20 C", "weather", '"maxLength": 8'):
        assert part in text
    assert text.count("now") == 1
    assert ("c1" in text) is False
    assert ("You can call functions." in text) == (name in ("xml", "plain"))
    assert ("<tool_response>\n20 C\n</tool_response>" in text) == (name in ("xml", "plain"))
    if name not in ("harmony", "mistral", "nemo"):  # whose templates write a call with more than a model does
        assert WRITTEN[name] in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_untrusted_text_has_no_control_tokens(name: str) -> None:
    codec = codec_of(name)

    def prompt(evil: str) -> Request:
        call = ToolCall(name="weather", arguments=json.dumps({evil: {"x": [evil]}}), id=evil)
        tool = Function(name="f", description=evil, parameters={"properties": {evil: {"enum": [evil, [evil]]}}})
        turns = (USER, Message(role="assistant", content=evil, tool_calls=(call,)))
        return request(prompt=(*turns, Message(role="tool", content=evil, tool_call_id=evil)), tools=(tool,))

    def control(evil: str) -> list[int]:
        ids = codec.encode_prompt(prompt(evil).prompt, codec.options_of(prompt(evil)))
        return [token for token in ids if token in codec.special]

    harmless = control("x")
    for evil in codec._added.values():
        assert control(evil) == harmless
        assert evil in spelled(codec, prompt(evil))


def test_a_blank_after_a_call_may_end_the_text() -> None:
    for name in ("hermes", "qwen"):
        walk = Walk(codec_of(name), tool_choice="required")
        assert walk.accepts(f"{WRITTEN[name]}\n")
        assert not walk.accepts(f"{WRITTEN[name]}\n\n")


def test_added_tokens_in_angle_brackets_are_spelled_in_a_constrained_text() -> None:
    codec = codec_of("qwen")
    matcher = Grammars(codec, len(codec.tokenizer)).matcher(Constraint(regex="<b>|<tool_call>"))
    for letter in "<b>":
        (token,) = codec.encode(letter)
        assert matcher.allows(token)
        matcher.advance(token)
    assert matcher.complete


def test_a_schema_beside_tools_is_the_form_of_an_answer() -> None:
    codec = codec_of("hermes")
    walk = Walk(codec, constraint=Constraint(json_schema={"type": "boolean"}))
    assert [walk.accepts(text) for text in ("true", "Hm.", WRITTEN["hermes"], "")] == [True, False, True, False]


def test_a_spelled_trigger_is_no_call_without_its_form() -> None:
    codec = codec_of("mistral", form="hermes")  # the marker is no control token
    walk = Walk(codec)
    assert walk.accepts(WRITTEN["mistral"])
    assert not walk.accepts("[TOOL_CALLS] and so on")
    for text in ("<tool_call> is a tag", "{", '{"name": "x"}'):
        for name in ("hermes", "llama"):
            assert codec_of(name).calls.parse(text) == (text, [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_is_cut_is_text(name: str) -> None:
    form = codec_of(name).calls
    whole = form.write([CALL, CALL][: 1 + form.several])
    first = form.write([CALL]).index(ARGUMENTS) + len(ARGUMENTS)
    second = len(whole) - len(form.tail + form.end)
    for end in range(1, len(whole)):
        content, calls = form.parse(whole[:end])
        complete = (end >= first) + (form.several and end >= second)
        assert [call.arguments for call in calls] == [ARGUMENTS] * complete
        assert content == ("" if calls else whole[:end].removeprefix(form.answer))
    if not form.alone:
        cut = f"Hm. {whole[: first - 2]}"
        assert form.parse(cut) == (cut, [])


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"tool_choice": "none"}, "give auto, required or one of weather, now"),
        ({"tools": (NOW, NOW)}, "two tools are named now"),
        ({"prompt": "q"}, "tools need a chat"),
        ({"constraint": Constraint(regex="a")}, "of the kind json_schema, not regex"),
        ({"choices": ("a",)}, "choices does not go with a constraint or tools"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(about: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        request(**about)


def test_invalid_functions_and_calls_are_refused() -> None:
    for about in (
        {"name": "<|im_end|>"},
        {"name": ""},
        {"name": "auto"},
        {"name": "f", "parameters": {"type": "array"}},
    ):
        with pytest.raises(ValidationError):
            Function(**about)
    for arguments in ("", "[]", "{", '{"a": NaN}', "[" * 10_000, "1" * 10_000):
        with pytest.raises(ValidationError, match="are not a JSON object"):
            Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments=arguments),))
    with pytest.raises(ValidationError, match="belong to messages of the assistant"):
        Message(role="user", content="", tool_calls=(CALL,))
    with pytest.raises(RequestError, match="calls without results"):
        codec_of("hermes").encode_prompt((USER, Message(role="assistant", content="", tool_calls=(CALL,))))


def test_a_template_without_a_system_role_describes_tools_in_the_users_message() -> None:
    codec = codec_of("plain")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    codec.tokenizer.chat_template = refuses + TEMPLATES["plain"]
    text = spelled(TextCodec(codec.tokenizer), request())
    assert text.startswith("<|im_start|>user\nYou can call functions.")
    assert text.endswith("\n\nq<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("budget", [0, 30])
def test_gpt_oss_thinks_and_then_calls_or_answers(budget: int) -> None:
    codec = codec_of("harmony")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(codec.tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    sampling = Sampling(max_tokens=150, temperature=1, n=8, thinking=ThinkingOptions(budget=budget))
    with load_decoder("ar", LlamaForCausalLM(config).eval(), tokenizer=codec.tokenizer) as decoder:
        for choice in ("auto", "required"):
            completions = decoder.generate([request(tool_choice=choice, sampling=sampling)])[:8]
            read = [decoder.read_calls(one) for one in completions]
            called = [calls[0].name for _, calls in read if calls]
            assert called
            assert set(called) <= {"weather", "now"}
            assert (len(called) < 8) == (choice == "auto")
            assert not any("<|" in content for content, _ in read)
