"""A solver of Inspect (inspect-ai): `inspect eval task.py --solver tot/search --model none/none`."""

from __future__ import annotations

from typing import Any

from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.solver import Generate, Solver, TaskState, multiple_choice, solver

from tot.decoders.errors import TaskError, TotError
from tot.decoders.request import Message
from tot.evaluation.harness import answer, search_of
from tot.llm.models import value_text
from tot.running import in_own_thread
from tot.task.task import answer_text


@solver(name="search")  # type: ignore[untyped-decorator]
def tot_search(task: str = "ask", **options: Any) -> Solver:
    """Answer each sample with a search. Concurrent samples share forward passes, and each epoch has its own seed.

    Samples with choices get the prompt of `multiple_choice()`, for the scorer `choice()`. `state.metadata["tot"]` gets
    the votes and the certainty, and `state.store` the key "tot" with the tree, in the format of `tot report`.

    Args:
        task: The name of a task, or "path/to/file.py:ClassName".
        **options: Fields of `SearchConfig`, such as model, search, until, temperature and max_tokens.
    """
    try:
        suited, config = search_of(task, options)
    except TotError as error:
        raise PrerequisiteError(f"tot/search: {error}") from None
    name = f"tot/{value_text(config.model.by_purpose['generate'].model)}"

    async def respond(state: TaskState, **given: Any) -> TaskState:
        own = {name: value for name, value in given.items() if value is not None}
        solution = await in_own_thread(
            answer(suited, config, _messages(state), {"seed": config.seed + state.epoch - 1, **own})
        )
        state.output = ModelOutput.from_content(name, "" if solution.answer is None else answer_text(solution.answer))
        tokens = {"input_tokens": solution.usage.prompt_tokens, "output_tokens": solution.usage.new_tokens}
        state.output.usage = ModelUsage(**tokens, total_tokens=sum(tokens.values()))
        state.messages.append(state.output.message)
        state.metadata["tot"] = solution.result()
        state.store.set("tot", solution.to_json())
        return state

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await (multiple_choice()(state, respond) if state.choices else respond(state))

    return solve


def _messages(state: TaskState) -> list[Message]:
    parts = [part for message in state.messages if not isinstance(message.content, str) for part in message.content]
    other = {part.type for part in parts} - {"text"} | ({"tools"} if state.tools else set())
    if other:
        raise TaskError(f"sample {state.sample_id} has {min(other)}, and a search answers text: use another solver")
    return [Message(role=message.role, content=message.text) for message in state.messages]
