"""Tool calls: the forms in which models write them, as grammars of texts with calls, and back from such texts.

A chat template that writes a call in one of these forms also describes the tools and their results to the model. Models
without such a template, or that do not write its form, get our description of the tools, in plain messages. In a text,
everything before the first call is free.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic_core import from_json

from tot.decoders.constraint import Constraint
from tot.decoders.request import Function, Message, Request, ToolCall
from tot.decoders.thinking import FINAL, HARMONY

Role = Literal["system", "user"]
_NAME = "NAME"
_DECODER = json.JSONDecoder()
_FORM: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
MARKERS = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|constrain|>", "<|python_tag|>"))
"""Text of forms that is a control token in some models."""


@dataclass(frozen=True)
class CallForm:
    """The form of calls: `begin`, calls with `between` between them, `end`. A call is `head`, arguments, `tail`."""

    head: str
    tail: str
    trigger: str
    """The beginning of the first call, which no other text contains."""
    begin: str = ""
    between: str = ""
    end: str = ""
    several: bool = True
    """Whether a text may have several calls."""
    alone: bool = False
    """Whether calls have no text before them: only a text that begins with the trigger is a call."""
    answer: str = ""
    """The beginning of a text without calls."""
    tag: str = ""
    """A control token that the model may write before a call, whatever its chat template writes."""
    native: bool = True
    """Whether the model's chat template describes tools."""

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls."""
        texts = [self.head.replace(_NAME, call.name) + call.arguments + self.tail for call in calls]
        return self.begin + self.between.join(texts) + self.end

    def constraint(self, request: Request, control: Mapping[str, int]) -> Constraint:
        """Return the constraint to the texts that a request with tools allows. `control`: ids of control tokens."""

        control = control if self.native else {}
        markers = re.compile("(" + "|".join(map(re.escape, control)) + ")" if control else "(?!)")

        def literal(text: str) -> str:
            pieces = filter(None, markers.split(text))
            return " ".join(f"<[{control[piece]}]>" if piece in control else json.dumps(piece) for piece in pieces)

        named = request.tool_choice not in ("auto", "required")
        tools = [tool for tool in request.tools if not named or tool.name == request.tool_choice]
        several, more = self.several and request.parallel_tool_calls and not named, ""
        if several:
            # A blank between calls may also end the text: models write it before they decide.
            more = "(" + " | ".join(f"next_{i}" for i in range(len(tools))) + ")*"
            more += f" {literal(self.between)}?" * self.between.isspace()
        rules = [
            "start: " + "answer | " * (request.tool_choice == "auto") + "lead calls",
            "calls: (" + " | ".join(f"first_{i}" for i in range(len(tools))) + f") {more} {literal(self.end)}",
        ]
        for i, tool in enumerate(tools):
            head = self.head.replace(_NAME, tool.name)
            rules.append(f"first_{i}: {literal((self.begin + head).removeprefix(self.trigger))} call_{i}")
            rules += [f"next_{i}: {literal(self.between + head)} call_{i}"] * several
            rules.append(f"call_{i}: %json {json.dumps(arguments_schema(tool) | _FORM)} {literal(self.tail)}")
        lead = [literal(self.trigger)]
        if request.tool_choice == "auto" and request.constraint is None:
            # Without text before calls, the first character distinguishes a call from an answer.
            first = f"[^\\s{re.escape(self.trigger[0])}]" if self.alone and not self.answer else ""
            spelled = f" & ~/{re.escape(self.tag)}(.|\\n)*/" if self.tag else ""
            rules += [f"TEXT: /{first}(.|\\n)*/{spelled}", f"answer: {literal(self.answer)} TEXT{'?' * bool(first)}"]
            if not self.alone:
                rules.append(f"spelled[lazy]: TEXT {json.dumps(self.trigger)}")
                lead = ["spelled", *[f"TEXT {lead[0]}"] * (self.trigger in control)]
        elif request.tool_choice == "auto" and request.constraint is not None:
            schema = dict(request.constraint.json_schema or {}) | _FORM
            rules.append(f"answer: {literal(self.answer)} %json {json.dumps(schema)}")
        if self.tag in control:
            lead += [f"{literal(self.tag)} {one}" for one in lead]
        return Constraint(lark="\n".join([*rules, "lead: " + " | ".join(lead)]))

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text before the calls, and the calls, with new ids.

        A call whose arguments are cut is left out; if it is the only call, the returned text is the whole text.
        """
        content, calls = self.split(text)
        with suppress(ValueError):
            if calls:
                calls[-1].check()
            return content, calls
        return (content, calls[:-1]) if calls[1:] else (text, [])

    def split(self, text: str, final: bool = True) -> tuple[str, list[ToolCall]]:
        """Return the text before the calls, and the calls, with new ids. The last one may be cut.

        Without `final`, the text grows: its end that may begin a call is left out. A text of nothing but the JSON of
        calls, in a code fence or not, has calls in every form.
        """
        text = text.removeprefix(self.tag).removeprefix(self.answer)
        at = text.find(self.trigger)
        if at >= 0 and not (self.alone and text[:at].strip()):
            calls = list(self._calls(text, at))
            if calls or not final:
                return text[:at].rstrip(), calls
        if calls := _bare_calls(text) if final else []:
            return "", calls
        packed = _packed(text)
        if not final and any(begin.startswith(packed) or packed.startswith(begin) for begin in _BARE_CALLS):
            return "", []
        if not final:
            openings = [*filter(None, (self.trigger, self.answer, self.tag))]
            longest = min(len(text), max(map(len, openings)))
            held = next((k for k in range(longest, 0, -1) if any(one.startswith(text[-k:]) for one in openings)), 0)
            text = text[: len(text) - held].rstrip() if not self.alone or held == len(text) else text
        return text, []

    def _calls(self, text: str, at: int) -> Iterator[ToolCall]:
        while found := self._head.match(text, at):
            try:
                _, end = _DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                end = len(text)
            yield _new_call(found[1], text[found.end() : end])
            tail = self._tail.match(text, end)
            at = tail.end() if tail else len(text)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before = "|".join(_flexible(one) for one in (self.begin, self.between) if one.strip())
        return re.compile(rf"\s*(?:{before})?\s*{_flexible(self.head).replace(_NAME, '([a-zA-Z0-9_-]+)')}")

    @cached_property
    def _tail(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + _flexible(self.tail))


