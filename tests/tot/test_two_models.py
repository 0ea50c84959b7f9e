"""Two models in one search: options, engines, memory, prompts, filters, seeds, usage and resuming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import BFS, EngineOptions, Model, TotError, close_models, evaluate, solve
from tot.cli.output import usage_line
from tot.config import SearchConfig
from tot.decoders import ModelError, OptionError, RequestError
from tot.decoders.engine import open_models
from tot.decoders.models import memory
from tot.generators.base import Generator
from tot.llm.backend import models_of
from tot.llm.decoders import open_decoders
from tot.search.checkpoint import Checkpoint


@pytest.fixture
def saved(tiny: Any, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Save a tiny model as a folder, with other weights for each seed: saved("small")."""

    def save(name: str, seed: int = 0, template: bool = True, **generation: float) -> str:
        with tiny() as decoder:
            model, tokenizer = decoder.model, decoder.tokenizer
            for weight in model.parameters():
                weight.data += seed * 0.01
            model.save_pretrained(tmp_path / name)
            chat, tokenizer.chat_template = tokenizer.chat_template, tokenizer.chat_template if template else None
            tokenizer.save_pretrained(tmp_path / name)
            tokenizer.chat_template = chat
        config = {"eos_token_id": 2, **generation}
        (tmp_path / name / "generation_config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    yield save
    close_models()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that were loaded."""
    seen: list[str] = []
    load = open_models.open_packed

    def counted(model: Any, **options: Any) -> Any:
        if isinstance(model, str):
            seen.append(Path(model).name)
        return load(model, **options)

    monkeypatch.setattr(open_models, "open_packed", counted)
    return seen


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "models"),
    [
        ({"model": "a.gguf", "escalate": "b.gguf"}, ("a.gguf", "a.gguf", "a.gguf", "b.gguf")),
        ({"model": "generate=a.gguf, escalate=b.gguf"}, ("a.gguf", "a.gguf", "a.gguf", "b.gguf")),
        ({"model": {"generate": "a", "evaluate": Model("b")}}, ("a", "b", "a")),
        ({"model": "generate=none,evaluate=b"}, (None, "b", None)),
        ({"model": "escalate=b.gguf"}, (*["smollm2-135m"] * 3, "b.gguf")),
        ({"escalate": "none"}, ("smollm2-135m",) * 3),
    ],
)
def test_spellings_of_models_become_a_model_for_each_purpose(given: dict[str, Any], models: tuple[Any, ...]) -> None:
    config = SearchConfig.of(None, given)
    assert tuple(one.model for one in config.model.by_purpose.values()) == models
    assert [*config.model.by_purpose] == ["generate", "evaluate", "answer", "escalate"][: len(models)]
    written = config.to_json()
    assert SearchConfig.of(None, json.loads(json.dumps(written))) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "judge=a"}, "unknown purpose 'judge': choose one of answer, escalate, evaluate, generate"),
        ({"model": "generate="}, r"--model 'generate=' can't be read: write generate=NAME,evaluate=NAME"),
        ({"model": {"evaluate": "b"}}, "no model is given for generate: add one, such as generate=small.gguf"),
        ({"decoder": "escalate=ar"}, "decoder escalate=ar has no model: add --escalate MODEL"),
        ({"model": "generate=a,escalate=b", "escalate": "c"}, "escalate is 'b' in model, and 'c': give one of them"),
    ],
)
def test_contradictory_models_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SearchConfig.of(None, given)


def test_flags_name_both_models(tot: Any) -> None:
    for flags, message in (
        (("--model", "generate=a.gguf,judge=b.gguf"), "unknown purpose 'judge'"),
        (
            ("--escalate", "absent.gguf", "--model", "none", "--search", "ab-mcts"),
            "there is no file or folder absent.gguf",
        ),
        (
            ("--escalate", "absent.gguf", "--search", "dfs"),
            "escalate has no effect: DFS asks only one model; choose search=",
        ),
        (("--decoder", "escalate=openai"), "decoder escalate=openai has no model: add --escalate MODEL"),
    ):
        status, out, err = tot("solve", "gsm8k", "q", *flags)
        assert (status, out) == (2, "")
        assert message in err


# -- decoders, engines and memory ---------------------------------------------------------------------------------


class Both(Generator):
    """Propose a thought of each of the two models."""

    async def propose(self, ctx: Any, nodes: Any, count: int | None) -> Any:
        async def ask(node: Any) -> list[Any]:
            asked = [one.ask("thought", node, max_tokens=6) for one in (ctx, ctx.to("escalate"))]
            return [reply for replies in await asyncio.gather(*asked) for reply in replies]

        return await ctx.each(nodes, ask)


SEARCH: dict[str, Any] = {
    "search": BFS(breadth=1, depth=3),
    "generator": Both(),
    "evaluator": "random",
}
SMALL = EngineOptions(kv_budget="4000")


def two(small: str, large: str) -> dict[str, Model]:
    return {"generate": Model(small, engine=SMALL), "escalate": Model(large, engine=SMALL)}


def written(solution: Any) -> list[tuple[str, str]]:
    """The text and the decoder of each thought."""
    return [(node.thought.text, node.decoder) for node in solution.tree if node.thought is not None]


def test_two_models_write_one_tree_which_names_them(
    letters: Any, saved: Callable[..., str], loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = saved("small"), saved("large", seed=3)
    solution = solve(letters, "q", model=two(small, large), **SEARCH)
    assert loads == ["small", "large"]
    names = [decoder for _, decoder in written(solution)]
    assert names == ["auto@small", "auto@large"] * 2
    texts = dict(map(reversed, written(solution)))  # type: ignore[arg-type]
    assert texts["auto@small"] != texts["auto@large"]
    used = solution.by_model
    assert list(used) == ["small", "large"]
    assert (used["small"]["calls"], used["large"]["calls"]) == (3, 2)  # the small one also answers
    assert sum(one["new_tokens"] for one in used.values()) == solution.usage.new_tokens
    assert solution.summary()["by_model"] == used
    assert f"{used['large']['new_tokens']} new tokens by large" in usage_line(solution)
    alone = solve(letters, "q", model=Model(small, engine=SMALL), search=BFS(breadth=1, depth=2), evaluator="random")
    assert alone.by_model == {}
    assert "by_model" not in alone.summary()


def test_both_engines_stay_open_for_the_next_search(letters: Any, saved: Callable[..., str], loads: list[str]) -> None:
    small = saved("small")
    options: Any = {"model": two(small, saved("large", seed=3)), **SEARCH}
    first = solve(letters, "q", reproducible=True, **options)
    assert written(solve(letters, "q", reproducible=True, **options)) == written(first)
    assert loads == ["small", "large"]
    solve(letters, "q", model=Model(small, engine=SMALL), evaluator="random", search=BFS(depth=2))
    assert loads == ["small", "large", "small"]


def test_models_by_purpose_have_an_engine_each_with_the_options_of_both(saved: Callable[..., str]) -> None:
    config = SearchConfig.of(
        None,
        {"model": {"generate": saved("a"), "evaluate": saved("b", 1)}, "decoder": "jacobi", "dtype": "fp32",
         "kv_budget": "400", "decoder_option": "n=3"},
    )  # fmt: skip
    with ExitStack() as stack:
        decoders: Any = open_decoders(config.model, stack)
        engines = {purpose: decoder.engine for purpose, decoder in decoders.items()}
        assert engines["generate"] is engines["answer"] is not engines["evaluate"]
        assert {engine.cache.capacity for engine in engines.values()} == {400}
        assert models_of(decoders) == {"generate": "a", "evaluate": "b", "answer": "a"}


def test_a_decoder_object_escalates_for_a_named_model(letters: Any, scripted: Any, saved: Callable[..., str]) -> None:
    judge = scripted({})
    small: Any = {"model": Model(saved("small"), engine=SMALL)}
    solution = solve(letters, "q", **small, decoder={"escalate": judge}, **SEARCH)
    assert {request.purpose for request in judge.requests} == {"escalate"}
    assert [decoder for _, decoder in written(solution)] == ["auto@small", "Scripted"] * 2


def test_a_generator_that_asks_a_missing_second_model_is_told_to_give_one(letters: Any, scripted: Any) -> None:
    with pytest.raises(RequestError, match="the search asks a second model, but none was given: add one for escalate"):
        solve(letters, "q", decoder=scripted({}), **SEARCH)


def test_models_that_do_not_fit_are_refused_with_numbers_before_loading(
    letters: Any, saved: Callable[..., str], loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = saved("small"), saved("large", seed=3)
    size = (Path(small) / "model.safetensors").stat().st_size + 4096 * 2 * 2 * 2 * 8 * 4  # layers, heads, dimensions
    monkeypatch.setattr(memory, "_gib", lambda size: f"{size:,}")
    monkeypatch.setattr(open_models, "free_memory", lambda device: 2 * size - 1)
    exact = EngineOptions(dtype="fp32", kv_budget="4000")
    models: Any = {"generate": Model(small, engine=exact), "escalate": Model(large, engine=exact)}
    numbers = rf"the models need {2 * size:,} GiB \(small {size:,}, large {size:,}\) and {2 * size - 1:,} GiB are free"
    with pytest.raises(ModelError, match=numbers):
        solve(letters, "q", model=models, **SEARCH)
    assert loads == []
    monkeypatch.setattr(open_models, "free_memory", lambda device: 2 * size)
    solve(letters, "q", model=models, **SEARCH)
    monkeypatch.setattr(open_models, "free_memory", lambda device: 0)  # open models need no more
    solve(letters, "q", model=models, **SEARCH)
    assert loads == ["small", "large"]


# -- prompts, filters and seeds -----------------------------------------------------------------------------------


def test_models_with_and_without_a_chat_format_need_a_choice_of_prompts(saved: Callable[..., str]) -> None:
    chat, base = saved("chat"), saved("base", template=False)
    for model, escalate, lacking in ((chat, base, "escalate"), (base, chat, "generate")):
        config = SearchConfig.of(None, {"model": model, "escalate": escalate})
        with pytest.raises(OptionError, match=f"the model of {lacking} has no chat format, and the other has one: ch"):
            config.suited("gsm8k")
        assert SearchConfig.of(config, {"prompts": "papers"}).suited("gsm8k").prompts.kind == "papers"
    assert SearchConfig.of(None, {"model": chat, "escalate": chat}).suited("gsm8k").prompts.kind == "chat"
    remote = {"model": chat, "escalate": "gpt", "decoder": "escalate=openai"}
    assert SearchConfig.of(None, remote).suited("gsm8k").prompts.kind == "chat"


def test_each_model_has_the_filters_of_its_own_generation_config(letters: Any, saved: Callable[..., str]) -> None:
    seen: list[Any] = []

    class Seeing(Both):
        async def propose(self, ctx: Any, nodes: Any, count: int | None) -> Any:
            seen.append((ctx.filters, ctx.to("escalate").filters, ctx.to("answer").filters))
            return await super().propose(ctx, nodes, count)

    options = {**SEARCH, "generator": Seeing(), "search": BFS(depth=2)}
    options |= {"model": two(saved("small", top_k=5), saved("large", 3, top_p=0.5))}
    solve(letters, "q", **options)
    assert seen.pop() == ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 5})
    solve(letters, "q", SearchConfig.of(None, {"top_k": 7}), **options)
    assert seen.pop() == ({"top_k": 7}, {"top_k": 7, "top_p": 0.5}, {"top_k": 7})


# -- evaluations, checkpoints -------------------------------------------------------------------------------------


def test_an_evaluation_reports_both_models_and_resumes_only_with_the_same(
    letters: Any, saved: Callable[..., str], rows: Path, tmp_path: Path
) -> None:
    small, large = saved("small"), saved("large", seed=3)

    def run(escalate: str | None, **options: Any) -> Any:
        models = {"model": small, "escalate": escalate, "kv_budget": 4000}
        return evaluate(letters, rows, out=tmp_path / "out", **models, **SEARCH, **options)

    results = run(large, limit=2)
    assert results.by_model["small"]["calls"] == results.by_model["large"]["calls"] + 2  # the answers
    assert sum(used["new_tokens"] for used in results.by_model.values()) == results.tokens
    assert results.by_purpose["escalate"] == results.by_model["large"]
    assert ("large", f"{results.by_model['large']['new_tokens']:,}", "of the new tokens") in results.figures
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (config["model"], config["escalate"]) == (small, large)
    assert config["record"]["escalate_sha256"] != config["record"]["model_sha256"]
    assert run(large, limit=3, resume=True).samples == 3
    for other in (small, None):
        with pytest.raises(OptionError, match="was started with another configuration: escalate was"):
            run(other, limit=3, resume=True)
    saved("large", seed=4)
    with pytest.raises(OptionError, match="was started with another configuration: escalate_sha256 was"):
        run(large, limit=3, resume=True)


def test_a_resumed_search_has_the_usage_of_both_models_and_refuses_others(
    letters: Any, saved: Callable[..., str], tmp_path: Path
) -> None:
    small = saved("small")
    options: Any = {"model": two(small, saved("large", seed=3)), "reproducible": True, **SEARCH}
    trace = tmp_path / "run.jsonl"
    checkpoint = Checkpoint.create(trace)
    whole = solve(letters, "q", checkpoint=checkpoint, **options)
    checkpoint.close()
    lines = trace.read_text().splitlines(keepends=True)
    for kept in (len(lines), len(lines) - 1, 4, 2):
        trace.write_text("".join(lines[:kept]))
        checkpoint = Checkpoint.resume(trace)
        solution = solve(letters, "q", checkpoint=checkpoint, **options)
        checkpoint.close()
        assert (solution.by_model, written(solution)) == (whole.by_model, written(whole))
    alone = {"model": Model(small, engine=SMALL), "generator": None}
    for other in ({"model": two(small, saved("other", seed=5))}, alone):
        checkpoint = Checkpoint.resume(trace)
        with pytest.raises(TotError, match=r"holds another run: its (models|generator) is"):
            solve(letters, "q", checkpoint=checkpoint, **{**options, **other})
        checkpoint.close()


@pytest.mark.parametrize(
    "search",
    ["act", "best-first", "best-of-n", "bfs", "cot", "dfs", "mcts", "refine", "self-consistency"],
)
def test_a_second_model_that_no_part_asks_is_refused(letters: Any, scripted: Any, search: str) -> None:
    decoder = {"generate": scripted({}), "escalate": scripted({})}
    with pytest.raises(OptionError, match=r"escalate has no effect: .* asks only one model; choose search="):
        solve(letters, "q", decoder=decoder, search=search, evaluator="random")


def test_a_second_model_that_the_search_asks_is_accepted(letters: Any, scripted: Any) -> None:
    replies = {f"grow{' ' * bool(path)}{path}": ["a", "b"] for path in ("", "a", "b", "a/a", "a/b", "b/a", "b/b")}
    large = scripted(replies)
    decoder = {"generate": scripted(replies), "escalate": large}
    solve(letters, "q", decoder=decoder, search="ab-mcts:iterations=9", evaluator="random")
    assert {request.purpose for request in large.requests} == {"escalate"}
