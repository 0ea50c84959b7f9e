"""Templates: their lookup, the resulting messages, the sandbox, and errors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import State, Task, Thought
from tot.decoders import Message, TaskError
from tot.registry import load_task
from tot.tasks.gsm8k import GSM8K


def task_with(**templates: str) -> Task:
    return type("Made", (Task,), {"templates": templates})()


def ask(
    task: Task, template: str = "thought", question: str = "q", *thoughts: str, **extra: Any
) -> list[tuple[str, str]]:
    state = State(question=question, thoughts=tuple(Thought(parts={"thought": thought}) for thought in thoughts))
    return [(message.role, message.content) for message in task.prompt(template, state, **extra)]


# -- messages ---------------------------------------------------------------------------------------------------


def test_blocks_become_messages_in_chat_order_and_the_last_is_a_prefix() -> None:
    task = task_with(
        thought="{% block assistant %}A{{ question }} {% endblock %}"
        "{% block user %}\nU{{ question }}\n{% endblock %}{% block system %}S{% endblock %}"
    )
    assert ask(task) == [("system", "S"), ("user", "Uq"), ("assistant", "Aq ")]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("Be precise.\n{% block user %}{{ question }}{% endblock %}", [("user", "Be precise.\nq")]),
        ("{% block user %}{{ question }}{% endblock %}\nBe brief.", [("user", "q\nBe brief.")]),
        ("{% block system %}S{% endblock %}\n{{ question }}", [("system", "S"), ("user", "q")]),
        ("{{ question }}{% block assistant %}A: {% endblock %}", [("user", "q"), ("assistant", "A: ")]),
    ],
)
def test_text_beside_blocks_is_the_users(template: str, messages: list[tuple[str, str]]) -> None:
    assert ask(task_with(thought=template)) == messages


@pytest.mark.parametrize(
    ("block", "content"),
    [
        ("{% block assistant %}\nA:\n{% endblock %}", "A:"),
        ("{% block assistant %}A: {% endblock %}", "A: "),
        ("{% block assistant %}A\n\n\n{% endblock %}", "A\n\n"),
        ("{% block assistant %}A\n\n  {%- endblock %}", "A"),
        ("{% block assistant %}{{ question }}{% endblock assistant %}", "said\n\n"),
        ("{% block assistant %}\r\n{{ question }}\r\n  {% endblock %}", "said\n\n"),
    ],
)
def test_the_assistants_text_ends_as_written(block: str, content: str) -> None:
    """The line break before the end of the block belongs to the file."""
    ((role, text),) = ask(task_with(thought=block), question="said\n\n")
    assert (role, text) == ("assistant", content)


def test_an_empty_block_is_no_message() -> None:
    task = task_with(
        thought="{% block user %}U{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.thought }} {% endfor %}{% endblock %}"
    )
    assert ask(task) == [("user", "U")]
    assert ask(task, "thought", "q", "x") == [("user", "U"), ("assistant", "x ")]


def test_templates_include_and_extend_each_other() -> None:
    task = task_with(
        head="Head of {{ question }}.",
        base="{% block system %}S{% endblock %}{% block user %}{% endblock %}",
        thought="{% extends 'base' %}{% block user %}{% include 'head' %} Go{% endblock %}",
        value="{% extends 'base' %}{% block user %}{{ super() }}V{% endblock %}",
    )
    assert ask(task) == [("system", "S"), ("user", "Head of q. Go")]
    assert ask(task, "value") == [("system", "S"), ("user", "V")]


def test_a_thought_template_may_not_shadow_a_variable() -> None:
    with pytest.raises(TaskError, match=r"Made has a thought template named 'thoughts'.*rename it"):
        task_with(thought="x").prompt("thought", State(question="q"), idea="x", thoughts="y")
    assert ask(task_with(thought="{{ name }} {{ state }}"), name="n", state="s") == [("user", "n s")]


# -- lookup -----------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Any]:
    """A user module with a task, imported from a file."""
    (tmp_path / "riddles.py").write_text("from tot import Task\n\n\nclass HardRiddle(Task):\n    pass\n")
    spec = importlib.util.spec_from_file_location("riddles_of_a_test", tmp_path / "riddles.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    yield made
    del sys.modules[spec.name]


def test_a_task_is_named_in_snake_case_after_its_class(module: Any) -> None:
    assert module.HardRiddle.name == "hard_riddle"
    assert type("Own", (Task,), {"name": "other"}).name == "other"
    assert type("Below", (GSM8K,), {}).name == "below"


def test_a_file_without_the_suffix_is_no_template(module: Any, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("notes of mine")
    assert "answer" not in module.HardRiddle().prompts
    with pytest.raises(TaskError, match=r"task HardRiddle has no template 'answer': define it"):
        ask(module.HardRiddle(), "answer")


def test_tasks_in_two_files_of_one_name_render_the_templates_of_their_own_folder(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "riddles.py").write_text("from tot import Task\n\n\nclass Riddle(Task):\n    pass\n")
        (tmp_path / folder / "thought.jinja").write_text(f"thought of {folder}")
        (tmp_path / folder / "value.jinja").write_text(f"value of {folder}")
    first, second = (load_task(f"{tmp_path}/{folder}/riddles.py:Riddle") for folder in ("a", "b"))
    again = type(first)()  # finds its file by the name of its module
    assert [ask(task) for task in (first, second, again)] == [
        [("user", f"thought of {folder}")] for folder in ("a", "b", "a")
    ]
    assert [ask(task, "value") for task in (again, second)] == [[("user", "value of a")], [("user", "value of b")]]


def test_templates_are_files_beside_the_task_and_its_own_folder_is_first(module: Any, tmp_path: Path) -> None:
    (tmp_path / "hard_riddle").mkdir()
    (tmp_path / "thought.jinja").write_text("beside")
    (tmp_path / "value.jinja").write_text("value beside")
    (tmp_path / "hard_riddle" / "thought.jinja").write_text("in the folder, {% include 'tail.jinja' %}")
    (tmp_path / "tail.jinja").write_text("tail: {{ question }}")
    assert ask(module.HardRiddle()) == [("user", "in the folder, tail: q")]
    assert ask(module.HardRiddle(), "value") == [("user", "value beside")]


def test_inline_templates_override_files_and_may_include_them(module: Any, tmp_path: Path) -> None:
    (tmp_path / "thought.jinja").write_text("a file")
    (tmp_path / "value.jinja").write_text("{% include 'thought' %}!")
    (tmp_path / "tail.jinja").write_text("a file's tail")
    inline = {"thought": "inline, {% include 'thought.jinja' %}, {% include 'tail.jinja' %}", "tail.jinja": "own tail"}
    task = type("Inline", (module.HardRiddle,), {"templates": inline, "__module__": module.__name__})()
    assert ask(task) == [("user", "inline, a file, own tail")]
    assert ask(task, "value") == [("user", "inline, a file, own tail!")]


def test_a_renamed_subclass_inherits_templates_and_data(module: Any, tmp_path: Path) -> None:
    below = type("Below", (GSM8K,), {"__module__": module.__name__})()
    state = below.start("How many?")
    assert below.prompt("answer", state) == GSM8K().prompt("answer", state)
    assert below.example() == GSM8K().example()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "head.jinja").write_text("Mine: {{ question }}")
    (tmp_path / "questions.json").write_text('[{"question": "What?"}]')
    assert ask(type(below)(), "sub_question")[0] == ("user", "Mine: q")  # included by the parent's own template
    assert type(below)().example() == "What?"


def test_a_subclass_inherits_inline_templates(module: Any, tmp_path: Path) -> None:
    (tmp_path / "hard_riddle").mkdir()
    (tmp_path / "hard_riddle" / "vote.jinja").write_text("parent's file")
    parent = type("HardRiddle", (module.HardRiddle,), {"templates": {"thought": "parent's", "value": "parent's value"}})
    task = type("Easy", (parent,), {"templates": {"thought": "own"}, "__module__": "typed_into_a_notebook"})()
    rendered = [ask(task, name)[0][1] for name in ("thought", "value", "vote")]
    assert rendered == ["own", "parent's value", "parent's file"]
    assert "chain" not in task.prompts


def test_a_class_without_a_file_has_its_inline_templates(module: Any) -> None:
    space: dict[str, Any] = {"__name__": "typed_into_a_notebook", "Task": Task}
    exec("class Typed(Task):\n    templates = {'thought': 'T {{ question }}'}", space)
    assert ask(space["Typed"]()) == [("user", "T q")]


def test_a_missing_template_is_named_with_the_searched_places(module: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as error:
        ask(module.HardRiddle())
    message = str(error.value)
    assert message.startswith(
        "task HardRiddle has no template 'thought': define it in `templates`, or as a file in one of"
    )
    assert f"{tmp_path / 'hard_riddle'}, {tmp_path}, " in message
    assert message.endswith("hard_riddle")  # the package's folder


def test_data_is_json_beside_the_templates(module: Any, tmp_path: Path) -> None:
    (tmp_path / "questions.json").write_text('[{"question": "What é?"}]', encoding="utf-8")
    task = module.HardRiddle()
    assert task.example() == "What é?"
    (tmp_path / "broken.json").write_text("[1,")
    with pytest.raises(TaskError, match=r"broken\.json of task HardRiddle is not JSON"):
        task.prompts.data("broken")
    with pytest.raises(TaskError, match=rf"task HardRiddle has no absent\.json in .*{tmp_path.name}"):
        task.prompts.data("absent")


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("one\ntwo\n{{ missing }}", "template thought, line 3: 'missing' is undefined"),
        ("{{ question.nothing }}", "template thought, line 1: 'str object' has no attribute 'nothing'"),
        ("\n{{ thoughts[-1].thought }}", "template thought, line 2: list object has no element -1"),
        ("{% block user %}\n\n{{ missing }}\n{% endblock %}", "template thought, line 3: 'missing' is undefined"),
        (
            "{% block user %}u{% endblock %}\n{% block assistant %}{{ missing }}{% endblock %}",
            "template thought, line 2: 'missing'",
        ),
        ("{% include 'inner' %}", "template inner, line 2: 'deep' is undefined"),
        ("{% block user %}{% include 'inner' %}{% endblock %}", "template inner, line 2: 'deep' is undefined"),
        ("a\n{{ 1 / 0 }}", "template thought, line 2: division by zero"),
        ("a\n{{ question + 1 }}", "template thought, line 2: can only concatenate str"),
        ("{{ question.upper(1) }}", "template thought, line 1: str.upper"),
        ("a\nb\n{% if %}", "template thought, line 3: Expected an expression"),
        ("a\n{% for x in y %}", "template thought, line 2: Unexpected end of template"),
        ("a\n{{ question | shout }}", "template thought, line 2: No filter named 'shout'"),
        ("{% include 'unclosed' %}", "template unclosed, line 2: "),
    ],
)
def test_an_error_in_a_template_names_its_line(template: str, message: str) -> None:
    task = task_with(thought=template, inner="\n{{ deep }}", unclosed="\n{{ question")
    with pytest.raises(TaskError) as error:
        ask(task)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template", ["", " \n", "{% if thoughts %}x{% endif %}", "{% block user %} {% endblock %}", "{# x #}"]
)
def test_an_empty_prompt_is_rejected(template: str) -> None:
    with pytest.raises(TaskError, match="template thought of task Made rendered to empty text: give it some text"):
        ask(task_with(thought=template))


# -- the sandbox ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ question.__class__ }}",
        "{{ question.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(question) }}",
        "{{ thoughts.append(1) }}",
        "{{ range(100001) | length }}",
    ],
)
def test_a_template_can_access_only_its_variables(template: str) -> None:
    with pytest.raises(TaskError, match=r"^template thought, line 1: .*(unsafe|not safely|Range too big|restricted)"):
        ask(task_with(thought=template))


@given(st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("{}%#\n\"'<&"), min_size=1))
def test_any_question_is_rendered_verbatim(question: str) -> None:
    task = task_with(thought="[{{ question }}]")
    assert task.prompt("thought", State(question=question)) == (Message(role="user", content=f"[{question}]"),)


@pytest.mark.parametrize("question", ["", " ", "\n\t ", "\u2003"])
def test_an_empty_question_is_rejected(question: str) -> None:
    with pytest.raises(TaskError, match="the question is empty: give some text"):
        task_with().start(question)


def test_a_question_that_is_not_a_text_is_rejected() -> None:
    with pytest.raises(TaskError, match="not Unicode text"):
        task_with().start("caf\udce9")
