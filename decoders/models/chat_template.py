"""Chat templates of models: Jinja2 in a sandbox, with the functions and settings that transformers gives them."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(template: str, **variables: Any) -> str:
    """Return the text of a chat template. Raises TemplateError and any other error of the template."""
    return _compiled(template).render({"tools": None, "documents": None, **variables})


@lru_cache
def variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads; none if it is malformed."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except TemplateError:
        return frozenset()


@lru_cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *arguments, **items: dict(*arguments, **items),
        "namespace": _Attributes,
    }
    return environment


class _Generation(Extension):
    """The block `{% generation %}`, which marks an assistant's text for training and is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Attributes(Namespace):
    """Jinja's `namespace`, without names that Python uses for itself: templates are untrusted."""

    def __init__(*arguments: Any, **items: Any) -> None:  # `self` may be the name of an attribute
        values = dict(*arguments[1:], **items)
        for name in values:
            _check_name(name)
        Namespace.__init__(arguments[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a chat template sets the attribute {name!r} of a namespace: names begin with a letter")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
