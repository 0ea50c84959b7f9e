"""Thinking with a budget: texts of eight template families end in an answer wherever their thinking is cut."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken

from tot.decoders import Completion, Constraint, Message, Request, Sampling
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.grammar import Grammars, Matcher
from tot.decoders.engine.output import Output
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import ThinkingPiece
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.programs import Sample
from tot.decoders.methods.thinking import TRIGGER, WAIT, think_then_answer
from tot.decoders.thinking import closings

START = "<|im_start|>assistant\n"


class Family(NamedTuple):
    """The form of a family's template and texts."""

    reply: str
    """The beginning of a reply in the template, after the role."""
    opening: str
    """The tag that the model writes; empty if the template writes it."""
    closing: str
    control: tuple[str, ...] = ()


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
COMMAND = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
FAMILIES = {
    "qwen3": Family(
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
        "<think>\n",
        "\n</think>\n\n",
    ),
    "r1": Family("<think>\n", "", "\n</think>\n\n"),
    "magistral": Family("", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "gpt-oss": Family(
        "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        HARMONY,
    ),
    "seed-oss": Family("{% if thinking_budget %}{# <seed:think> #}{% endif %}", "<seed:think>", "</seed:think>\n\n"),
    "granite": Family("{% if thinking %}{# <think> #}{% endif %}", "<think>", "</think><response>"),
    "command-a": Family("", COMMAND[0], COMMAND[1] + COMMAND[2], COMMAND),
    "gemma4": Family("", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
}
USER = (Message(role="user", content="Is 7 <think> prime</think>?"),)


def codec_of(tokenizer: Any, family: Family) -> TextCodec:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in family.control]})
    other.chat_template = other.chat_template.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n'") + ""
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}" + START.replace("\n", "{{ '\\n' }}") + family.reply + "{% endif %}"
    )
    return TextCodec(other)


class Script:
    """A model that writes a text, and its answer after any other end of the thinking."""

    def __init__(self, codec: TextCodec, family: Family, thinking: str, answer: str) -> None:
        self.codec, self.family = codec, family
        self.thinking, self.answer = thinking, answer
        self.end = int(codec.tokenizer.eos_token_id)
        self.whole = [*codec.encode_control(family.opening + thinking + family.closing + answer), self.end]
        self.tried: Callable[[str], str] = lambda thinking: answer
        """The text of a try after some thinking."""
        self.calls: list[Sampling] = []
        self.constrained: list[str] = []
        """The prompts of calls with a constraint."""
        self.matcher: Matcher | None = None

    def next(self, written: list[int]) -> int:
        if written == self.whole[: len(written)]:
            token = self.whole[len(written)]
            if self.matcher is None or self.matcher.allows(token):
                return token
        text = self.codec.decode(written)
        mark = max((*closings(), "<|message|>"), key=text.rfind)
        thinking, _, rest = text.rpartition(mark)
        rest, answer = rest.lstrip("\n"), self.answer
        if rest.startswith(TRIGGER):
            rest, answer = rest.removeprefix(TRIGGER), self.tried(thinking)
        ids = self.codec.encode(answer)
        lengths = [len(self.codec.decode(ids[: i + 1])) for i in range(len(ids))]
        return next((i for i, length in zip(ids, lengths, strict=True) if length > len(rest)), self.end)

    def decode(self, messages: tuple[Message, ...] = USER, constraint: Any = None, **sampling: Any) -> Completion:
        """Decode a request as an engine with a context of 600 tokens does."""
        request = Request(prompt=messages, sampling=Sampling(**sampling), constraint=constraint)
        codec, options = self.codec, self.codec.options_of(request)
        cache, runner = SimpleNamespace(capacity=2000), SimpleNamespace(context=600)
        engine: Any = SimpleNamespace(codec=codec, runner=runner, cache=cache, wake=lambda: None)
        prompt, awaits = codec.encode_prompt(messages, options), codec.awaits(messages, options)
        begin = len(codec.encode_prompt(USER, options))
        limits = Engine.limits(engine, request, prompt)
        self.emitted: list[str] = []
        handle: Any = SimpleNamespace(
            request=request, prompt=prompt, engine=engine, awaits=awaits, limits=limits, policy=None, streams=True
        )
        handle.put = lambda index, text: self.emitted.append(text)
        program = think_then_answer(Sample(handle, 0))
        results: list[Completion] | None = None
        try:
            while True:
                calls = program.send(results) if results is not None else next(program)  # type: ignore[arg-type]
                results = [self._run(engine, call.request, begin) for call in calls]
        except StopIteration as end:
            completion: Completion = end.value
        return completion

    def _run(self, engine: Any, request: Request, prompt: int) -> Completion:
        sampling: Any = request.sampling
        self.calls.append(sampling)
        matcher = None
        if request.constraint is not None:
            matcher = Grammars(self.codec, len(self.codec.tokenizer)).matcher(request.constraint)
            self.constrained.append(self.codec.decode(request.prompt))  # type: ignore[arg-type]
        ids: Any = request.prompt
        limits = Engine.limits(engine, request, ids)
        output = Output(
            self.codec, sampling, 0, limits.text, self.codec.awaits(ids), limits.thinking, limits.total, matcher
        )
        self.matcher = matcher
        written = [*ids[prompt:], *output.force()]
        while output.finish_reason is None:
            written.append(self.next(written))
            output.add(Sampled(written[-1], -0.1))
            written += output.force()
        return output.completion(0.0)


