"""Turns: searches whose model calls functions, with results as observations and calls as answers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from tot import Checkpoint, Sample, Solution, Task, ThoughtTree, Tool, Turns, solve
from tot.decoders import Constraint, Function, ToolCall
from tot.decoders.errors import OptionError
from tot.decoders.tools import OWN
from tot.tasks import Ask

CALLED: list[Any] = []


def capital(country: str) -> str:
    """Return the capital of a country."""
    CALLED.append(country)
    return {"Norway": "Oslo", "Italy": "Rome"}[country]


def people(city: str, year: int = 2020) -> int:
    CALLED.append((city, year))
    return {"Oslo": 700_000, "Rome": 2_800_000}[city]


def book(city: str, nights: int) -> None:
    CALLED.append("booked")


@pytest.fixture(autouse=True)
def _called() -> None:
    CALLED.clear()


@pytest.fixture
def calling(scripted: type[Any]) -> type[Any]:
    """The scripted decoder, which writes calls like Qwen."""

    class Calling(scripted):
        def read_calls(self, completion: Any) -> Any:
            return OWN.parse(completion.text)

    return Calling


def said(*calls: tuple[str, Any], text: str = "") -> str:
    written = [ToolCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]
    return text + OWN.write(written)


CAPITAL = said(("capital", {"country": "Norway"}), text="First the capital.\n")
TWO_STEPS = {
    "q": CAPITAL,
    "Oslo": said(("people", {"city": "Oslo"})),
    "700000": "700,000 people",
}
BOOK = {"city": "Oslo", "nights": 2}


def run(decoder: Any, task: Any = "ask", **options: Any) -> Solution:
    about: dict[str, Any] = {"search": "bfs:thoughts=1,breadth=1", "evaluator": "random", "tools": [capital, people]}
    return solve(task, "q", decoder=decoder, **{"prompts": "chat", **about, **options})


def thoughts(tree: ThoughtTree) -> list[Any]:
    return [node.thought for node in tree if node.thought is not None]


# -- executed calls -----------------------------------------------------------------------------------------------


def test_results_are_messages_of_the_next_prompt_until_a_turn_without_calls(calling: Any) -> None:
    decoder = calling(TWO_STEPS)
    solution = run(decoder)
    assert CALLED == ["Norway", ("Oslo", 2020)]
    assert (solution.answer, solution.stopped) == ("700,000 people", None)
    first, second, last = thoughts(solution.tree)
    assert first.text == 'First the capital.\ncapital({"country": "Norway"})\nOslo\n'
    assert second.text == 'people({"city": "Oslo"})\n700000\n'
    assert (first.observation.text, first.ended, first.open_calls) == ("Oslo", False, ())
    assert (last.text, last.ended, last.observation) == ("700,000 people", True, None)
    roles = [[message.role for message in request.prompt] for request in decoder.requests]
    assert roles == [["user"], ["user", "assistant", "tool"], ["user", *["assistant", "tool"] * 2]]
    _, turn, result = decoder.requests[1].prompt
    (call,) = turn.tool_calls
    assert (turn.content, call.name, call.arguments) == ("First the capital.", "capital", '{"country": "Norway"}')
    assert (result.content, result.tool_call_id) == ("Oslo", call.id)
    assert all([tool.name for tool in request.tools] == ["capital", "people"] for request in decoder.requests)


def test_branches_continue_from_their_own_results(calling: Any) -> None:
    replies = {
        "q": [said(("capital", {"country": name})) for name in ("Norway", "Italy")],
        "Oslo": said(("people", {"city": "Oslo"})),
        "Rome": said(("people", {"city": "Rome"})),
        "700000": "small",
        "2800000": "large",
    }
    decoder = calling(replies)
    solution = run(decoder, search="bfs:thoughts=2,breadth=2,select=all,aggregate=majority")
    assert [request.sampling.n for request in decoder.requests] == [2, 1, 1, 1, 1]
    assert sorted(node.answer for node in solution.tree if node.answer) == ["large", "small"]
    assert len({str(CALLED.index(call)) for call in CALLED}) == 4


def test_equal_calls_of_one_state_are_executed_once(calling: Any) -> None:
    samples = [CAPITAL, said(("capital", {"country": "Norway"})), "Oslo", CAPITAL]
    solution = run(calling({"q": samples, "Oslo": "done"}), search="bfs:thoughts=4,breadth=4")
    assert CALLED == ["Norway"]
    assert solution.tree[1].merged == 1


def test_several_calls_of_a_turn_have_results_in_order(calling: Any) -> None:
    both = said(("capital", {"country": "Italy"}), ("people", {"city": "Oslo", "year": 1990}))
    decoder = calling({"q": both, "700000": "done"})
    assert run(decoder).answer == "done"
    _, turn, *results = decoder.requests[1].prompt
    assert [result.content for result in results] == ["Rome", "700000"]
    assert [result.tool_call_id for result in results] == [call.id for call in turn.tool_calls]
    assert len({call.id for call in turn.tool_calls}) == 2


def test_an_error_of_a_function_is_its_result(calling: Any) -> None:
    decoder = calling({"q": said(("capital", {"country": "Atlantis"})), "KeyError: 'Atlantis'": "no such country"})
    assert run(decoder).answer == "no such country"


def test_a_resumed_search_executes_nothing_twice(calling: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with closing(Checkpoint.create(path)) as trace:
        first = run(calling(TWO_STEPS), checkpoint=trace)
    lines = path.read_text().splitlines(keepends=True)
    for kept in range(1, len(lines) + 1):
        CALLED.clear()
        path.write_text("".join(lines[:kept]))
        with closing(Checkpoint.resume(path)) as trace:
            solution = run(calling(TWO_STEPS), checkpoint=trace)
        assert solution.tree.to_json() == first.tree.to_json()
        recorded = "".join(lines[1:kept])
        assert len(CALLED) == ("Oslo" not in recorded) + ("700000" not in recorded)


def test_a_path_that_ends_at_full_depth_is_answered_from_the_results(calling: Any) -> None:
    decoder = calling({"q": CAPITAL, "Oslo": "Oslo, I think"})
    assert run(decoder, search="bfs:thoughts=1,breadth=1,depth=2").answer == "Oslo, I think"
    assert [message.role for message in decoder.requests[-1].prompt] == ["user", "assistant", "tool"]
    assert decoder.requests[-1].tools == ()


def test_evaluators_see_calls_and_results(calling: Any) -> None:
    decoder = calling({**TWO_STEPS, "7": "7"})
    run(decoder, evaluator="value")
    judged = [request.prompt[-1].content for request in decoder.requests if request.purpose == "evaluate"]
    assert 'First the capital.\ncapital({"country": "Norway"})\nOslo\n' in judged[0]
    assert 'people({"city": "Oslo"})\n700000\n700,000 people' in judged[-1]


# -- calls as answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [Tool(book, readonly=False), Function(name="book", parameters={"properties": {}})])
@pytest.mark.parametrize("search", ["bfs:thoughts=1,breadth=1", "cot", "self-consistency:samples=1", "best-of-n"])
def test_a_call_of_a_function_that_is_not_readonly_is_the_answer(calling: Any, tool: Any, search: str) -> None:
    turn = said(("book", BOOK), text="I book it.")
    solution = run(calling({"q": turn if "best" not in search else [turn] * 5}), tools=[tool], search=search)
    assert CALLED == []
    (call,) = solution.tool_calls
    assert solution.answer == (call,)
    assert (call.name, json.loads(call.arguments)) == ("book", BOOK)
    (leaf, *_) = thoughts(solution.tree)
    assert leaf.text == 'I book it.\nbook({"city": "Oslo", "nights": 2})\n'
    assert leaf.ended
    node = next(node for node in solution.tree if node.chosen and node.thought)
    assert node.answer == 'book({"city": "Oslo", "nights": 2})'


def test_a_turn_with_one_open_call_executes_none(calling: Any) -> None:
    decoder = calling({"q": said(("capital", {"country": "Norway"}), ("book", BOOK))})
    solution = run(decoder, tools=[capital, Tool(book, readonly=False)])
    assert CALLED == []
    assert [call.name for call in solution.tool_calls] == ["capital", "book"]


def test_saved_runs_keep_the_calls(calling: Any, tmp_path: Path) -> None:
    about: dict[str, Any] = {"tools": [Tool(book, readonly=False)], "search": "self-consistency:samples=3"}
    decoder = calling({"q": ["by train", said(("book", BOOK)), said(("book", {"nights": 2.0, "city": " Oslo"}))]})
    with pytest.raises(OptionError, match="executes no tools"):
        run(decoder, **{**about, "tools": [book]})
    del decoder.replies["q"][2]
    decoder.replies["q"].append(said(("book", {"nights": 2, "city": " Oslo"})))
    with closing(Checkpoint.create(tmp_path / "run.jsonl")) as trace:
        solution = run(decoder, checkpoint=trace, **about)
    assert solution.votes == (2, 3)
    solution.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    assert [call["name"] for call in saved["answer"]] == ["book"]
    tree = ThoughtTree.from_json(saved["tree"])
    assert [thought.open_calls for thought in thoughts(tree)][1] == solution.tool_calls
    with closing(Checkpoint.resume(tmp_path / "run.jsonl")) as trace:
        again = run(decoder, checkpoint=trace, **about)
    assert (again.answer, again.votes) == (solution.answer, (2, 3))


def test_the_page_and_the_terminal_show_calls_as_text(calling: Any, tmp_path: Path) -> None:
    from tot.cli.output import answer_line
    from tot.report.page import tree_page
    from tot.report.terminal import tree_text

    evil = "</script><img src=x onerror=alert(1)>\x1b[31m<tool_call>"
    solution = run(calling({"q": said(("book", {"city": evil, "nights": 1}))}), tools=[Tool(book, readonly=False)])
    assert answer_line(solution).startswith('Answer: book({"city": "</script>')
    page = "".join(tree_page(solution.tree, solution.result()))
    assert "<img" not in page
    assert "\x1b" not in str(tree_text(solution.tree))


# -- votes --------------------------------------------------------------------------------------------------------


def test_calls_vote_by_function_and_then_by_argument(calling: Any) -> None:
    def call(**arguments: Any) -> str:
        return said(("book", arguments))

    samples = [
        "Oslo is nice.",
        "Oslo is nice.",
        call(city="Oslo", nights=9),
        call(city="Rome", nights=2),
        call(nights=2, city="Oslo"),
    ]
    solution = run(calling({"q": samples}), tools=[Tool(book, readonly=False)], search="self-consistency:samples=5")
    assert [json.loads(call.arguments) for call in solution.tool_calls] == [{"nights": 2, "city": "Oslo"}]
    assert solution.votes == (1, 5)
    texts = run(calling({"q": samples[:4]}), tools=[Tool(book, readonly=False)], search="self-consistency:samples=4")
    assert (texts.answer, texts.votes) == ("Oslo is nice.", (2, 4))
    assert texts.tool_calls == ()


def test_a_vote_of_calls_stops_when_it_is_sure(calling: Any) -> None:
    class Waiting(calling):  # type: ignore[misc, valid-type]
        def _reply(self, request: Any, sample: int) -> Any:
            return self.completion(said(("book", BOOK)))

    decoder = Waiting({})
    search = "auto:samples=32,until=0.5,together=2"
    solution = run(decoder, tools=[Tool(book, readonly=False)], search=search)
    assert solution.tool_calls
    assert solution.votes is not None
    assert solution.votes[0] == solution.votes[1] < 16


def test_objects_vote_by_field(calling: Any) -> None:
    samples = ['{"a": 1, "b": "x"}', '{"b": "y", "a": 1.0}', '{"a": 2, "b": "y"}', "no JSON"]
    search = "self-consistency:samples=4"
    task = Ask().with_prompts("chat").with_prompts(form=Constraint(json_schema={"type": "object"}))
    solution = run(calling({"q": samples}), task=task, prompts=None, tools=None, search=search)
    assert (solution.answer, solution.votes) == ({"a": 1, "b": "y"}, (1, 3))
    assert solution.parse_failures == 1


# -- refused calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (said(("book", {"city": "Oslo", "nights": "two"})), "book: nights = 'two': Input should be a valid integer"),
        (said(("book", {"city": "Oslo"})), "book: nights = .*: Field required"),
        (
            said(("book", {"city": "Oslo"})).replace("}", ', "nights": ' + "9" * 5000 + "}", 1),
            "is no complete call|book: ",
        ),
        (said(("fly", {})), "there is no function 'fly': the functions are book"),
        (said(("fly<|im_end|>", {})), "is no complete call|there is no function"),
        ('<tool_call>\n{"name": "book", "arguments": [1]}\n</tool_call>', "is no complete call of a function"),
        ('<tool_call>\n{"name": "book", "arguments": {"city": "Os', "is no complete call of a function, and no answer"),
    ],
)
def test_refused_calls_are_failed_leaves_and_the_reason_is_given(calling: Any, text: str, reason: str) -> None:
    generator = Turns(tools=[Tool(book, readonly=False)], tool_choice="required")
    solution = run(calling({"q": [text] * 3}), generator=generator, tools=None, search="self-consistency:samples=3")
    assert (solution.answer, solution.tool_calls, len(solution.tree)) == (None, (), 1)
    assert solution.parse_failures == 3
    assert solution.stopped is not None
    assert re.search(reason, solution.stopped)
    assert solution.stopped.endswith("(rejected texts: 3)")


def test_a_search_continues_without_refused_calls(calling: Any) -> None:
    samples = [said(("people", {"city": 3})), CAPITAL]
    solution = run(calling({**TWO_STEPS, "q": samples}), search="bfs:thoughts=2,breadth=1")
    assert (solution.answer, solution.parse_failures) == ("700,000 people", 1)


def test_a_call_that_the_limit_cut_is_refused(calling: Any) -> None:
    decoder = calling({"q": calling.completion(CAPITAL[:-30], "length")})
    stopped = run(decoder).stopped
    assert stopped is not None
    assert stopped.startswith("the text was truncated, raise max_tokens: 'First the capital.")


def test_a_hanging_tool_does_not_hold_a_budget_in_seconds(calling: Any) -> None:
    over = threading.Event()

    def wait() -> None:
        over.wait(60)

    async def rest() -> None:
        await asyncio.sleep(60)

    for tool in (wait, rest):
        solution = run(calling({"q": said((tool.__name__, {}))}), tools=[tool], budget={"seconds": 0.2})
        assert str(solution.stopped).startswith("budget: seconds")
    over.set()


# -- parts that cannot work together ------------------------------------------------------------------------------


class Choosing(Task):
    templates: ClassVar = {"thought": "{{ question }}", "answer": "{{ question }}"}
    schemas: ClassVar = {"thought": Literal["a", "b"]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"search": "cot"}, "ChainOfThought decodes whole solutions at once and executes no tools: choose bfs"),
        ({"search": "self-consistency"}, "SelfConsistency decodes whole solutions at once"),
        ({"search": "refine"}, "Refine decodes whole solutions at once"),
        ({"search": "cot", "tools": None, "generator": Turns(tools=[people])}, "ChainOfThought decodes whole"),
        ({"generator": "sample"}, "generator Sample does not support tools: leave it out, or use 'turns'"),
        ({"generator": "continue"}, "generator Continue does not support tools"),
        ({"generator": Sample()}, "generator Sample does not support tools"),
        ({"tools": ["calculater"]}, r"unknown tool 'calculater' \(did you mean calculator\?\)"),
        ({"tools": [len]}, "tool len has no type|can't be read|takes obj without a name"),
        ({"task": "gsm8k", "prompts": "papers"}, "Turns writes one message, but a thought of GSM8K has 2 templates"),
    ],
)
def test_options_that_conflict_with_tools_are_rejected_before_loading(options: Any, expected: str) -> None:
    about = {"task": "ask", "prompts": None, "tools": [capital], **options}
    with pytest.raises(OptionError, match=expected):
        solve(about.pop("task"), "q", model="no such model", **about)


def test_two_hundred_tools_reach_the_model_and_two_of_one_name_are_refused(calling: Any) -> None:
    tools = [Function(name=f"f{i}") for i in range(200)]
    decoder = calling({"q": said(("f199", {}))})
    assert run(decoder, tools=tools).tool_calls[0].name == "f199"
    assert len(decoder.requests[0].tools) == 200
    with pytest.raises(OptionError, match="two tools are named f0: rename one"):
        run(decoder, tools=[tools[0], tools[0]])


def test_a_decoder_that_reads_no_calls_is_refused(scripted: Any) -> None:
    with pytest.raises(OptionError, match="decoder Scripted calls no functions, it has no `read_calls`: use a local"):
        run(scripted({"q": CAPITAL}))


def test_a_task_with_any_message_as_a_thought_has_tools(calling: Any) -> None:
    class Riddle(Task):
        templates: ClassVar = {"thought": "riddle {{ question }}", "answer": "answer {{ question }}"}

        def step(self, state: Any, thought: Any) -> Any:
            return None if "wrong" in thought.text else state.then(thought)

    decoder = calling({"riddle q": CAPITAL, "Oslo": ["wrong", "right"]})
    solution = run(decoder, task=Riddle, prompts=None, search="bfs:thoughts=2,breadth=1", evaluator="random")
    assert solution.answer == "right"


def test_texts_beside_calls_meet_the_schema_of_the_task(calling: Any) -> None:
    decoder = calling({"q": CAPITAL, "Oslo": ["c", "b"]})
    solution = run(decoder, task=Choosing, prompts=None, search="bfs:thoughts=2,breadth=1")
    assert (solution.answer, solution.parse_failures) == ("b", 1)
    assert solution.tree[1].thought.parts.keys() == {"calls"}  # type: ignore[union-attr]


@pytest.mark.real
def test_a_real_model_calls_a_function_that_the_search_executes(smollm2: str) -> None:
    generator = Turns(tools=[people], tool_choice="people", parallel_tool_calls=False)
    about: dict[str, Any] = {"search": "bfs:thoughts=2,breadth=1,depth=2", "evaluator": "logprob", "max_tokens": 60}
    solution = solve("ask", "How many people live in Rome?", model=smollm2, generator=generator, **about)
    executed = [thought for thought in thoughts(solution.tree) if thought.observation is not None]
    assert executed
    assert all(set(json.loads(thought.tool_calls[0].arguments)) <= {"city", "year"} for thought in executed)
