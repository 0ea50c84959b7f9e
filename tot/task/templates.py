"""Prompt templates: Jinja in a sandbox, looked up for a task, rendered to chat messages.

Questions and model output are inserted as text and are never rendered as templates.
"""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from tot.decoders.errors import TaskError
from tot.decoders.request import Message
from tot.tree.thought import to_text

_LAST_BREAK = re.compile(r"\r?\n[ \t]*(?=\{%\s*endblock\b)")
_BREAK_AFTER = re.compile(r"(\{%-?\s*endblock\b[^%-]*)(?=%\}\r?\n)")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. It drops the line break before `{% endblock %}`, and keeps the one after it."""

    def preprocess(self, source: str, name: str | None = None, filename: str | None = None) -> str:
        source = _BREAK_AFTER.sub(r"\1+", str(source))
        source = _LAST_BREAK.sub("{#\n#}", source)  # a comment, so that lines keep their numbers
        return super().preprocess(source, name, filename)


class Templates:
    """A task's templates. Lookup order: inline templates, files beside the task, files in the package.

    The class comes before its base classes. `Task`, the last one, has the default templates.
    """

    def __init__(self, owner: type, inline: Mapping[str, str], kind: Literal["papers", "chat"] = "papers") -> None:
        """Find the templates of a task class; `inline` holds an object's inline templates.

        For "chat", files in the subfolder `chat` come first, then the default templates.
        """
        self.kind = kind
        self._task = owner.__name__
        classes: list[Any] = [cls for cls in owner.__mro__ if getattr(cls, "name", "")]
        self._inline: dict[str, str] = {}
        for cls in reversed(classes):
            self._inline |= cls.templates
        self._inline |= inline
        self._data: dict[str, Any] = {}
        folders = dict.fromkeys(folder for cls in classes for folder in _folders(cls))
        first = [*(str(Path(folder) / "chat") for folder in folders), *_folders(classes[-1])]
        self._folders = [*(first if kind == "chat" else ()), *folders]
        self._own = _folders(owner)
        self._default = _folders(classes[-1])[-1]
        self._environment = self._new_environment()

    def _new_environment(self) -> jinja2.Environment:
        return _Sandbox(
            loader=jinja2.ChoiceLoader([jinja2.DictLoader(self._inline), jinja2.FileSystemLoader(self._folders)]),
            undefined=jinja2.StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the picklable state. The process that unpickles it compiles the templates again."""
        return {name: value for name, value in vars(self).items() if name != "_environment"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._environment = self._new_environment()

    def __contains__(self, name: str) -> bool:
        """Return whether the template exists, valid or not."""
        try:
            self._template(name)
        except jinja2.TemplateNotFound:
            return False
        except jinja2.TemplateSyntaxError:  # `render` reports it
            pass
        return True

    def render(self, name: str, /, **variables: Any) -> tuple[Message, ...]:
        """Render template `name` to messages. Raises TaskError with the template, the line and the error."""
        try:
            texts = self._texts(self._template(name), variables)
        except jinja2.TemplateNotFound as error:
            missing = error.templates[0] if isinstance(error, jinja2.TemplatesNotFound) else error.name
            raise self._missing(name if missing == f"{name}.jinja" else missing) from None
        except jinja2.TemplateSyntaxError as error:
            raise TaskError(f"template {error.name}, line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TaskError(f"{_place(error, name)}: {error}") from None  # undefined or unsafe names, division by zero
        messages = tuple(Message(role=role, content=text) for role, text in texts if text)
        if not messages:
            raise TaskError(f"template {name} of task {self._task} rendered to empty text: give it some text")
        return messages

    def require(self, *names: str) -> None:
        """Raise TaskError for the first template that is missing."""
        for name in names:
            if name not in self:
                raise self._missing(name)

    def is_default(self, name: str) -> bool:
        """Return whether template `name` is the default of all tasks."""
        return str(Path(self._template(name).filename or "").parent) == self._default

    def _missing(self, name: object) -> TaskError:
        return TaskError(
            f"task {self._task} has no template {name!r}: define it in `templates`, or as a file in one of "
            f"{', '.join(self._own)}"
        )

    def data(self, name: str) -> Any:
        """Return the JSON file `name` from the template folders. It is read once."""
        if name not in self._data:
            source = f"{name}.json"
            try:
                text = self._environment.loader.get_source(self._environment, source)[0]  # type: ignore[union-attr]
                self._data[name] = json.loads(text)
            except jinja2.TemplateNotFound:
                raise TaskError(f"task {self._task} has no {source} in {', '.join(self._own)}") from None
            except ValueError as error:
                raise TaskError(f"{source} of task {self._task} is not JSON: {error}") from None
        return self._data[name]

    def _template(self, name: str) -> jinja2.Template:
        """Return an inline template or a file `name.jinja`; a file called "answer" beside a task may be anything."""
        return self._environment.get_template(name if name in self._inline else f"{name}.jinja")

    def _texts(self, template: jinja2.Template, variables: dict[str, Any]) -> list[tuple[str, str]]:
        context = template.new_context(variables)
        for role in ("system", "assistant"):  # the text beside these blocks is the user's
            context.blocks.setdefault(role, []).insert(0, lambda context: iter(()))
        user = "".join(template.root_render_func(context))
        # A template that extends another gets the other's blocks when it is rendered.
        system, assistant = (
            "".join(text for block in context.blocks[role][1:2] for text in block(context))
            for role in ("system", "assistant")
        )
        # The model continues the assistant's text, so its trailing whitespace matters.
        return [("system", system.strip()), ("user", user.strip()), ("assistant", assistant.lstrip())]


def _shown(value: Any) -> Any:
    """Return an object that a template prints as JSON."""
    return to_text(value) if isinstance(value, BaseModel | dict | list) else value


def joined(history: tuple[Message, ...], prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a prompt after earlier messages. Two system messages become one: most chat templates take no second."""
    first = prompt[0]
    if first.role != "system":
        return *history, *prompt
    if history and history[0].role == "system":
        first = first.model_copy(update={"content": f"{history[0].content}\n\n{first.content}"})
        history = history[1:]
    return first, *history, *prompt[1:]


def _folders(cls: Any) -> list[str]:
    """Return the template folders of one class."""
    packaged = str(files("tot.prompts") / cls.name)
    try:
        beside = Path(inspect.getfile(cls)).parent
    except (OSError, TypeError):  # a class typed into a notebook or a prompt has no file
        return [packaged]
    return [str(beside / cls.name), str(beside), packaged]


def _place(error: BaseException, name: str) -> str:
    """Return the template and the line of an error, from the code that jinja2 compiled."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        template = frame.f_globals.get("__jinja_template__")
        if isinstance(template, jinja2.Template):
            return f"template {template.name}, line {template.get_corresponding_lineno(line)}"
    return f"template {name}"