def words(seed: int) -> str:
    rng = random.Random(seed)
    return "\n\n".join(
        " ".join(
            rng.choice(["7", "is", "<", "not", "2", "times", "so", "prime.", "wait", "`</think>`"]) for _ in range(9)
        )
        for _ in range(rng.randint(1, 5))
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_has_an_answer_wherever_its_thinking_is_cut(tokenizer: Any, name: str) -> None:
    family = FAMILIES[name]
    codec = codec_of(tokenizer, family)
    for seed in range(25):
        answer = f"It is {seed}."
        script = Script(codec, family, words(seed), answer)
        for thinking in (0, 1, 7, 40, 300, "counted=1"):
            completion = script.decode(thinking=thinking, max_tokens=200 if isinstance(thinking, str) else 30)
            assert completion.text == answer, (seed, thinking, completion.parts, completion.finish_reason)
            assert script.thinking.startswith(completion.thinking.strip("\n"))
            assert completion.finish_reason == "eos"
            assert sum(part.tokens for part in completion.parts) == len(completion.tokens)
            if isinstance(thinking, int):
                assert completion.parts[0].tokens <= max(thinking, len(codec.encode_control(family.opening))) or (
                    thinking == 300
                )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_constraint_begins_after_the_thinking(tokenizer: Any, name: str) -> None:
    family = FAMILIES[name]
    codec = codec_of(tokenizer, family)
    for seed in range(8):
        answer = f'{{"n": {seed}}}'
        script = Script(codec, family, words(seed), answer)
        for thinking in (0, 1, 7, 40, 300):
            constraint = Constraint(json_schema={"type": "object", "properties": {"n": {"type": "integer"}}})
            completion = script.decode(thinking=thinking, max_tokens=30, constraint=constraint)
            assert (completion.text, completion.finish_reason) == (answer, "eos"), (seed, thinking, completion.parts)
            assert script.thinking.startswith(completion.thinking.strip("\n"))
            assert 0 < completion.usage.masked_tokens + completion.usage.forced_tokens <= len(completion.tokens)
            prompt = script.constrained.pop()
            ends = ("</think>", "[/THINK]", COMMAND[1], "</seed:think>", "<channel|>", "final<|message|>")
            assert prompt.rstrip("\n").endswith(ends)
            assert not script.constrained


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_text_without_thinking_is_constrained_from_its_start(tokenizer: Any, name: str) -> None:
    codec = codec_of(tokenizer, FAMILIES[name])
    direct = Family("", FAMILIES[name].closing.partition("<|start|>assistant")[2], "")
    script = Script(codec, direct, "", "It is 5.")
    completion = script.decode(max_tokens=30, constraint=Constraint(regex="It is [0-9]\\."))
    assert (completion.text, completion.thinking) == ("It is 5.", "")
    assert script.constrained.pop().endswith("<|channel|>final<|message|>" if name == "gpt-oss" else "assistant\n")


SWITCHES = [
    ("qwen3", "off", "<think>\n\n</think>\n\n"),
    ("qwen3", "low", ""),
    ("gpt-oss", "low", "(low)"),
    ("gpt-oss", 3000, "(medium)"),
    ("gpt-oss", "high", "(high)"),
    ("gpt-oss", "auto", ""),
    ("r1", "high", "<think>\n"),
]


@pytest.mark.parametrize(("name", "thinking", "begins"), SWITCHES)
def test_the_amount_of_thinking_sets_the_switch_of_the_template(
    tokenizer: Any, name: str, thinking: Any, begins: str
) -> None:
    codec = codec_of(tokenizer, FAMILIES[name])
    request = Request(prompt=USER, sampling=Sampling(thinking=thinking))
    text = codec.backend.decode(codec.encode_prompt(USER, codec.options_of(request)), skip_special_tokens=False)
    assert text.rpartition(START)[2] == begins
    assert codec.awaits(USER, codec.options_of(request)) == ("</think>" if name == "r1" else "")


def test_options_of_a_template_override_its_switch_and_have_no_reserved_names(tokenizer: Any) -> None:
    codec = codec_of(tokenizer, FAMILIES["qwen3"])
    request = Request(prompt=USER, sampling=Sampling(thinking="off"), template_options={"enable_thinking": True})
    assert codec.options_of(request) == {"enable_thinking": True}
    with pytest.raises(ValidationError, match="'messages' is set by the decoder"):
        Request(prompt=USER, template_options={"messages": []})


def test_a_switch_without_effect_is_reported_once(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    codec = TextCodec(copy.deepcopy(tokenizer))
    sampling, options = Sampling(thinking="low"), {"enable_thinking": True}
    for _ in range(2):
        codec.options_of(Request(prompt=USER, sampling=sampling, template_options=options))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the model does not think, so thinking has no effect (think_tags names unusual tags)",
        "the chat template does not read 'enable_thinking'",
    ]


def test_tags_of_ones_own_mark_thinking(tokenizer: Any) -> None:
    codec = TextCodec(copy.deepcopy(tokenizer), think_tags=("<ponder>", "</ponder>"))
    family = Family("", "<ponder>", "</ponder>")
    script = Script(codec, family, "7 is odd.", "Yes.")
    completion = script.decode(thinking=100)
    assert (completion.thinking, completion.text) == ("7 is odd.", "Yes.")


PARAGRAPHS = "7 is odd.\n\n7 is not 9.\n\nSo 7 is prime.\n\nWait.\n\nIt is.\n\nSure."


@pytest.mark.parametrize("name", FAMILIES)
def test_settled_thinking_is_closed(tokenizer: Any, name: str) -> None:
    script = Script(codec_of(tokenizer, FAMILIES[name]), FAMILIES[name], PARAGRAPHS, "Yes.")
    script.tried = lambda thinking: "Yes." if "prime" in thinking else f"No {len(thinking)}"
    whole = script.decode(thinking=500)
    assert (whole.thinking.strip(), whole.text) == (PARAGRAPHS, "Yes.")
    settled = script.decode(thinking="500,settle=0.5")
    assert settled.text == f"{TRIGGER}Yes."
    assert settled.thinking.strip() == PARAGRAPHS.removesuffix("\n\nIt is.\n\nSure.")  # two tries agree after "Wait."
    assert [part.kind for part in settled.parts] == ["thinking", "closing", "trigger", "exact"]
    unsure = script.decode(thinking={"budget": 500, "settle": 0.99})  # each token has a probability of 0.9
    assert (unsure.thinking.strip(), unsure.text) == (PARAGRAPHS, "Yes.")
    assert unsure.parts[-1].kind == "exact"
    assert script.decode(thinking="8,settle=0.5").text == "Yes."


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_a_message_close_the_thinking_at_its_budget(tokenizer: Any, name: str) -> None:
    script = Script(codec_of(tokenizer, FAMILIES[name]), FAMILIES[name], PARAGRAPHS, "Yes, it is.\n\nYes.")
    for budget in (0, 20, 500):
        text, written, drawn, pieces = "", list[tuple[int, tuple[int, ...]]](), 0, list[Completion]()
        while not pieces or pieces[-1].finish_reason != "eos":
            last = [Message(role="assistant", content=text, written=tuple(written))] if pieces else []
            limits: dict[str, Any] = {"keep_stop": True, "stop": ("\n\n",), "max_tokens": 60}
            piece = script.decode((*USER, *last), thinking=budget, drawn=drawn, **limits)
            written.append((len(text), piece.tokens))
            text, drawn = text + piece.text, drawn + len(piece.tokens)
            pieces.append(piece)
            assert len(pieces) < 20
        parts = [part for piece in pieces for part in piece.parts]
        opening = len(script.codec.encode_control(FAMILIES[name].opening)) or 1
        thinking = "".join(part.text for part in parts if part.kind in ("thinking", "closing"))
        assert text.removeprefix(thinking).strip() == script.answer
        assert ("closing" in {part.kind for part in parts}) == (budget < 500)
        assert sum(part.tokens for part in parts if part.kind == "thinking") <= max(budget, opening)


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_goes_on_after_the_word_wait(tokenizer: Any, name: str) -> None:
    script = Script(codec_of(tokenizer, FAMILIES[name]), FAMILIES[name], "7 is odd.", "Yes.")
    again = script.codec.encode_control(f" 7 is prime.{FAMILIES[name].closing}Yes.")
    begins = f"7 is odd.\n\n{WAIT}"
    following = script.next

    def next_token(written: list[int]) -> int:
        text = script.codec.decode(written)
        if text.endswith("Yes."):
            return script.end
        if begins not in text:
            return following(written)
        return again[len(script.codec.encode_control(text.partition(begins)[2]))]

    script.next = next_token  # type: ignore[method-assign]
    completion = script.decode(thinking="100,waits=1")
    assert (completion.thinking.strip(), completion.text) == (f"{begins} 7 is prime.", "Yes.")
    assert "".join(script.emitted).strip() == completion.thinking.strip()
    assert script.decode(thinking="100,waits=0").thinking.strip() == "7 is odd."


def test_a_hint_begins_the_answer_after_closed_thinking(tokenizer: Any) -> None:
    script = Script(codec_of(tokenizer, FAMILIES["r1"]), FAMILIES["r1"], PARAGRAPHS, "Yes.")
    completion = script.decode(thinking={"budget": 4, "hint": TRIGGER})
    assert completion.text == f"{TRIGGER}Yes."
    assert [part.kind for part in completion.parts] == ["thinking", "closing", "trigger", "exact"]
    assert script.decode(thinking={"budget": 400, "hint": TRIGGER}).text == "Yes."


@pytest.mark.parametrize("given", ["a lot", -1, True, "512,settled=1", "settle=2", {"budget": "none"}, "1,waits=99"])
def test_invalid_options_of_thinking_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="thinking"):
        Sampling(thinking=given)


