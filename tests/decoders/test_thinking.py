"""Thinking is separated from the answer: by tags at the beginning of a text, and by control tokens during decoding."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken

from tot.decoders import Sampling
from tot.decoders.engine.output import Output
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.programs import ending
from tot.decoders.request import Message
from tot.decoders.thinking import find_thinking, left_open, split

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>Lyon? No.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
GPT_OSS = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>Lyon? No.</think>\nParis", "Lyon? No.", "Paris"),
        ("<thinking>Lyon? No.</thinking>Paris", "Lyon? No.", "Paris"),
        ("\n<seed:think>Lyon?</seed:think>Paris", "Lyon?", "Paris"),
        ("<reasoning>Lyon?</reasoning>\nParis", "Lyon?", "Paris"),
        ("[THINK]Lyon?[/THINK]Paris", "Lyon?", "Paris"),
        ("<|START_THINKING|>Lyon?<|END_THINKING|><|START_RESPONSE|>Paris<|END_RESPONSE|>", "Lyon?", "Paris"),
        ("<|channel>thought\nLyon?<channel|>Paris", "\nLyon?", "Paris"),
        ("Here is my thought process: Lyon?\nHere is my response: Paris", " Lyon?\n", "Paris"),
        ("<think>Lyon?</think><response>Paris</response>", "Lyon?", "Paris"),
        (ANALYSIS + FINAL + "Paris<|return|>", "Lyon? No.", "Paris"),
        (
            "<|channel|>commentary<|message|>Hm.<|end|>" + "<|start|>assistant" + ANALYSIS + FINAL + "P",
            "Hm.Lyon? No.",
            "P",
        ),
        (FINAL + "Paris", "", "Paris"),
        ("analysisLyon? No.assistantfinalParis", "Lyon? No.", "Paris"),
        ("<think>5</think>\n<think>6</think>\n7", "56", "7"),
        ("Lyon? No.\n</think>\n\nParis", "Lyon? No.\n", "Paris"),
        ("</think>Paris", "", "Paris"),
        # cut in the thinking, or in its tag
        ("<think>Lyon", "Lyon", ""),
        ("[THINK]Lyon", "Lyon", ""),
        (ANALYSIS, "Lyon? No.", ""),
        ("analysisWe try 7. No", "We try 7. No", ""),
        ("<thin", "<thin", ""),
        # tags that the answer is about
        ("<think>Easy.</think>The tag is </think>.", "Easy.", "The tag is </think>."),
        ("<think>Drop `</think>`?</think>Yes", "Drop `</think>`?", "Yes"),
        ("Use re.sub('<think>.*</think>', '', x).", "", "Use re.sub('<think>.*</think>', '', x)."),
        ("The tag is </think>.", "", "The tag is </think>."),
        ('Split at "</think>" first', "", 'Split at "</think>" first'),
        ("I <think> so", "", "I <think> so"),
        ("Paris<|end|>", "", "Paris<|end|>"),
        ("analysisResult = 5", "", "analysisResult = 5"),
        ("[1, 2]", "", "[1, 2]"),
        ("", "", ""),
    ],
)
def test_a_finished_text_is_split(text: str, thinking: str, answer: str) -> None:
    assert split(text) == (thinking, answer)


def test_thinking_that_the_prompt_opened_has_no_answer_before_its_closing_tag() -> None:
    assert split("Lyon? 7.", "</think>") == ("Lyon? 7.", "")
    assert split("Lyon?</think>7", "</think>") == ("Lyon?", "7")
    assert find_thinking("Lyon?", "[/THINK]").awaits == "[/THINK]"


@pytest.mark.parametrize(
    ("tail", "awaits"),
    [
        ("assistant\n<think>\n", "</think>"),
        ("assistant\n<think>\n\n</think>\n\n", ""),
        ("[/INST][THINK]", "[/THINK]"),
        ("<|start|>assistant", ""),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
    ],
)
def test_the_beginning_of_a_reply_tells_whether_the_template_opens_thinking(tail: str, awaits: str) -> None:
    assert left_open(tail) == awaits


# -- during decoding ----------------------------------------------------------------------------------------------


def made(tokenizer: Any, *control: str, template: str = "") -> TextCodec:
    """Return a codec with more control tokens, and a template that ends with `template`."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in control]})
    if template:
        other.chat_template = other.chat_template.replace("assistant\n", "assistant\n" + template)
    return TextCodec(other)


