"""A search by pieces of a model's own answer: each piece continues the exact sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Sample, Solution, Task, ThoughtTree, solve
from tot.decoders import LocalDecoder, Message, Request, Sampling, load_decoder
from tot.llm.prefix import as_written
from tot.tree.thought import SampledText, State, Thought


class Pieces(Task):
    """A task of one assistant message, with six tokens per thought."""

    name = "pieces"
    depth = 4
    templates: ClassVar = {
        "thought": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}So:{% for t in thoughts %}{{ t.thought }}{% endfor %}{% endblock %}",
        "answer": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}So:{% for t in thoughts %}{{ t.thought }}{% endfor %} #{% endblock %}",
    }
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {"thought": {"max_tokens": 6}}

    def parse_thought(self, template: str, text: str) -> str | None:
        return text or None


class Watched:
    """A decoder that records the token ids of prompts and texts."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self._decoder = decoder
        self.generated: list[tuple[list[int], tuple[int, ...]]] = []
        self.answered: list[list[int]] = []

    def generate(self, requests: Sequence[Request]) -> Any:
        completions = self._decoder.generate(requests)
        samples = iter(completions)
        for request in requests:
            ids = self._decoder.engine.codec.encode_prompt(request.prompt)
            if request.purpose == "answer":
                self.answered.append(ids)
            self.generated += [(ids, next(samples).tokens) for _ in range(request.sampling.n)]
        return completions


@pytest.fixture
def watched(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Watched]:
    with load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
        yield Watched(decoder)


def test_each_piece_continues_the_sampled_tokens(watched: Watched) -> None:
    search = BFS(thoughts=3, breadth=3)
    tree = solve(
        Pieces(), "Why?", decoder=watched, search=search, generator=Sample(temperature=1.0), evaluator="random"
    ).tree
    codec = watched._decoder.engine.codec
    known = {(*ids, *(token for token in tokens if token not in codec.end_ids)) for ids, tokens in watched.generated}
    first = min(watched.generated, key=lambda one: len(one[0]))[0]
    later = [ids for ids, _ in watched.generated if len(ids) > len(first)]
    later = [ids for ids in later if "\ufffd" not in codec.decode(ids)]  # a split character has lost its bytes
    assert all(tuple(ids) in known for ids in later if ids not in watched.answered)
    assert len(later) > 6
    (answered,) = watched.answered
    assert any(tuple(answered[: len(one)]) == one for one in known if len(one) > len(first) + 10)
    encoded_again = [codec.encode_prompt(codec.decode(ids)) for ids in later]
    assert any(len(ids) != len(again) for ids, again in zip(later, encoded_again, strict=True))  # not the tokenizer's
    read = ThoughtTree.from_json(tree.to_json())
    assert [node.thought and node.thought.drawn for node in read] == [
        node.thought and node.thought.drawn for node in tree
    ]


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("So: one\n\ntwo", ((4, (1, 2)), (9, (3,)))),
        ("So: two", ((4, (3,)),)),
        ("one, So: one", ((0, (1, 2)),)),
        ("nothing of it", ()),
    ],
)
def test_thoughts_are_found_at_their_place_in_the_prompt(content: str, written: Any) -> None:
    thoughts = [
        Thought(parts={"a": "one"}, drawn={"a": SampledText(text="one\n\n", tokens=(1, 2))}),
        Thought(parts={"a": "two"}, drawn={"a": SampledText(text="two", tokens=(3,))}),
        Thought(parts={"a": "unknown"}),
    ]
    (message,) = as_written((Message(role="assistant", content=content),), thoughts)
    assert message.written == written


def test_a_thought_from_mid_text_is_found_with_its_leading_whitespace() -> None:
    thought = Thought(parts={"a": "one"}, drawn={"a": SampledText(text=" one", tokens=(7,))})
    for content, begin in (("So: one", 3), ("So:one", None)):
        (message,) = as_written((Message(role="assistant", content=content),), [thought])
        assert message.written == (() if begin is None else ((begin, (7,)),))


def test_thoughts_with_the_same_parts_are_equal() -> None:
    drawn = Thought(parts={"a": "x"}, drawn={"a": SampledText(text="x", tokens=(1,))})
    assert drawn == Thought(parts={"a": "x"})
    assert drawn != Thought(parts={"a": "y"})
    assert State(question="q", thoughts=(drawn,)).text == "x"


ENDS = [("stop", "e"), ("stop", " ", "o"), ("length", 5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ar", "sd", "mcsd", "seed", "jacobi", "lookahead"])
def test_pieces_with_any_end_join_to_the_whole_text(
    name: str, temperature: float, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    user = Message(role="user", content="Why?")
    plain = Sampling(temperature=temperature, seed=5, max_tokens=60)
    with load_decoder(name, make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
        (whole,) = decoder.generate([Request(prompt=(user,), sampling=plain)])
        cuts = 0
        for kind, *about in ENDS:
            tokens: list[int] = []
            text, written, logprobs = "", [], []
            while len(tokens) < len(whole.tokens):
                prompt = (user, Message(role="assistant", content=text, written=tuple(written))) if text else (user,)
                left = len(whole.tokens) - len(tokens)
                cut = {"stop": tuple(about)} if kind == "stop" else {"max_tokens": min(left, about[0] + 1)}
                sampling = plain.model_copy(update={"max_tokens": left, "keep_stop": True, "drawn": len(tokens)} | cut)
                (piece,) = decoder.generate([Request(prompt=prompt, sampling=sampling)])
                assert piece.text.strip() or piece.finish_reason == "eos"
                assert piece.text or kind == "length"
                assert piece.tokens
                written.append((len(text), piece.tokens))
                text += piece.text
                tokens += piece.tokens
                logprobs += piece.logprobs
                cuts += 1
            assert tuple(tokens) == whole.tokens
            assert text == whole.text
            assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert cuts > 3 * len(ENDS)


class Letter(Task):
    """A task with one message in pieces, deep enough for one token each."""

    thought = ("step",)
    depth = 50
    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{{ question }}",
    }
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {"step": {"max_tokens": 40}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("about", [{"until": "e"}, {"until": " "}, {"tokens": 1}, {"tokens": 5}])
def test_a_path_of_first_children_equals_the_text_written_at_once(
    make_model: Callable[..., Any], tokenizer: Any, about: dict[str, Any], temperature: float
) -> None:
    def solved(thoughts: int, **options: Any) -> Solution:
        search = BFS(thoughts=thoughts, breadth=9)
        generator = Continue(temperature=temperature, **options)
        return solve(Letter(), "why", decoder=decoder, search=search, generator=generator, evaluator="random")

    with load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, kv_budget=9000) as decoder:
        (whole,) = (node.thought for node in solved(1, until="never").tree if node.thought)
        pieces = [node.thought for node in solved(1, **about).tree if node.thought]
        wide = [node.thought.text for node in solved(2, tokens=8).tree if node.thought]
    drawn = [thought.drawn["step"] for thought in pieces]
    assert len(drawn) > 1
    expected = whole.drawn["step"].tokens
    if "tokens" in about and expected[-1] == tokenizer.eos_token_id:
        expected = expected[:-1]  # a piece with only the end token is not a thought
    tokens = tuple(token for part in drawn for token in part.tokens)
    assert tokens[: len(expected)] == expected
    assert len(expected) <= len(tokens) <= 40  # the token limit may split a character
    assert len(tokens) < len(expected) + 3
    assert not any(thought.ended for thought in pieces[:-1])
    assert pieces[-1].ended or "tokens" in about
    assert len(set(wide)) > 2 or temperature == 0
