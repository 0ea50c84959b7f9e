"""Options of the benchmarks, which are also their flags. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tot.decoders.errors import OptionError
from tot.decoders.models.model_names import Quantize

KConfig = Annotated[str, Field(pattern=r"^[1-9]\d?(-[1-9]\d?){0,15}$")]
Counts = Annotated[tuple[PositiveInt, ...], AfterValidator(lambda counts: tuple(sorted(set(counts))))]
"""In ascending order, without duplicates."""


class BenchOptions(BaseModel):
    """Options of all benchmarks. Tuple options also accept a comma-separated string."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    more: ClassVar[frozenset[str]] = frozenset()
    """Options whose higher values extend a run, such as a number of questions."""

    model: str = Field("smollm2-135m", description="A model name, a hub id, a folder or a .gguf file.")
    out: Path | None = Field(None, description="Write the numbers to this .json file after each cell, or resume it.")
    markdown: bool = Field(False, description="Print the tables as Markdown.")

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        is_tuple = get_origin(cls.model_fields[info.field_name or ""].annotation) is tuple
        return tuple(part.strip() for part in value.split(",")) if is_tuple and isinstance(value, str) else value

    @property
    def asked(self) -> dict[str, Any]:
        """The options that identify a run, as JSON data."""
        return self.model_dump(mode="json", exclude={"out", "markdown", "picture", *self.more})


class Computed(BenchOptions):
    """Options of benchmarks that choose the model's number format."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Number format.")
    quantize: Quantize = Field("auto", description="As for tot eval.")

    @property
    def computed(self) -> dict[str, Any]:
        """These options as arguments of `load_decoder`. Every run computes its prompts."""
        return {"dtype": self.dtype, "quantize": self.quantize, "prefix_cache": False}


class InRounds(BenchOptions):
    """Options of benchmarks whose sides take turns at the same work."""

    rounds: int = Field(3, ge=1, description="Rounds. The sides take turns in each; medians are compared.")


class DecodersOptions(Computed):
    """Compare decoding methods on whole searches, as in SEED's tables: serial, in rounds and packed."""

    more: ClassVar = frozenset({"limit"})
    questions: list[str] = Field(
        ["gsm8k", "creative_writing", "blocksworld"],
        description="TASK=FILE, or TASK for the task's own questions. Repeat for more.",
    )
    limit: int = Field(10, ge=1, description="Questions per task.")
    draft: str = Field("lookup", description="Draft source, as for the decoder option draft of tot solve.")
    k_configs: tuple[KConfig, ...] = Field(
        ("1-1-1", "2-1-1", "2-2-1", "4-2-1"),
        description="Comma-separated draft trees: candidates at each position, such as 2-2-1.",
    )
    parts: tuple[Literal["serial", "rounds", "packed"], ...] = Field(
        ("serial", "rounds", "packed"), description="How texts are decoded: serial, rounds, packed; comma-separated."
    )
    temperatures: tuple[float, ...] = Field(
        (0.2, 1.0), description="Comma-separated temperatures of thoughts and evaluations."
    )
    samples: int = Field(3, ge=1, description="Thoughts per state (n).")


class ScheduleOptions(Computed):
    """Measure forwards of a target and a draft model, and simulate where SEED's schedules are faster."""

    draft: str = Field(description="Draft model, as for the decoder option draft of tot solve.")
    k: int = Field(3, ge=1, le=16, description="Drafted tokens per verification.")
    acceptance: float = Field(0.8, ge=0, le=1, description="Share of drafted tokens that are accepted.")
    texts: Counts = Field((1, 3, 8, 32), description="Comma-separated numbers of texts that are decoded together.")
    shares: tuple[PositiveFloat, ...] = Field(
        (0.33, 0.1, 0.03), description="Comma-separated costs of a draft's forward, as shares of the target's."
    )


