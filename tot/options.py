"""The options of a search as texts and numbers: what command lines take, and files keep to run a search again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tot.decoders.decoder import METHODS, REMOTE, Quantize
from tot.decoders.errors import OptionError, unknown

if TYPE_CHECKING:
    from tot.config import SearchConfig
    from tot.task.task import Task

LOADING = ("dtype", "device", "kv_budget", "quantize")
"""Model options that have a name of their own here; all others are decoder options."""
SAME = ("prompts", "max_tokens", "top_k", "top_p", "min_p", "seed", "reproducible")
"""What a SearchConfig has by the same name."""


class ModelOptions(BaseModel):
    """Which model decodes, how it is loaded, and by which decoder."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    model: str = Field(
        "smollm2-135m",
        description="A name (tot models), a hub id, a folder or a .gguf file; none for no model.",
    )
    decoder: str = Field("auto", description="A decoder, or purpose=decoder pairs (generate, evaluate, answer).")
    decoder_option: list[str] = Field(
        [], description="An option of the decoder, as name=value: k=4, k_config=2,2,1, draft=early-exit:6."
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="auto: bf16 where the machine computes in it."
    )
    quantize: Quantize = Field(
        "auto",
        description="gguf: weights as a .gguf file has them, in four to eight bits. int8-dynamic: in eight. Inputs are "
        "rounded to eight bits. For Llama-like models on CPUs. auto: gguf for such a file, where no dtype is given.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    kv_budget: str | None = Field(None, description="Store of keys and values, in tokens or bytes (1.5GiB).")

    @field_validator("decoder_option", "tool", mode="before", check_fields=False)
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A text is one of them."""
        return [value] if isinstance(value, str) else value

    @property
    def loading(self) -> dict[str, Any]:
        """What `load_decoder` is given for the model, where it is not the default."""
        return {name: value for name in LOADING if (value := getattr(self, name)) not in (None, "auto")}

    @property
    def decoder_options(self) -> dict[str, str]:
        """The decoder's own, by name. Raises OptionError for one that can't be read."""
        split = [option.partition("=") for option in self.decoder_option]
        for option, (name, equals, _) in zip(self.decoder_option, split, strict=True):
            if not (name.strip() and equals) or name.strip() in (*LOADING, "tokenizer"):
                raise OptionError(f"--decoder-option {option!r} can't be read: write NAME=VALUE, such as k=4")
        return {name.strip(): value.strip() for name, _, value in split}


class SearchOptions(ModelOptions):
    """How questions are searched, with which model: what `tot solve` and `tot eval` have in common."""

    search: str | None = Field(
        None,
        description="bfs, dfs, best-first, mcts, rap, refine, act, cot, self-consistency or best-of-n, with "
        "options after a colon: mcts:iterations=20,exploration=2. The task's own by default, as for the next two.",
    )
    generator: str | None = Field(
        None, description="Where thoughts come from: sample, continue, propose or enumerate, with options likewise."
    )
    evaluator: str | None = Field(
        None,
        description="How states are valued: likelihood, value, classify, vote, heuristic, prior, confidence, logprob, "
        "agreement, random or reward-model, with options likewise.",
    )
    tool: list[str] = Field(
        [], description="A function that the model may call: calculator, or path/to/file.py:name; once for each."
    )
    prompts: Literal["papers", "chat"] | None = Field(
        None,
        description="papers: few-shot prompts; chat: as a chat model is asked, in its own words. By default chat for "
        "models with a chat template.",
    )
    thoughts: int | None = Field(None, description="Thoughts proposed after each state (n).")
    breadth: int | None = Field(None, description="States kept at each level (b).")
    depth: int | None = Field(None, description="Depth of the tree (T); the task's own by default.")
    max_tokens: int | None = Field(None, ge=1, description="Most new tokens of any text.")
    temperature: float | None = Field(
        None, ge=0, description="Temperature of the thoughts, 0.7 by default; the papers use 1."
    )
    top_k: int | None = Field(None, ge=0, description="Draw from the k likeliest tokens; by default as the model says.")
    top_p: float | None = Field(
        None, description="Draw from the fewest tokens that hold this share; by default likewise."
    )
    min_p: float | None = Field(
        None, description="Leave out tokens below this share of the likeliest; by default likewise."
    )
    seed: int = Field(0, ge=0, description="Seed of the run.")
    budget_tokens: int | None = Field(None, ge=0, description="Stop after so many new tokens.")
    budget_forwards: int | None = Field(None, ge=0, description="Stop after so many forward passes.")
    budget_seconds: float | None = Field(None, ge=0, description="Stop after so many seconds of search.")
    budget_nodes: int | None = Field(None, ge=0, description="Stop after so many thoughts.")
    reproducible: bool = Field(False, description="Compute in float32: the same tree every time.")

    def opened(self, task: Task | type[Task] | str) -> tuple[Task, SearchConfig]:
        """The task with the prompts that it is asked with, and how to search. Raises TotError for what is not known."""
        from tot.config import SearchConfig  # here, as help and wrong options need none of it
        from tot.registry import parts_of

        config = SearchConfig(
            model=None if self.model == "none" else self.model,
            decoder=self._decoders(),
            budget={name: getattr(self, f"budget_{name}") for name in ("tokens", "forwards", "seconds", "nodes")},
            model_options=self.loading | self.decoder_options,
            **{name: getattr(self, name) for name in ("search", *SAME)},
        )
        task = config.suited(task)
        parts = parts_of(
            task,
            *(self.search, self.generator, self.evaluator),
            tools=self.tool,
            search_options={name: getattr(self, name) for name in ("thoughts", "breadth", "depth")},
            generator_options={"temperature": self.temperature},
        )
        return task, config.model_copy(update={**parts, "prompts": task.prompts})

    def _decoders(self) -> str | dict[str, str]:
        """The decoder's name, or names by purpose."""
        if "=" not in self.decoder:
            return _decoder(self.decoder)
        given = [pair.partition("=") for pair in self.decoder.split(",")]
        if not all(equals and name for _, equals, name in given):
            raise OptionError(f"--decoder {self.decoder!r} can't be read: write generate=NAME,evaluate=NAME")
        return {purpose.strip(): _decoder(name.strip()) for purpose, _, name in given}


def _decoder(name: str) -> str:
    if ".py:" not in name and name not in (*METHODS, *REMOTE):
        raise OptionError(unknown("decoder", name, (*METHODS, *REMOTE)))
    return name
