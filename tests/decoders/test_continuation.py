"""A search by pieces of a model's own answer: each piece continues the exact sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Solution, Task, ThoughtTree, solve
from tot.decoders import Message, Request, Sampling, load_decoder
from tot.llm.context import as_written
from tot.tree.thought import SampledText, Thought


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("So: one\n\ntwo", ((4, (1, 2)), (9, (3,)))),
        ("So: two", ((4, (3,)),)),
        ("one, So: one", ((0, (1, 2)),)),
        ("nothing of it", ()),
        ("So: four", ((3, (7,)),)),  # a thought from mid-text is found with its leading whitespace
        ("So:four", ()),
    ],
)
def test_thoughts_are_found_at_their_place_in_the_prompt(content: str, written: Any) -> None:
    thoughts = [
        Thought(parts={"a": "one"}, drawn={"a": SampledText(text="one\n\n", tokens=(1, 2))}),
        Thought(parts={"a": "two"}, drawn={"a": SampledText(text="two", tokens=(3,))}),
        Thought(parts={"a": "unknown"}),
        Thought(parts={"a": "four"}, drawn={"a": SampledText(text=" four", tokens=(7,))}),
    ]
    (message,) = as_written((Message(role="assistant", content=content),), thoughts)
    assert message.written == written


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
        tree = solved(1, **about).tree
        pieces = [node.thought for node in tree if node.thought]
        wide = [node.thought.text for node in solved(2, tokens=8).tree if node.thought]
    drawn = [thought.drawn["step"] for thought in pieces]
    read = ThoughtTree.from_json(tree.to_json())
    assert [node.thought.drawn["step"] for node in read if node.thought] == drawn
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