class FastCoTBench(Computed):
    """Compare FastCoT with whole rationales: time, accuracy and unchanged answers, by iteration and at the cap."""

    parts: tuple[Literal["answers", "masks", "times"], ...] = Field(
        ("answers", "masks", "times"),
        description="Comma-separated: answers (after part of a rationale), masks (masked rationales), times.",
    )
    data: str = Field(description="Questions with answers, as for tot eval.")
    task: str = Field("multiple_choice", description="The task of these questions.")
    prompts: Literal["chat", "papers"] = Field("papers", description="As for tot eval.")
    limit: int = Field(100, ge=4, description="Number of questions; half calibrate the cap, half test it.")
    timed: int = Field(16, ge=1, description="Number of test questions to time.")
    max_tokens: int = Field(128, ge=2, description="Maximum tokens of a rationale.")
    seeds: int = Field(20, ge=1, description="Number of random masks.")


class PDOSBench(Computed):
    """Compare parallel steps with normal decoding, skeleton-of-thought and chain-of-draft: quality, speed, memory."""

    more: ClassVar = frozenset({"rounds"})
    prompt: Literal["skeleton", "example", "both", "none"] = Field(
        "both",
        description="How the prompt explains the step format: our skeleton prompt, a worked example, both, or not at "
        "all, for a model that was trained on it.",
    )
    tasks: tuple[Literal["retrieval", "planning", "qa"], ...] = Field(
        ("retrieval", "planning", "qa"), description="Comma-separated tasks; qa: questions about several documents."
    )
    people: tuple[Annotated[int, Field(ge=4, le=100)], ...] = Field(
        (10,), description="Retrieval: comma-separated numbers of people, 4 to 100."
    )
    aspects: tuple[Annotated[int, Field(ge=2, le=10)], ...] = Field(
        (2, 4, 6, 8, 10), description="Planning: comma-separated numbers of aspects, 2 to 10."
    )
    passages: tuple[Annotated[int, Field(ge=4, le=100)], ...] = Field(
        (8,), description="QA: comma-separated numbers of generated passages, 4 to 100."
    )
    data: Path | None = Field(
        None,
        description="QA: a .jsonl file in LongBench's 2WikiMultihopQA format, with input, context, answers, instead of "
        "generated passages.",
    )
    judge: str | None = Field(
        None, description="Model that marks plans and answers from 1 to 5; by default the tested model."
    )
    rounds: int = Field(3, ge=1, description="Questions of each kind. The sides take turns at each question.")

    @model_validator(mode="after")
    def _documents(self) -> PDOSBench:
        if self.data is not None and "qa" not in self.tasks:
            raise OptionError("--data has documents, which only the task qa reads: add qa to --tasks")
        return self


class BranchesOptions(InRounds):
    """Options of benchmarks that decode branches of a prompt, and llama.cpp's side of them."""

    branches: Counts = Field((1, 3, 5, 15, 32, 64), description="Comma-separated numbers of samples of one prompt.")
    prompt_tokens: int = Field(1000, ge=16, description="Tokens of the prompt that branches continue.")
    new_tokens: int = Field(64, ge=1, description="New tokens per branch.")
    llama: Path = Field(
        Path(".venv-llama/bin/python"), description="Python interpreter with llama-cpp-python (make peers installs it)."
    )


class PeersOptions(BranchesOptions):
    """Compare branches and whole searches with transformers, llama.cpp and vLLM."""

    data: Path | None = Field(None, description="GSM8K problems, as for tot eval; by default the task's own.")
    parts: tuple[Literal["decode", "limit", "tree"], ...] = Field(
        ("decode", "limit", "tree"), description="Comma-separated: decode, limit, tree."
    )
    sides: tuple[Literal["none", "int8-dynamic", "batched", "serial", "llama", "vllm"], ...] = Field(
        ("none", "int8-dynamic", "batched", "serial", "llama", "vllm"),
        description="Comma-separated sides to compare with: none and int8-dynamic (as --quantize of tot eval), "
        "batched, serial (both transformers), llama, vllm.",
    )
    problems: int = Field(8, ge=1, description="Problems to search, one per round.")
    patience: float = Field(
        60.0,
        ge=0,
        description="Seconds. A cell predicted to take longer runs once; above three times this limit it is skipped.",
    )
    vllm: Path = Field(
        Path(".venv-vllm/bin/python"), description="Python interpreter with vLLM (make peers installs it)."
    )


