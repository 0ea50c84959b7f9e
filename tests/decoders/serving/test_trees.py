"""A search through `tot serve` returns the same tree as on the same decoder locally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import openai
import pytest

from tot import BFS, Continue, LogProb, Random, Sample, Solution, Task, solve
from tot.decoders import Message, Request, Sampling, load_decoder

HOT = {"temperature": 1.0, "max_tokens": 24}
FIRST, SECOND = 2**63 + 11, 5


class Letter(Task):
    """A task with one message, in pieces."""

    thought = ("step",)
    depth = 9
    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{% block user %}{{ question }}{% endblock %}",
    }
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {"step": {"max_tokens": 40}, "answer": {"max_tokens": 10}}


def nodes(solution: Solution) -> list[dict[str, Any]]:
    """Return nodes without fields that depend on the machine or the decoder's name.

    A server counts the new tokens of all samples together. Log-probabilities differ by the order of summation.
    """
    others = ("seconds", "decoder", "reused_prompt_tokens", "forwards", "new_tokens")
    found = []
    for node in solution.tree.to_json()["nodes"]:
        for part in node.get("thought", {}).get("drawn", {}).values():
            assert len(part.pop("logprobs")) == len(part["tokens"])
        found.append({name: value for name, value in node.items() if name not in others})
    return found


@pytest.fixture
def tiny(make_model: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """Create decoders on a model that writes characters which can end a piece."""
    return lambda **options: load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, **options)


@pytest.fixture
def remote(server: Any) -> Any:
    with load_decoder("openai", "tiny", base_url=f"{server.url}/v1") as decoder:
        yield decoder


@pytest.mark.parametrize(("until", "temperature"), [("e", 0.0), ("e", 1.0), ("sentence", 1.0), ("paragraph", 1.0)])
def test_continue_returns_the_same_tree(server: Any, remote: Any, until: str, temperature: float) -> None:
    options = {"generator": Continue(temperature=temperature, until=until), "evaluator": Random(), "seed": 3}
    here, there = (
        solve(Letter, "Why?", decoder=decoder, search=BFS(thoughts=2, breadth=2, depth=4), **options)
        for decoder in (server.decoder, remote)
    )
    assert nodes(there) == nodes(here)
    assert (there.answer, there.calls, there.parse_failures) == (here.answer, here.calls, here.parse_failures)
    value = LogProb().of
    ends = [node.id for node in here.tree.leaves() if node.thought is not None]
    assert [value(there.tree.state(there.tree[i])) for i in ends] == pytest.approx(
        [value(here.tree.state(here.tree[i])) for i in ends], rel=1e-4
    )
    assert len(here.tree) > (9 if until == "e" and temperature else 1)


def test_samples_with_64_bit_seeds_are_the_same(server: Any, remote: Any) -> None:
    request = Request(prompt=(Message(role="user", content="Why?"),), sampling=Sampling(n=3, seed=FIRST, **HOT))
    here, there = (decoder.generate([request]) for decoder in (server.decoder, remote))
    assert [(one.text, one.tokens, one.finish_reason) for one in there] == [
        (one.text, one.tokens, one.finish_reason) for one in here
    ]
    assert len({one.text for one in here}) == 3
    options = {"search": BFS(thoughts=3, breadth=2, depth=2), "generator": Sample(), "evaluator": Random(), "seed": 9}
    one, other = (solve(Letter, "Why?", decoder=decoder, **options) for decoder in (server.decoder, remote))
    assert nodes(one) == nodes(other)


# -- single fields ------------------------------------------------------------------------------------------------


def test_tokens_that_do_not_spell_the_message_are_ignored(client: openai.OpenAI) -> None:
    texts = []
    for written in ([[0, [-1]]], [[0, [10**12]]], [[0, [3, 4, 5]]], [[0, []]], [[99, [3, 4, 5]]], []):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is", "written": written}]
        reply = client.chat.completions.create(
            model="tiny", messages=messages, seed=1, max_tokens=8, extra_body={"continue_final_message": True}
        )
        texts.append(reply.choices[0].message.content)
    assert len(set(texts)) == 1