_HERMES = CallForm(
    '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>", between="\n"
)
_MISTRAL = CallForm(
    '{"name": "NAME", "arguments": ', "}", trigger="[TOOL_CALLS]", begin="[TOOL_CALLS][", between=", ", end="]"
)
_LLAMA = CallForm(
    '{"name": "NAME", "parameters": ', "}", trigger='{"name": "', several=False, alone=True, tag="<|python_tag|>"
)
_HARMONY = CallForm(
    f"{HARMONY}commentary to=functions.NAME <|constrain|>json<|message|>",
    "",
    trigger=f"{HARMONY}commentary to=functions.",
    several=False,
    alone=True,
    answer=FINAL,
)  # gpt-oss
FORMS = (
    _HERMES,  # Hermes, Qwen
    _MISTRAL,
    replace(_MISTRAL, begin="[TOOL_CALLS] ["),
    CallForm("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]"),  # Mistral since 2025
    _LLAMA,
)
TAGGED = replace(_HERMES, native=False)
"""The form of calls in the texts of replies of servers."""
OWN = CallForm(
    '{"name": "NAME", "arguments": ', "}", trigger='[{"name": "', begin="[", between=", ", end="]", native=False
)
"""The form for other models: a JSON list, which all models that write JSON can write."""
_BARE_CALLS = [f'{fence}{bracket}{{"name":"' for fence in ("", "```", "```json") for bracket in ("", "[")]
"""Beginnings, without blanks, of texts that are nothing but the JSON of calls."""
_OPENING = 100
"""Characters within which such a beginning ends, with line breaks and indentation."""
_KEYS = (["name", "arguments"], ["name", "parameters"])
TRIAL = Message(role="user", content="What is the weather in Paris?")
"""A question that the model answers with a call of `TRIAL_TOOL`."""
TRIAL_TOOL = Function(
    name="weather",
    description="Return the weather in a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
_PROBE = ToolCall(name="probe", arguments='{"a": "b"}', id="probe")
_ABOUT = (
    "You can call functions. Each line describes one, with the JSON schema of its parameters:\n{tools}\n\nTo call "
    "functions, write only a JSON list of calls, one call for each thing that is asked:\n"
    '[{{"name": "NAME", "arguments": {{...}}}}, ...]\nThe results follow. Answer without a call if none is needed.'
)


def find_form(render: Callable[[list[dict[str, Any]], Any], str], control: Mapping[str, int]) -> CallForm:
    """Return the form in which a chat template writes calls. `render` returns its text; "" if it refuses."""
    tool = as_json(Function(name=_PROBE.name, description="Probe."))
    messages = (Message(role="user", content="x"), Message(role="assistant", content="", tool_calls=(_PROBE,)))
    text, plain = (render(as_dicts(messages), tools) for tools in ([tool], None))
    if text == plain:  # it does not describe tools
        return OWN
    if HARMONY in control:
        return _HARMONY
    known = (form for form in FORMS if form.begin + form.head.replace(_NAME, _PROBE.name) + _PROBE.arguments in text)
    return next(known, OWN)


def as_json(tool: Function) -> dict[str, Any]:
    """Return a tool as chat templates read it."""
    about = {"name": tool.name, "description": tool.description, "parameters": arguments_schema(tool)}
    return {"type": "function", "function": about}


def call_json(call: ToolCall, arguments: str) -> dict[str, Any]:
    """Return a call with these arguments as OpenAI's protocol has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them. Calls get numbers of nine digits, which all templates accept."""
    numbers: dict[str, str] = {}
    names: dict[str, str] = {}
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning_content:
            turn["reasoning_content"] = message.reasoning_content
        for call in message.tool_calls:
            numbers[call.id], names[call.id] = f"{len(numbers):09}", call.name
            function = {"name": call.name, "arguments": from_json(call.arguments)}
            turn.setdefault("tool_calls", []).append({"id": numbers[call.id], "type": "function", "function": function})
        if message.role == "tool":
            number = numbers.get(message.tool_call_id, "0" * 9)
            turn |= {"tool_call_id": number, "name": names.get(message.tool_call_id, "")}
        turns.append(turn)
    return turns


def as_plain(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], role: Role) -> tuple[Message, ...]:
    """Return messages with calls, results and tools as text, for a chat template that knows none of them.

    The first message with this role, the system's or a user's, describes the tools.
    """
    plain: list[Message] = []
    after_result = False
    for message in messages:
        speaker, content = message.role, message.content
        if speaker == "tool":
            speaker, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if after_result:
                content = f"{plain.pop().content}\n{content}"
        if message.tool_calls:
            content = "\n".join(filter(None, (content, OWN.write(message.tool_calls))))
        after_result = message.role == "tool"
        plain.append(message.model_copy(update={"role": speaker, "content": content, "tool_calls": ()}))
    if tools:
        about = _ABOUT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if plain[0].role == role:
            about = f"{about}\n\n{plain.pop(0).content}"
        plain.insert(0, Message(role=role, content=about))
    return tuple(plain)


