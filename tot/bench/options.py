"""The options of each benchmark, which are the flags of `tot bench` too. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tot.decoders.errors import OptionError
from tot.decoders.models.model_names import Quantize

KConfig = Annotated[str, Field(pattern=r"^[1-9]\d?(-[1-9]\d?){0,15}$")]
Counts = Annotated[tuple[PositiveInt, ...], AfterValidator(lambda counts: tuple(sorted(set(counts))))]
"""From the least, each once."""


class BenchOptions(BaseModel):
    """What all benchmarks are asked. Options that hold several values also take a text of them, with commas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("smollm2-135m", description="A name, a hub id, a folder or a .gguf file.")
    out: Path | None = Field(None, description="Write the numbers to this .json file as they come, or go on with it.")
    markdown: bool = Field(False, description="Print the tables as Markdown.")

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        several = get_origin(cls.model_fields[info.field_name or ""].annotation) is tuple
        return tuple(part.strip() for part in value.split(",")) if several and isinstance(value, str) else value

    @property
    def asked(self) -> dict[str, Any]:
        """What tells one run's numbers from another's, as JSON data."""
        return self.model_dump(mode="json", exclude={"out", "markdown"})


class Computed(BenchOptions):
    """What is asked of those that say how the model is to be computed."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Number format.")
    quantize: Quantize = Field("auto", description="As for tot eval.")

    @property
    def computed(self) -> dict[str, Any]:
        """As options of `load_decoder`."""
        return {"dtype": self.dtype, "quantize": self.quantize}


class InRounds(BenchOptions):
    """What is asked of those that take turns at the same work."""

    rounds: int = Field(3, ge=1, description="Rounds; the sides take turns and medians are compared.")


class DecodersOptions(Computed):
    """Decoding methods side by side on whole searches, as in SEED's tables: serial, in rounds and packed."""

    questions: list[str] = Field(
        ["gsm8k", "creative_writing", "blocksworld"],
        description="TASK=FILE, or a task's own questions by its name alone; once for each.",
    )
    limit: int = Field(10, ge=1, description="Questions of each task.")
    draft: str = Field("lookup", description="What drafts, as for tot solve's decoder option of that name.")
    k_configs: tuple[KConfig, ...] = Field(
        ("1-1-1", "2-1-1", "2-2-1", "4-2-1"), description="Candidates at each position drafted, with commas."
    )
    parts: tuple[Literal["serial", "rounds", "packed"], ...] = Field(
        ("serial", "rounds", "packed"), description="How texts are decoded, with commas."
    )
    temperatures: tuple[float, ...] = Field((0.2, 1.0), description="Of thoughts and evaluations, with commas.")
    samples: int = Field(3, ge=1, description="Thoughts after each state (n).")
    picture: Path | None = Field(
        None, description="Draw speed over acceptance, a file for each temperature, which its name gets."
    )


class FastCoTBench(Computed):
    """FastCoT against whole rationales: time, accuracy, answers unchanged, by iteration and at the calibrated cap."""

    parts: tuple[Literal["answers", "masks", "times"], ...] = Field(
        ("answers", "masks", "times"),
        description="With commas: answers after parts of rationales, answers where parts are masked, and times.",
    )
    data: str = Field(description="Questions with answers, as for tot eval.")
    task: str = Field("multiple_choice", description="What they are questions of.")
    prompts: Literal["chat", "papers"] = Field("papers", description="As for tot eval.")
    limit: int = Field(100, ge=4, description="Questions, half to calibrate on, half to test.")
    timed: int = Field(16, ge=1, description="Questions of the latter that are timed.")
    max_tokens: int = Field(128, ge=2, description="Most tokens of a rationale.")
    seeds: int = Field(20, ge=1, description="Random ways of masking parts of rationales.")


class PDOSBench(Computed):
    """Parallel steps against normal decoding, skeleton-of-thought and chain-of-draft: quality, speed, memory."""

    prompt: Literal["skeleton", "example", "both"] = Field(
        "both", description="What says how steps are written: the skeleton prompt, a worked example, or both."
    )
    tasks: tuple[Literal["retrieval", "planning", "qa"], ...] = Field(
        ("retrieval", "planning", "qa"), description="With commas; qa where --data is."
    )
    people: tuple[Annotated[int, Field(ge=4, le=100)], ...] = Field(
        (10,), description="Retrieval: how many people, 4 to 100, with commas."
    )
    aspects: tuple[Annotated[int, Field(ge=2, le=10)], ...] = Field(
        (2, 4, 6, 8, 10), description="Planning: how many aspects, 2 to 10, with commas."
    )
    data: Path | None = Field(
        None,
        description="QA: a .jsonl file in the format of LongBench's 2WikiMultihopQA, with input, context, answers.",
    )
    judge: str | None = Field(
        None, description="The model that marks plans and answers from 1 to 5; by default the one that writes them."
    )
    rounds: int = Field(3, ge=1, description="Questions of each kind; the sides take turns at each.")

    @model_validator(mode="after")
    def _documents(self) -> PDOSBench:
        if self.tasks == ("qa",) if self.data is None else "qa" not in self.tasks:
            raise OptionError("the task qa asks about documents of yours: give both, --data and qa among --tasks")
        return self


