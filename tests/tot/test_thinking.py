"""Searches read texts without the thinking of the model."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tot import BFS, SearchConfig, SelfConsistency, Solution, Task, solve
from tot.decoders import Completion, OptionError, Request, Usage
from tot.decoders.engine.text import TextCodec
from tot.tasks import GSM8K


class Riddle(Task):
    """A thought, its value, a vote, and an answer."""

    depth = 2
    templates: ClassVar = {
        "thought": "Idea?",
        "value": "Value of {{ thoughts[-1].thought }}?",
        "answer": "Answer after {{ thoughts[-1].thought }}?",
    }


class Thinker:
    """A decoder object that writes all texts after thinking, and ends them at stop strings, also in thinking."""

    chats = True

    def __init__(self, thinking: str = "<think>2 is 9? 1. A lock</think>\n", reason: Any = "eos") -> None:
        self.requests: list[Request] = []
        self.thinking, self.reason = thinking, reason

    def generate(self, requests: Any) -> list[Completion]:
        self.requests += requests
        return [self._text(request, i) for request in requests for i in range(request.sampling.n)]

    def _text(self, request: Request, sample: int) -> Completion:
        asked, reason = request.prompt[-1].content, self.reason
        text = "piano" if asked.startswith("Answer") else ("A piano", "A map")[sample % 2]
        if "different ones" in asked:
            text = "1. A piano\n2. A map"
        elif "best" in asked:
            text = "1" if "1. A piano" in asked else "2"
        elif "Value" in asked:
            text = "9" if "piano" in asked else "3"
        text = self.thinking + text
        found = [at for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
        if found:
            text, reason = text[: min(found)], "stop"
        return Completion(text, (), 0.0, reason, Usage(new_tokens=5))


def run(decoder: Any, **options: Any) -> Solution:
    return solve(Riddle(), "q", decoder=decoder, search=BFS(thoughts=2, breadth=1), **options)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"evaluator": "value"}, [9.0, 3.0]),
        ({"evaluator": "vote"}, [1.0, 0.0]),
        ({"evaluator": "value", "generator": "propose"}, [9.0, 3.0]),
    ],
)
def test_thoughts_proposals_values_votes_and_answers_have_no_thinking(
    options: dict[str, Any], values: list[float]
) -> None:
    decoder = Thinker()
    solution = run(decoder, **options)
    nodes = [node for node in solution.tree if node.thought]
    assert [node.thought.text for node in nodes] == ["A piano", "A map"]
    assert [node.value for node in nodes] == values
    assert solution.answer == "piano"
    assert not any("<think>" in request.prompt[-1].content for request in decoder.requests)
    parts = [call.parts[0] for calls in solution.tree.calls.values() for call in calls]
    assert {(part.kind, part.text) for part in parts} == {("thinking", "2 is 9? 1. A lock")}


def test_stop_strings_are_applied_to_the_answer_alone() -> None:
    class Stopping(Riddle):
        sampling: ClassVar = {"thought": {"stop": ("lock", "o")}}

    decoder = Thinker()
    solution = solve(Stopping(), "q", decoder=decoder, search=BFS(thoughts=2, breadth=1), evaluator="random")
    assert [node.thought.text for node in solution.tree if node.thought] == ["A pian", "A map"]
    first, second = decoder.requests[:2]
    assert (first.sampling.stop, second.sampling.stop) == (("lock", "o"), ())
    assert first.sampling.seed == second.sampling.seed
    assert solution.usage.new_tokens == 5 * solution.calls
    mute = type("Mute", (Stopping,), {"parse_answer": lambda self, text: None})
    unread = solve(mute(), "q", decoder=Thinker(), search=BFS(thoughts=2, breadth=1), evaluator="random")
    assert (unread.answer, unread.stopped) == (None, None)  # the thoughts were requested again, so none is lost


@pytest.mark.parametrize(
    ("reason", "words"),
    [("length", "the text was truncated in its thinking"), ("eos", "the model ended its text in its thinking")],
)
def test_an_answer_that_is_lost_to_thinking_is_reported(scripted: Any, reason: str, words: str) -> None:
    task = GSM8K().with_prompts("chat")
    prompt = task.prompt("chain", task.start("why"))[-1].content
    decoder = scripted({prompt: [scripted.completion("<think>\\boxed{7}? No", reason)] * 3})
    solution = solve(task, "why", decoder=decoder, search=SelfConsistency(samples=3))
    assert solution.answer is None
    assert words in (solution.stopped or "")
    assert "--thinking off" in (solution.stopped or "")
    assert f"({solution.calls} of {solution.calls} texts)" in (solution.stopped or "")


def test_a_repetition_is_a_truncated_text_and_is_reported(scripted: Any, caplog: Any) -> None:
    task = GSM8K().with_prompts("chat")
    prompt = task.prompt("chain", task.start("why"))[-1].content
    text = "So 7, " * 100
    solution = solve(task, "why", decoder=scripted({prompt: scripted.completion(text, "repetition")}), search="cot")
    assert solution.answer is None  # its last number is not an answer
    assert "truncated" in (solution.stopped or "")
    assert "repeats the same tokens" in caplog.text


def test_tags_in_an_answer_are_text() -> None:
    text = "Use re.sub('<think>.*</think>', '', x)."
    for reply, answer in ((text, text), ("<think>Easy.</think>The </think> tag.", "The </think> tag.")):
        decoder = type(
            "Fixed",
            (),
            {
                "chats": True,
                "generate": lambda self, requests, r=reply: [
                    Completion(r, (), 0.0, "eos", Usage(new_tokens=1)) for _ in requests
                ],
            },
        )()
        assert solve("ask", "How?", decoder=decoder, search="cot").answer == answer


def test_the_options_of_a_search_and_of_its_task_reach_every_request() -> None:
    class Own(Riddle):
        sampling: ClassVar = {"value": {"thinking": "off"}}

    decoder = Thinker()
    config = SearchConfig.of(None, {"template_option": ["enable_thinking=true", "style=short"]})
    search = BFS(thoughts=2, breadth=1)
    solve(Own(), "q", config, decoder=decoder, search=search, evaluator="value", thinking="512,settle=0.9")
    budgets = {"Idea?": 512, "Value": "off", "Answer": 512}
    for request in decoder.requests:
        thinking = request.sampling.thinking
        assert thinking.budget == budgets[request.prompt[-1].content.split()[0]]
        assert thinking.settle == (0.9 if thinking.budget == 512 else 0)
        assert request.template_options == {"enable_thinking": True, "style": "short"}


@pytest.mark.parametrize("given", ["much", "512,settle=2", -1])
def test_invalid_thinking_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="thinking"):
        solve(Riddle(), "q", decoder=Thinker(), thinking=given)


def test_a_search_branches_inside_a_thought_and_closes_it_at_its_budget(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny()
    template = decoder.tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(decoder.tokenizer, "chat_template", template)
    decoder.engine.codec = TextCodec(decoder.tokenizer)
    task = GSM8K().with_prompts("chat")
    search = BFS(thoughts=2, breadth=2, depth=4)
    with decoder:
        solution = solve(task, "why", decoder=decoder, search=search, thinking=30, max_tokens=20, evaluator="random")
    for leaf in solution.tree.leaves():
        path = [node.thought for node in solution.tree.path(leaf)[1:]]
        thinking = "".join(thought.text[: thought.thinking] for thought in path)
        drawn = sum(len(thought.drawn["step"].tokens) for thought in path if thought.thinking == len(thought.text))
        assert "</think>" not in solution.tree.state(leaf).message
        assert drawn <= 30 or "</think>" in thinking
    assert any("</think>" in node.thought.text[: node.thought.thinking] for node in solution.tree if node.thought)