class NeighboursOptions(BranchesOptions):
    """Measure how much a program that keeps one core busy slows down decoding, ours and llama.cpp's."""

    branches: Counts = Field((1, 5, 15), description="Comma-separated numbers of samples of one prompt.")


class StartOptions(InRounds):
    """Compare the time from a command to its first token with llama.cpp's, with an empty and a full cache folder."""

    parts: tuple[Literal["cold", "warm"], ...] = Field(
        ("cold", "warm"), description="Comma-separated: cold (empty cache folder), warm (second run)."
    )
    task: str = Field("gsm8k", description="A task's name. Its example is the question.")
    llama: Path = Field(
        Path(".venv-llama/bin/python"), description="Python interpreter with llama-cpp-python (make peers installs it)."
    )


class WaysOptions(BenchOptions):
    """Options of benchmarks that compare ways to answer the same questions."""

    data: str | None = Field(None, description="Questions with answers, as for tot eval; by default the task's own.")
    task: str = Field("gsm8k", description="The task of these questions.")
    limit: int = Field(100, ge=1, description="Number of questions.")
    offset: int = Field(0, ge=0, description="Rows to skip first.")

    @property
    def rows(self) -> dict[str, Any]:
        """The options of an evaluation that all ways share."""
        return {name: getattr(self, name) for name in ("task", "data", "model", "limit", "offset")}


class AnswersOptions(WaysOptions):
    """Compare right answers and seconds per question with llama.cpp and vLLM, one question at a time."""

    more: ClassVar = frozenset({"limit"})
    way: list[str] = Field(
        [],
        description="A way to answer, as 'NAME: option=value; option=value', with options of tot eval, or peer=llama "
        "or peer=vllm with samples=N and file=PRECISION. Repeat for more; each is compared with the first. By default "
        "one answer, votes and searches of each program.",
    )
    escalate: str | None = Field(
        None, description="Add the last default way with this larger model for hard questions."
    )
    picture: Path | None = Field(None, description="Plot right answers over seconds to this file.")
    llama: Path = Field(
        Path(".venv-llama/bin/python"), description="Python interpreter with llama-cpp-python (make peers installs it)."
    )
    vllm: Path = Field(
        Path(".venv-vllm/bin/python"), description="Python interpreter with vLLM (make peers installs it)."
    )

    @model_validator(mode="after")
    def _ways(self) -> AnswersOptions:
        if self.way and self.escalate is not None:
            raise OptionError("--escalate changes a default way: leave it out, and write --way '...; escalate=MODEL'")
        return self


class OptimizeOptions(BenchOptions):
    """Compare searches for programs: scores on the search's instances and on others, at equal thoughts and tokens."""

    more: ClassVar = frozenset({"seeds"})
    problems: tuple[str, ...] = Field(
        ("bin-packing", "traveling-salesman", "sorting-network", "oscillator"),
        description="Comma-separated problems: names of shipped ones, or folders with score.py.",
    )
    maximize: bool = Field(False, description="Higher scores are better; they are costs for the shipped problems.")
    way: list[str] = Field(
        [
            "best of n: search=best-of-n:samples=64",
            "ab-mcts: search=ab-mcts:iterations=64",
            "refine: search=refine:thoughts=9,depth=9",
        ],
        description="A way to search, as 'NAME: option=value; option=value', with options of tot solve. Repeat for "
        "more; each is compared with the first. 'NAME: peer=openevolve; iterations=64' is OpenEvolve's loop.",
    )
    seeds: int = Field(5, ge=1, description="Searches of each way, with different seeds.")


