"""The search that answers the questions of other evaluation programs: Inspect and lm-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders.errors import TaskError
from tot.decoders.models.model_names import find_model
from tot.decoders.request import Message
from tot.solution import Solution
from tot.task.task import Task


def search_of(task: str, options: Mapping[str, Any]) -> tuple[Task, SearchConfig]:
    """Return a task with its search, by default a vote for `ask`. Raises TotError for an unknown name, also a model."""
    votes = {"search": "auto"} if task == "ask" and options.get("search") is None else {}
    config = SearchConfig.of(None, {**votes, **options}).exact()
    for model in config.model.weights.values():
        if isinstance(model, str | Path):
            find_model(model)
    suited = config.suited(task)
    config.parts(suited)
    return suited, config


async def answer(task: Task, config: SearchConfig, messages: Sequence[Message], options: Mapping[str, Any]) -> Solution:
    """Search for the reply to a conversation. Raises TaskError if it does not end with a question of the user."""
    role, text = (messages[-1].role, messages[-1].content) if messages else ("none", "")
    if role != "user" or not text.strip():
        raise TaskError(f"the last message is {text[:60]!r} of the role {role!r}: end with a question of the user")
    return await run_search(task.with_prompts(history=messages[:-1]), text, SearchConfig.of(config, options))