def read(codec: TextCodec, text: str, awaits: str | None = "", end: bool = True, **sampling: Any) -> Output:
    """Return the output of a text in which control tokens count."""
    fields = {"max_tokens": 200, **sampling}
    limits = fields["max_tokens"], fields.get("thinking", 0)
    output = Output(codec, Sampling(**fields), 0, limits[0], awaits, limits[1])
    ids = codec.backend.encode(text, add_special_tokens=False).ids
    shown: list[tuple[str, str]] = [("", "")]
    for token in ids:
        ended = output.add(Sampled(token, -0.5))
        shown.append((output.settled_thinking(), output.settled()))
        if ended:
            break
    if end:
        output.end("cancelled")
    final = output.completion(0.0)
    shown.append((output.settled_thinking(), output.text))
    unopened = "[/THINK]" in text and "[THINK]" not in text and awaits == ""
    for (thinking, text), (more_thinking, more_text) in pairwise(shown[: -1 if unopened else None]):
        assert more_thinking.startswith(thinking)
        assert more_text.startswith(text)
    assert sum(part.tokens for part in final.parts) == len(final.tokens)
    return output


def parts(output: Output) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in output.completion(0.0).parts]


@pytest.mark.parametrize("special", [True, False])
def test_tags_are_found_whether_they_are_control_tokens_or_text(tokenizer: Any, special: bool) -> None:
    codec = made(tokenizer, *(("[THINK]", "[/THINK]") if special else ()))
    output = read(codec, "[THINK]the sum[/THINK]\n\nParis")
    assert parts(output) == [("thinking", "the sum"), ("exact", "Paris")]
    completion = output.completion(0.0)
    assert (completion.text, completion.thinking, completion.lacks_answer) == ("Paris", "the sum", False)
    assert codec.decode(completion.tokens[completion.text_tokens]) == "Paris"
    assert codec.thinks is special