class QualityOptions(WaysOptions):
    """Compare the accuracy and cost of ways to answer, and the AUROC of evaluators."""

    way: list[str] = Field(
        [
            "plain: search=cot",
            "votes: search=self-consistency:samples=8",
            "tree: search=bfs:thoughts=2,breadth=4,aggregate=majority; evaluator=logprob",
        ],
        description="A way to answer, as 'NAME: option=value; option=value', with options of tot eval. Repeat for "
        "more; each is compared with the first.",
    )
    mix: list[str] = Field([], description="Ways whose interleaved solutions also vote together: 'votes+programs'.")
    folder: Path = Field(
        Path("quality"), description="Folder of the evaluations, one per way; existing ones are resumed."
    )
    concurrency: int = Field(16, ge=1, description="Concurrent searches.")
    judge: str | None = Field(
        None,
        description="A model that compares each way's answers with the first way's, as 'MODEL; option=value' with "
        "options of tot eval.",
    )
    evaluators: tuple[str, ...] = Field(
        (), description="Comma-separated state evaluators to judge pieces of solutions."
    )
    judged: int = Field(
        100,
        ge=1,
        description="Questions whose solutions the evaluators judge piece by piece, from the way with most samples.",
    )
    timed: int = Field(0, ge=0, description="Questions to time one at a time; the ways take turns.")

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """The options of each way, by name. Raises OptionError for an invalid one."""
        return read_ways(self.way)

    @property
    def judging(self) -> dict[str, Any]:
        """The options of the judge. Raises OptionError if they are invalid."""
        model, _, pairs = (self.judge or "").partition(";")
        options = _pairs(pairs)
        if not model.strip() or options is None:
            raise OptionError(f"--judge {self.judge!r} can't be read: write 'MODEL; option=value; option=value'")
        return {"model": model.strip(), **options}

    @property
    def mixed(self) -> dict[str, list[str]]:
        """The ways in each mixture. Raises OptionError for an unknown way."""
        mixtures = {text: [name.strip() for name in text.split("+")] for text in self.mix}
        for text, names in mixtures.items():
            if len(names) < 2 or not self.ways.keys() >= set(names):
                raise OptionError(f"--mix {text!r} can't be read: join ways with +, such as {'+'.join(self.ways)}")
        return mixtures


def read_ways(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse ways as 'NAME: option=value; option=value'. Raises OptionError for an invalid one."""
    ways = {}
    for text in texts:
        name, colon, pairs = text.partition(":")
        options = _pairs(pairs)
        if not (name.strip() and colon) or options is None:
            raise OptionError(f"--way {text!r} can't be read: write 'NAME: option=value; option=value'")
        if name.strip() in ways:
            raise OptionError(f"--way {name.strip()!r} is given twice: give each way a name of its own")
        ways[name.strip()] = options
    return ways


def _pairs(text: str) -> dict[str, Any] | None:
    """Parse 'option=value; option=value'. A repeated option becomes a list; an invalid text returns None."""
    options: dict[str, Any] = {}
    for option, equals, value in (pair.partition("=") for pair in text.split(";") if pair.strip()):
        if not equals:
            return None
        name, new = option.strip(), value.strip()
        options[name] = new if name not in options else [*_several(options[name]), new]
    return options


def _several(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class CLLMOptions(BenchOptions):
    """Compare a consistency LLM with its base: speed, tokens per forward, score, unchanged answers."""

    more: ClassVar = frozenset({"limit"})
    model: str = Field(description="The consistency LLM.")
    base: str = Field("smollm2-135m", description="Its base model.")
    questions: list[str] = Field(description="TASK=FILE: questions to answer with whole solutions. Repeat for more.")
    max_tokens: int = Field(128, ge=2, description="Maximum new tokens per solution.")
    limit: int = Field(50, ge=1, description="Number of questions.")
    offset: int = Field(0, ge=0, description="Questions to skip first.")
    shuffle_seed: int | None = Field(None, ge=0, description="Seed for a random order of the questions.")
    n: int = Field(16, ge=1, le=128, description="Tokens per window.")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Number format.")