def test_a_model_that_does_not_think_is_not_closed(tokenizer: Any) -> None:
    family = FAMILIES["qwen3"]._replace(opening="", closing="")
    script = Script(codec_of(tokenizer, FAMILIES["qwen3"]), family, "", "7 is prime, as 2, 3 and 5 do not divide it.")
    for settle in (0.0, 0.5):
        completion = script.decode(thinking=f"500,settle={settle}")
        assert completion.text == script.answer
        assert [part.kind for part in completion.parts] == ["exact"]


def test_each_sample_has_its_answer_and_is_the_same_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make("ar")
    template = decoder.tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(decoder.tokenizer, "chat_template", template)
    decoder.engine.codec = TextCodec(decoder.tokenizer)
    sampling = Sampling(temperature=1.0, max_tokens=12, thinking=20, seed=5, n=3)
    samples = decoder.generate([Request(prompt=USER, sampling=sampling)])
    for i, sample in enumerate(samples):
        kinds = [part.kind for part in sample.parts]
        assert kinds in (["thinking", "closing", "exact"], ["thinking", "exact"])
        assert 0 < len(sample.tokens) - sample.parts[0].tokens <= 12
        assert sample.text == sample.parts[-1].text
        (alone,) = decoder.generate([Request(prompt=USER, sampling=sampling.model_copy(update={"n": 1, "sample": i}))])
        assert (alone.tokens, alone.parts) == (sample.tokens, sample.parts)
    assert samples[0].usage.prompt_tokens > 0 == samples[1].usage.prompt_tokens
    handle = decoder.submit([Request(prompt=USER, sampling=sampling)], stream=True)[0]
    pieces = list(handle)
    for i, sample in enumerate(samples):
        assert (
            "".join(text for index, text in pieces if index == i and isinstance(text, ThinkingPiece)) == sample.thinking
        )
        assert (
            "".join(text for index, text in pieces if index == i and not isinstance(text, ThinkingPiece)) == sample.text
        )