def test_a_message_of_thinking_ends_neither_the_reply_nor_its_answer(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": list(HARMONY), "eos_token": "<|return|>"})
    other.chat_template = GPT_OSS
    end = other.convert_tokens_to_ids("<|end|>")
    codec = TextCodec(other, end_ids=[end])  # as llama.cpp's list of names does
    assert (end in codec.end_ids, other.convert_tokens_to_ids("<|return|>") in codec.end_ids) == (False, True)
    output = read(codec, ANALYSIS + FINAL + "Paris<|return|>")
    assert (parts(output), output.finish_reason) == ([("thinking", "Lyon? No."), ("exact", "Paris")], "eos")
    cut = read(codec, ANALYSIS + "<|channel|>", end=False, max_tokens=len(codec.backend.encode(ANALYSIS).ids) + 1)
    assert (parts(cut), cut.finish_reason) == ([("thinking", "Lyon? No."), ("exact", "")], "length")
    for text in (ANALYSIS + FINAL + "Paris<|end|>more", "Paris<|end|>more"):
        output = read(codec, text)
        assert (output.text, output.finish_reason) == ("Paris", "eos")
    spelled = codec.decode(
        codec.encode_prompt((Message(role="user", content="q"), Message(role="assistant", content="a")))
    )
    assert spelled.endswith("<|start|>assistant<|channel|>final<|message|>a")


def test_stop_strings_have_no_effect_in_thinking(tokenizer: Any) -> None:
    codec = made(tokenizer)
    output = read(codec, "<think>a\n\nb</think>\n\n7\n\n8", stop=("\n\n", "<"))
    assert (parts(output), output.finish_reason) == ([("thinking", "a\n\nb"), ("exact", "7")], "stop")
    assert read(codec, "a < b", stop=("<",)).text == "a "


def test_thinking_that_the_template_opens_is_thinking(tokenizer: Any) -> None:
    codec = made(tokenizer, template="<think>\n")
    user = Message(role="user", content="Drop <think> here")
    assert codec.awaits((user,)) == "</think>"
    written = ((0, tuple(codec.encode("so"))),)
    assert codec.awaits((user, Message(role="assistant", content="so", written=written))) == "</think>"
    assert codec.awaits((user, Message(role="assistant", content="so</think>7", written=written))) is None
    answers = (user, Message(role="assistant", content="so"))  # not written by the model
    assert codec.awaits(answers) is None
    assert codec.decode(codec.encode_prompt(answers)).endswith("<think>\n</think>\n\nso")
    assert codec.awaits("q\n<think>\n") == "</think>"
    assert made(tokenizer).awaits((user,)) == ""
    output = read(codec, "It is \\boxed{7}", codec.awaits((user,)))
    assert (output.text, parts(output)) == ("", [("thinking", "It is \\boxed{7}"), ("exact", "")])
    assert output.completion(0.0).lacks_answer


def test_thinking_without_an_opening_tag_is_found_at_the_end_if_the_model_thinks(tokenizer: Any) -> None:
    thinker = made(tokenizer, "[THINK]", "[/THINK]")
    assert parts(read(thinker, "a. No.[/THINK]\nb")) == [("thinking", "a. No."), ("exact", "b")]
    assert parts(read(thinker, "a. No.[/THINK]\nb", None)) == [("exact", "a. No.[/THINK]\nb")]
    assert parts(read(thinker, "the sum")) == [("exact", "the sum")]


def test_thinking_and_the_answer_have_their_own_token_limits(tokenizer: Any) -> None:
    codec = made(tokenizer, "[THINK]", "[/THINK]")
    limits = {"max_tokens": 3, "thinking": 6}
    answered = read(codec, "[THINK]ab[/THINK]xyzxyz", end=False, **limits)
    assert (answered.text, answered.finish_reason, answered.room) == ("xyz", "length", 0)
    plain = read(codec, "xyzxyz", end=False, **limits)
    assert (plain.text, plain.finish_reason) == ("xyz", "length")
    lost = read(codec, "[THINK]xyzxyzxyzxyz", end=False, **limits)
    assert (lost.text, lost.finish_reason, len(lost.tokens)) == ("", "length", 6)
    shared = read(codec, "[THINK]ab[/THINK]xyzxyz", end=False, max_tokens=5)
    assert (shared.text, len(shared.tokens)) == ("xy", 5)
    cut = read(codec, "<thi", end=False, max_tokens=3)
    assert (cut.text, cut.completion(0.0).lacks_answer) == ("", True)


def test_a_piece_of_a_message_keeps_its_thinking(tokenizer: Any) -> None:
    codec = made(tokenizer, "[THINK]", "[/THINK]")
    piece = read(codec, "[THINK]ab\n\ncd", keep_stop=True, stop=("\n\n",))
    assert (piece.text, piece.finish_reason) == ("[THINK]ab\n\n", "stop")
    assert parts(piece) == [("thinking", "[THINK]ab\n\n"), ("exact", "")]
    whole = read(codec, "[THINK]ab[/THINK]cd", keep_stop=True, stop=("\n\n",))
    assert parts(whole) == [("thinking", "[THINK]ab[/THINK]"), ("exact", "cd")]
    last = Message(role="assistant", content="[THINK]ab\n\n", written=((0, tuple(piece.tokens)),))
    ids = codec.encode_prompt((Message(role="user", content="q"), last))
    assert ids[-len(piece.tokens) :] == piece.tokens
    ids = codec.encode_prompt((Message(role="user", content="[THINK]"), last))
    assert sum(codec.tags.get(i) == "[THINK]" for i in ids) == 1  # the user's tag is plain text


def test_a_text_ends_after_its_thinking(tokenizer: Any) -> None:
    codec = made(tokenizer)
    output = read(codec, "<think>a</think>It is so.", end=False)
    output.end("length")
    assert ending(codec, output.completion(0.0)) == (output.tokens, "", "")
    output = read(codec, "<think>a</think>It is so.\n", stop=("\n",))
    end = ending(codec, output.completion(0.0))
    assert codec.decode(end.tokens) + end.rest == "<think>a</think>It is so."
    assert end.cut == "\n"


# -- repetition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("x" * 2000, 256), ("no end, " * 300, 256), ("".join(chr(97 + i % 26) for i in range(2000)), 576)],
)
def test_a_text_that_repeats_the_same_tokens_without_end_is_cut(tokenizer: Any, text: str, tokens: int) -> None:
    codec = made(tokenizer)
    output = read(codec, text, end=False, max_tokens=3000)
    assert output.finish_reason == "repetition"
    assert tokens <= len(output.tokens) < tokens + 32
    assert text.startswith(output.text)
    assert read(codec, text, end=False, max_tokens=3000, ignore_eos=True).finish_reason is None


@pytest.mark.parametrize(
    "text",
    [
        "-" * 200,
        "| --- " * 12 + "|\n",
        ("0 " * 16 + "\n") * 16,
        "".join(f"{i}. the same\n" for i in range(200)),
        "<tr><td></td></tr>\n" * 10,
        "[0, 0, 0, 0, 0, 0, 0, 0, 0],\n" * 9,
        "".join(f"assert f({i}) == {i * i}\n" for i in range(100)),
    ],
)
def test_tables_lists_and_code_are_not_cut(tokenizer: Any, text: str) -> None:
    output = read(made(tokenizer), text, end=False, max_tokens=5000)
    assert (output.finish_reason, output.text) == (None, text)
