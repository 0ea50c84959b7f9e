"""How servers differ from OpenAI's protocol. A server is known by the owner of the models that it lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Server:
    """The differences of one kind of server."""

    title: str
    owner: str = ""
    """`owned_by` of the models that it lists."""
    choices: tuple[Literal["next", "echo", "server"], ...] = ()
    """Ways to score choices exactly, the best first. Without any, the model writes a choice."""
    filters: bool | None = True
    """Whether `top_k` and `min_p`, which OpenAI's protocol lacks, have an effect; None if that is not known."""
    continues: bool = True
    """Whether it is known to continue the last message, of the assistant, instead of starting a new reply."""
    continue_fields: bool = False
    """Whether it needs `continue_final_message` for that."""
    reports_stops: bool = False
    """Whether a reply has the stop string that ended the text."""
    thinking: tuple[str, ...] = ("reasoning_effort",)
    """Its fields that say how the model thinks: an effort, variables of the chat template, a maximum of tokens."""
    closes: bool = False
    """Whether it ends thinking at its maximum of tokens."""

    def rows(self) -> list[tuple[str, str]]:
        """Return the name of each difference and its effect, for users."""
        filters = {True: "used", False: "refused: leave them out", None: "sent; the server may ignore them"}
        continued = "used" if self.continues else "a new reply may start; generator=continue is refused"
        pieces = "used" if self.reports_stops else "the server writes whole texts, which are split here"
        return [
            ("server", self.title),
            ("top_k, min_p", filters[self.filters]),
            ("choices", "scored exactly" if self.choices else "the model writes a choice"),
            ("continued assistant message", continued),
            ("stop strings of generator=continue", pieces if self.continues else "refused"),
            ("tools", f"need {options}" if (options := TOOL_OPTIONS.get(self.title)) else "sent"),
            ("thinking", f"sent as {', '.join(self.thinking)}"),
            ("thinking that spends its budget", self._ends()),
        ]

    def _ends(self) -> str:
        if self.closes:
            return "closed by the server"
        return "closed here" if self.continue_fields else "dropped: the answer is requested without thinking"


_TEMPLATE = "reasoning_effort", "chat_template_kwargs"
_OWN = "thinking", "chat_template_kwargs"
BUDGETS = "thinking_budget_tokens", "reasoning_budget_tokens"
"""llama-server's fields for the tokens of the thinking, in older and in newer versions."""
SERVERS = {
    "vllm": Server("vLLM", "vllm", ("next", "echo"), continue_fields=True, reports_stops=True, thinking=_TEMPLATE),
    "sglang": Server("SGLang", "sglang", ("echo",), continue_fields=True, reports_stops=True, thinking=_TEMPLATE),
    "llama-server": Server("llama-server", "llamacpp", thinking=_TEMPLATE + BUDGETS, closes=True),
    "ollama": Server("Ollama", "library", filters=False),
    "tot": Server("tot serve", "", ("server",), continue_fields=True, reports_stops=True, thinking=_OWN, closes=True),
    "openai": Server("a server with OpenAI's protocol", filters=None, continues=False),
}
"""Servers by the name that the option `server` takes; "openai" is any other one."""
TOOL_OPTIONS = {
    "vLLM": "--enable-auto-tool-choice --tool-call-parser NAME",
    "SGLang": "--tool-call-parser NAME",
    "llama-server": "--jinja",
}
"""Options with which servers, by title, have tools."""


def recognized(models: Sequence[Mapping[str, Any]]) -> Server:
    """Return the kind of a server by the models that it lists."""
    if any("decoder" in tot for model in models if isinstance(tot := model.get("tot"), Mapping)):
        return SERVERS["tot"]
    owners = [str(model.get("owned_by")) for model in models]
    return next((server for server in SERVERS.values() if server.owner and server.owner in owners), SERVERS["openai"])