class CallStream:
    """Splits a growing text into the text before its calls, and pieces of the calls."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._text = ""
        self._sent = 0
        self._calls: list[ToolCall] = []
        """With the arguments that were returned."""

    def feed(self, piece: str, final: bool = False) -> Iterator[tuple[str, ToolCall | None]]:
        """Yield (text, None) for text, and (piece of the arguments, call) for a call, which begins with ""."""
        self._text += piece
        content, calls = self._form.split(self._text, final)
        if new := content[self._sent :]:
            self._sent = len(content)
            yield new, None
        for i, call in enumerate(calls):
            if i == len(self._calls):
                self._calls.append(call.model_copy(update={"arguments": ""}))
                yield "", self._calls[i]
            if rest := call.arguments[len(self._calls[i].arguments) :]:
                self._calls[i] = self._calls[i].model_copy(update={"arguments": call.arguments})
                yield rest, self._calls[i]


def arguments_schema(tool: Function) -> dict[str, Any]:
    """Return the schema of the arguments. Names of arguments that it does not list are excluded."""
    given = {"type": "object", "properties": {}, **tool.parameters}
    if not given.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        given = {"additionalProperties": False, **given}
    return given


def _packed(text: str) -> str:
    """Return the beginning of a text without blanks; a stream asks for it with every piece."""
    return "".join(text[:_OPENING].split())


def _bare_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text that is nothing but their JSON; empty for any other text."""
    if not _packed(text).startswith(tuple(_BARE_CALLS)):
        return []
    fenced = re.fullmatch(r"```(?:json)?(.*)```", text.strip(), re.DOTALL)
    with suppress(ValueError):
        given = from_json(fenced[1] if fenced else text)
        calls = given if isinstance(given, list) else [given]
        if all(isinstance(call, dict) and [*call] in _KEYS for call in calls):
            pairs = [call.values() for call in calls]
            if all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in pairs):
                return [_new_call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in pairs]
    return []


def _new_call(name: str, arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=f"call_{secrets.token_hex(12)}")


def _flexible(text: str) -> str:
    """Return an expression for a text in which blanks are optional."""
    return re.sub(r"(?:\\\s)+", r"\\s*", re.escape(text))
