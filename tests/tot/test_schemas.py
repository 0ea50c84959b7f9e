"""Typed thoughts and answers: `Task.schemas`, and samples of legal actions only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from benchmarks.leaves import read_leaves
from tot import BFS, Checkpoint, Observation, Sample, State, Task, Thought, ThoughtTree, Value, evaluate, solve
from tot.cli.output import usage_line
from tot.decoders import Constraint, OptionError, RequestError, TaskError
from tot.evaluation.folder import read_samples
from tot.evaluation.pool import pools
from tot.task.checked import CheckedTask
from tot.task.schemas import Schema


class Move(BaseModel):
    source: Literal["a", "b", "c"]
    target: Literal["a", "b", "c"]


def move(source: str, target: str) -> str:
    return json.dumps({"source": source, "target": target})


class Pegs(Task):
    """Move one disk from peg to peg until it is at the peg that the question names."""

    templates: ClassVar = {"move": "{{ question }}{% for one in thoughts %} {{ one.move.target }}{% endfor %}"}
    thought = ("move",)
    schemas: ClassVar = {"move": Move}
    depth = 4

    def start(self, question: str) -> State:
        return State(question=question, world="a")

    def actions(self, state: State) -> list[Move]:
        targets = [target for target in ("a", "b", "c") if target != state.world and state.world != "b"]
        return [Move(source=state.world, target=target) for target in targets]  # type: ignore[arg-type]

    def step(self, state: State, thought: Thought) -> State | None:
        moved = thought.objects["move"]
        return state.then(thought, moved.target) if moved.source == state.world else None

    async def act(self, state: State, thought: Thought) -> Observation:
        return Observation(text=f"at {thought.objects['move'].target}")

    def is_terminal(self, state: State) -> bool:
        return state.world == state.question

    def answer_at(self, state: State) -> list[str] | None:
        return [thought.objects["move"].target for thought in state.thoughts] if self.is_terminal(state) else None


class Verdict(BaseModel):
    reason: str = ""
    number: Annotated[int, Field(alias="n")]


class Count(Task):
    """The answer is an object."""

    templates: ClassVar = {"thought": "think", "value": "value", "answer": "count"}
    schemas: ClassVar = {"answer": Verdict}
    depth = 2


def subclass(base: type[Task] = Count, **members: Any) -> type[Task]:
    return type("Own", (base,), members)


# -- thoughts ---------------------------------------------------------------------------------------------------


def test_a_world_gets_the_object_and_templates_read_its_fields(scripted: Any) -> None:
    spaced = '{"target": "b",  "source": "a"}'
    decoder = scripted(
        {"c": [spaced, move("b", "c"), move("a", "b")], "c b": [move("b", "c"), "b to c", move("b", "z")]}
    )
    search = "bfs:thoughts=3,depth=3"
    solution = solve(Pegs, "c", decoder=decoder, search=search, evaluator="random", generator="sample")
    assert solution.answer == ["b", "c"]
    assert decoder.prompts == [["c"], ["c b"]]
    assert (len(solution.tree), solution.tree[1].merged) == (3, 1)  # the same move in another form
    assert (solution.rejected, solution.parse_failures) == (1, 2)
    assert solution.tree[1].thought.observation.text == "at b"
    assert [request.constraint for request in decoder.requests] == [Schema(Move).constraint] * 2


def test_a_saved_tree_has_the_json_and_is_typed_again(scripted: Any, tmp_path: Path) -> None:
    decoder = scripted({"b": [move("a", "b")]})
    solution = solve(Pegs, "b", decoder=decoder, search="bfs:thoughts=1", evaluator="random", generator="sample")
    solution.save(tmp_path / "run.json")
    loaded = ThoughtTree.load(tmp_path / "run.json")
    assert loaded.to_json() == solution.tree.to_json()
    thought = loaded[1].thought
    assert thought is not None
    assert json.loads(thought.parts["move"]) == {"source": "a", "target": "b"}
    assert thought.objects == {}
    typed = CheckedTask(Pegs()).typed(thought)
    assert typed is not None
    assert typed.objects == {"move": Move(source="a", target="b")}


def test_templates_print_objects_as_json(scripted: Any) -> None:
    templates = {
        "thought": "think{{ thoughts | map(attribute='thought') | join(',') }}",
        "answer": "{{ thoughts[-1].thought }}",
    }
    task = subclass(Task, templates=templates, schemas={"thought": Move}, depth=2)
    decoder = scripted({"think": [move("a", "b")]})
    solve(task, "q", decoder=decoder, search="bfs:thoughts=1", evaluator="random")
    assert decoder.prompts[-1] == [move("a", "b")]


def test_equal_objects_are_equal_states(scripted: Any) -> None:
    task = subclass(schemas={"thought": dict[str, int]})
    decoder = scripted({"think": ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}']})
    solution = solve(task, "q", decoder=decoder, search="bfs:thoughts=2", evaluator="random")
    assert (len(solution.tree), solution.tree[1].merged) == (2, 1)


def test_a_later_template_of_a_thought_sees_the_object_of_the_first(scripted: Any) -> None:
    templates = {"move": "move", "why": "why {{ move.target }}", "answer": "end"}
    task = subclass(Task, templates=templates, thought=("move", "why"), schemas={"move": Move}, depth=2)
    decoder = scripted({"move": [move("a", "b")], "why b": "because", "propose": f"- {move('a', 'b')}"})
    for generator in ("sample", "propose"):
        decoder.replies["move\n\nGive 1 different ones, one a line."] = move("a", "b")
        solution = solve(task, "q", decoder=decoder, search="bfs:thoughts=1", evaluator="random", generator=generator)
        assert solution.tree[1].thought.text == f"{move('a', 'b')}\nbecause"


def test_a_list_of_proposals_can_have_a_schema(scripted: Any) -> None:
    schemas = {"move": Move, "propose": list[Move]}
    decoder = scripted({"list": f"[{move('a', 'b')}, {move('b', 'c')}]"})
    task = subclass(Pegs, schemas=schemas, templates={"propose": "list"})
    solution = solve(task, "b", decoder=decoder, search="bfs:thoughts=3", evaluator="random", generator="propose")
    assert (solution.answer, solution.rejected, solution.parse_failures) == (["b"], 1, 0)
    decoder = scripted({"list": f"{move('a', 'b')}\nb to c"})
    task = subclass(Pegs, templates={"propose": "list"})
    solution = solve(task, "b", decoder=decoder, search="bfs:thoughts=3", evaluator="random", generator="propose")
    assert (solution.answer, solution.parse_failures) == (["b"], 1)


def test_the_typed_text_follows_a_trigger(scripted: Any, tiny: Any) -> None:
    task = subclass(triggers={"answer": "\nSo:"}, schemas={"answer": int})
    decoder = scripted({"count": "1 and 2\nSo: 3"})
    assert solve(task, "q", decoder=decoder, search="bfs:thoughts=1", evaluator="random").answer == 3
    assert decoder.requests[-1].answer_trigger == "\nSo:"
    with tiny() as local:
        task = subclass(triggers={"answer": "\nSo:"}, schemas={"answer": Literal["red", "blue"]})
        solution = solve(task, "q", decoder=local, search="bfs:thoughts=1", evaluator="random", max_tokens=8)
    assert solution.answer in ("red", "blue")


# -- answers ----------------------------------------------------------------------------------------------------


def test_votes_count_equal_objects(scripted: Any) -> None:
    texts = ['{"n": 1, "reason": "x"}', '{"n": 2}', '```json\n{"reason": "x", "n": 1}\n```']
    task = subclass(templates={"chain": "chain"}, schemas={"chain": Verdict})
    solution = solve(task, "q", decoder=scripted({"chain": texts}), search="self-consistency:samples=3")
    assert solution.answer == Verdict(n=1, reason="x")
    assert (solution.votes, solution.certainty) == ((2, 3), None)
    assert json.loads(json.dumps(solution.summary()))["answer"] == {"n": 1, "reason": "x"}

    def parse_answer(self: Task, verdict: Verdict) -> int:
        return verdict.number

    task = subclass(task, parse_answer=parse_answer)
    assert solve(task, "q", decoder=scripted({"chain": texts}), search="self-consistency:samples=3").answer == 1


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (int, " 42\n", 42),
        (int, "forty", None),
        (float, "1e3", 1000.0),
        (Literal["yes", "no"], "yes", "yes"),
        (Literal["yes", "no"], '"no"', "no"),
        (Literal["yes", "no"], "maybe", None),
        (list[int], "```\n[1, 2]\n```", [1, 2]),
        (str, '"a"', "a"),
        (str, "a", "a"),
        (str, '"cut', None),
        (Constraint(choices=(" yes", " no")), "no", "no"),
        (Constraint(choices=(" yes", " no")), "nope", None),
        (Constraint(regex="[0-9]{1,3} km"), "12 km", "12 km"),
        (Constraint(regex="[0-9]{1,3} km"), "12 miles", None),
        (Constraint(lark='start: "(" start ")" | "x"'), "((x))", "((x))"),
        (Constraint(json_schema={"type": "array", "items": {"type": "integer"}}), "[1,2]", [1, 2]),
        (Constraint(json_schema={"type": "array", "items": {"type": "integer"}}), "[1.5]", None),
        (Move, '{"source": "a"}', None),
        (Constraint(json_schema={}), "[" * 5000 + "]" * 5000, None),
        (Move, "", None),
        (Move, "[" * 100_000, None),
        (Move, '{"source": "\ud800"}', None),
    ],
)
def test_texts_without_a_constraint_are_parsed_in_the_same_way(schema: Any, text: str, expected: Any) -> None:
    assert Schema(schema).parse(text) == expected


def test_an_invalid_answer_is_no_answer(scripted: Any) -> None:
    decoder = scripted({"count": "about seven"})
    solution = solve(Count, "q", decoder=decoder, search="bfs:thoughts=1", evaluator="random")
    assert solution.answer is None


def test_an_object_has_no_other_properties_unless_its_type_allows_them() -> None:
    class Open(BaseModel, extra="allow"):
        moves: list[Move]

    schema: Any = Schema(Open).constraint.json_schema
    assert schema["additionalProperties"] is True
    assert schema["$defs"]["Move"]["additionalProperties"] is False


def test_an_evaluation_can_be_an_object(scripted: Any) -> None:
    class Review(BaseModel):
        flaws: list[str]
        score: Annotated[int, Field(ge=1, le=10)]

    def parse_value(self: Task, review: Review) -> float:
        return review.score - len(review.flaws)

    task = subclass(schemas={"value": Review}, parse_value=parse_value)
    decoder = scripted({"think": ["a", "b"], "value": '{"flaws": ["x"], "score": 8}'})
    solution = solve(task, "q", decoder=decoder, search="bfs:thoughts=1", evaluator=Value())
    assert (solution.value, solution.parse_failures) == (7, 0)
    assert decoder.requests[1].sampling.max_tokens == 128
    decoder = scripted({"think": ["a"], "value": "8"})
    assert solve(task, "q", decoder=decoder, search="bfs:thoughts=1", evaluator=Value()).parse_failures == 1


def test_a_resumed_run_answers_with_the_object(scripted: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    task = subclass(schemas={"answer": Verdict, "thought": Move})
    options: dict[str, Any] = {"search": BFS(thoughts=1), "evaluator": "random"}
    decoder = scripted({"think": move("a", "b"), "count": '{"n": 3}'})
    trace = Checkpoint.create(whole)
    assert solve(task, "q", decoder=decoder, checkpoint=trace, **options).answer == Verdict(n=3)
    trace.close()
    lines = whole.read_text().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(lines[:count]))
        again, trace = scripted(decoder.replies), Checkpoint.resume(path)
        solution = solve(task, "q", decoder=again, checkpoint=trace, **options)
        trace.close()
        assert solution.answer == Verdict(n=3)
        assert solution.tree[1].thought.objects == {"thought": Move(source="a", target="b")}
    assert again.requests == []


def test_an_evaluation_scores_objects_and_reads_its_trees_again(scripted: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "b", "answer": ["b"]}) + "\n")
    decoder = scripted({"b": [move("a", "b")]})
    options = {"search": "bfs:thoughts=1", "generator": "sample", "evaluator": "random", "out": tmp_path / "out"}
    assert evaluate(Pegs, rows, decoder=decoder, **options).score.mean == 1
    (sample,) = read_samples(tmp_path / "out")
    _, leaves = read_leaves(tmp_path / "out", sample, Pegs())
    assert leaves == {1: (["b"], 1.0)}

    rows.write_text(json.dumps({"question": "q", "answer": {"n": 3, "reason": ""}}) + "\n")
    decoder, options["out"] = scripted({"count": '{"n": 3}'}), tmp_path / "objects"
    assert evaluate(Count, rows, decoder=decoder, **options).score.mean == 1
    (sample,) = read_samples(tmp_path / "objects")
    assert sample["answer"] == {"n": 3, "reason": ""}
    ((_, (one,)),) = pools(tmp_path / "objects", Count)
    assert (one.answer, one.score) == (Verdict(n=3), 1.0)


# -- decoders ---------------------------------------------------------------------------------------------------


def test_a_decoder_that_refuses_constraints_gets_the_requests_without(scripted: Any, caplog: Any) -> None:
    class Refusing(scripted):  # type: ignore[misc]
        def generate(self, requests: Sequence[Any]) -> Any:
            if any(request.constraint is not None for request in requests):
                raise RequestError("this server has no JSON schemas")
            return super().generate(requests)

    decoder = Refusing({"c": [move("a", "b"), "?"], "c b": move("b", "c")})
    search = "bfs:thoughts=2,depth=3"
    solution = solve(Pegs, "c", decoder=decoder, search=search, evaluator="random", generator="sample")
    assert (solution.answer, solution.calls, solution.parse_failures) == (["b", "c"], 4, 1)
    assert caplog.messages == [
        "decoder Refusing writes texts of any form, which are only checked: this server has no JSON schemas"
    ]


def test_usage_counts_forced_and_masked_tokens(tiny: Any, tmp_path: Path) -> None:
    with tiny() as decoder:
        solution = solve(Pegs, "b", decoder=decoder, search="bfs:thoughts=3", evaluator="random", generator="sample")
    usage = solution.usage
    assert usage.new_tokens == usage.forced_tokens + usage.masked_tokens
    assert usage.forced_tokens > usage.masked_tokens > 0
    assert solution.parse_failures == 0
    assert f"{usage.forced_tokens} forced and {usage.masked_tokens} masked tokens" in usage_line(solution)
    solution.save(tmp_path / "run.json")
    nodes = list(ThoughtTree.load(tmp_path / "run.json"))
    assert sum(node.usage.forced_tokens for node in nodes) == usage.forced_tokens
    assert sum(node.usage.masked_tokens for node in nodes) == usage.masked_tokens


# -- legal actions ----------------------------------------------------------------------------------------------


def test_legal_samples_only_legal_actions(tiny: Any) -> None:
    with tiny() as decoder:
        rejected = []
        for generator in ("sample:temperature=2", "sample:legal=true,temperature=2"):
            search = "bfs:thoughts=8,breadth=4,depth=4"
            solution = solve(
                "game24", "4 9 10 13", decoder=decoder, search=search, generator=generator, evaluator="random"
            )
            rejected.append(solution.rejected + solution.parse_failures)
            assert len(solution.tree) == 1 or all(node.world for node in solution.tree)
    assert rejected[0] > 0
    assert rejected[1] == 0
    assert len(solution.tree) > 10


def test_the_legal_actions_of_a_typed_thought_are_objects(tiny: Any) -> None:
    with tiny() as decoder:
        generator, search = Sample(legal=True), BFS(thoughts=6, breadth=6)
        solution = solve(Pegs, "never", decoder=decoder, search=search, generator=generator, evaluator="random")
    assert solution.parse_failures == 0
    written = {call.output for calls in solution.tree.calls.values() for call in calls}
    assert written == {move(*pegs) for pegs in ("ab", "ac", "ca", "cb")}
    assert all(not solution.tree.children(node) for node in solution.tree if node.world == "b")


def test_choices_that_continue_a_text_are_its_next_line(scripted: Any) -> None:
    templates = {"thought": "{% block assistant %}Move 1:{% endblock %}", "answer": "end"}
    task = subclass(templates=templates, schemas={}, actions=lambda self, state: ["x", "y"])
    decoder = scripted({"Move 1:": [" x\n"]})
    solution = solve(
        task, "q", decoder=decoder, search="bfs:thoughts=1", generator=Sample(legal=True), evaluator="random"
    )
    assert decoder.requests[0].constraint == Constraint(choices=(" x\n", " y\n"))
    assert solution.tree[1].thought.text == "x"


def test_a_state_without_actions_is_a_dead_end_without_a_call(scripted: Any) -> None:
    task = subclass(Pegs, actions=lambda self, state: [])
    decoder = scripted({})
    solution = solve(
        task, "b", decoder=decoder, search="bfs:thoughts=2", generator=Sample(legal=True), evaluator="random"
    )
    assert (decoder.requests, len(solution.tree), solution.calls, solution.parse_failures) == ([], 1, 0, 0)


def test_legal_needs_actions(scripted: Any) -> None:
    with pytest.raises(TaskError, match="task Count has no `actions`: define it"):
        solve(Count, "q", decoder=scripted({}), generator="sample:legal=true", search="bfs", evaluator="random")


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ({"moev": Move}, r"Own.schemas\['moev'\] has no template: rename it"),
        ({"answer": object()}, r"Own.schemas\['answer'\] is <object object at .*: give a type of pydantic"),
        ({"answer": None}, r"Own.schemas\['answer'\] is None .*: give a type of pydantic, or a Constraint"),
        ({"answer": type("Odd", (), {})}, r"has no JSON schema|Unable to generate"),
        ({"answer": Constraint(regex="[")}, r"invalid regex"),
    ],
)
def test_an_invalid_schema_is_refused_before_the_search(schemas: Any, message: str, scripted: Any) -> None:
    decoder = scripted({})
    with pytest.raises(TaskError, match=message):
        solve(subclass(schemas=schemas), "q", decoder=decoder, search="bfs", evaluator="random")
    assert decoder.requests == []


def test_a_validator_that_rejects_is_a_parse_failure_and_one_that_raises_names_the_schema(scripted: Any) -> None:
    class Even(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def _even(cls, number: int) -> int:
            if number % 2:
                raise ValueError("odd")
            return {2: 2}[number]

    task = subclass(schemas={"thought": Even})
    options: dict[str, Any] = {"search": "bfs:thoughts=2", "evaluator": "random"}
    solution = solve(task, "q", decoder=scripted({"think": ['{"number": 1}', '{"number": 2}']}), **options)
    assert (len(solution.tree), solution.parse_failures) == (2, 1)
    with pytest.raises(TaskError, match=r"Own.schemas\['thought'\] raised KeyError: 4 for .*: fix the validator"):
        solve(task, "q", decoder=scripted({"think": ['{"number": 4}', ""]}), **options)


def test_continue_refuses_a_schema(scripted: Any) -> None:
    with pytest.raises(OptionError, match="writes a message in pieces, and Pegs has a schema for 'move'"):
        solve(Pegs, "b", decoder=scripted({}), search="bfs", generator="continue", evaluator="random")