class PeersOptions(InRounds):
    """Branches and whole searches, here and in transformers, llama.cpp and vLLM."""

    parts: tuple[Literal["decode", "limit", "tree"], ...] = Field(
        ("decode", "limit", "tree"), description="With commas: decode, limit, tree."
    )
    sides: tuple[Literal["none", "int8-dynamic", "batched", "serial", "assisted", "llama", "vllm"], ...] = Field(
        ("none", "int8-dynamic", "batched", "serial", "assisted", "llama", "vllm"),
        description="What to compare with, with commas: none and int8-dynamic (as --quantize of tot eval), batched, "
        "serial, assisted (all transformers), llama, vllm.",
    )
    branches: Counts = Field((1, 3, 5, 15, 32, 64), description="Samples of one prompt, with commas.")
    prompt_tokens: int = Field(1000, ge=16, description="Tokens of the prompt that branches go on from.")
    new_tokens: int = Field(64, ge=1, description="New tokens of each of them.")
    problems: int = Field(8, ge=1, description="Problems that are searched, one a round.")
    data: Path | None = Field(None, description="GSM8K problems, as for tot eval; the task's own without.")
    patience: float = Field(
        60.0, ge=0, description="Seconds: what will take longer is done once; three times as long, not at all."
    )
    vllm: Path = Field(Path(".venv-vllm/bin/python"), description="The Python that has vLLM (make peers).")
    llama: Path = Field(Path(".venv-llama/bin/python"), description="The Python with llama-cpp-python (make peers).")


class QualityOptions(BenchOptions):
    """Whether searches answer better than asking plainly, with what each takes; and which evaluators tell."""

    data: str = Field(description="Questions with answers, as for tot eval.")
    task: str = Field("gsm8k", description="What they are questions of.")
    limit: int = Field(100, ge=1, description="Questions.")
    offset: int = Field(0, ge=0, description="Rows to leave out before them.")
    way: list[str] = Field(
        [
            "plain: search=cot",
            "votes: search=self-consistency:samples=8",
            "tree: search=bfs:thoughts=2,breadth=4,aggregate=majority; evaluator=logprob",
        ],
        description="A way of answering, as 'NAME: option=value; option=value', with options of tot eval; once for "
        "each. The others are compared with the first.",
    )
    mix: list[str] = Field([], description="Ways whose solutions also vote together, in turns: 'votes+programs'.")
    folder: Path = Field(Path("quality"), description="Where each way's evaluation is kept, and gone on with.")
    concurrency: int = Field(16, ge=1, description="Searches at once.")
    judge: str | None = Field(
        None,
        description="A model that says which of two answers is better, each way's or the first way's; 'MODEL; "
        "option=value' with options of tot eval.",
    )
    evaluators: tuple[str, ...] = Field((), description="State evaluators to judge pieces of solutions, with commas.")
    judged: int = Field(
        100, ge=1, description="Questions whose solutions, by the way that draws most, are cut into such pieces."
    )
    timed: int = Field(0, ge=0, description="Questions to be timed one at a time, the ways in turns.")
    picture: Path | None = Field(None, description="Write a picture of accuracy against tokens.")

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """The options of each way, by name. Raises OptionError for one that can't be read."""
        found = {}
        for text in self.way:
            name, colon, given = text.partition(":")
            options = _pairs(given)
            if not (name.strip() and colon) or options is None:
                raise OptionError(f"--way {text!r} can't be read: write 'NAME: option=value; option=value'")
            found[name.strip()] = options
        return found

    @property
    def judging(self) -> dict[str, Any]:
        """The options of the judge. Raises OptionError for one that can't be read."""
        model, _, given = (self.judge or "").partition(";")
        options = _pairs(given)
        if not model.strip() or options is None:
            raise OptionError(f"--judge {self.judge!r} can't be read: write 'MODEL; option=value; option=value'")
        return {"model": model.strip(), **options}

    @property
    def mixed(self) -> dict[str, list[str]]:
        """The ways in each mixture. Raises OptionError for one that is not there."""
        found = {text: [name.strip() for name in text.split("+")] for text in self.mix}
        for text, names in found.items():
            if len(names) < 2 or not self.ways.keys() >= set(names):
                raise OptionError(f"--mix {text!r} can't be read: write ways that there are, {'+'.join(self.ways)}")
        return found


def _pairs(text: str) -> dict[str, Any] | None:
    """What 'option=value; option=value' says, a list of those of an option that is there again; None where it is no
    such text."""
    found: dict[str, Any] = {}
    for option, equals, value in (pair.partition("=") for pair in text.split(";") if pair.strip()):
        if not equals:
            return None
        name, said = option.strip(), value.strip()
        found[name] = said if name not in found else [*_several(found[name]), said]
    return found


def _several(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


class CLLMOptions(BenchOptions):
    """A consistency LLM against its base: speed, tokens a forward, score, answers unchanged."""

    model: str = Field(description="The consistency LLM.")
    base: str = Field("smollm2-135m", description="The model that it was made from.")
    questions: list[str] = Field(
        description="TASK=FILE: questions whose whole solutions are asked for; again for more."
    )
    max_tokens: int = Field(128, ge=2, description="Most new tokens of a text.")
    limit: int = Field(50, ge=1, description="Take so many questions.")
    offset: int = Field(0, ge=0, description="Leave out so many questions first.")
    shuffle_seed: int | None = Field(
        None, ge=0, description="Take the questions in a random order; other seeds, other orders."
    )
    n: int = Field(16, ge=1, le=128, description="Tokens of a window.")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Number format.")
