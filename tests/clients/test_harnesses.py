"""Inspect and lm-eval with searches in their own process: their programs, tasks, data and scorers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from tot import solve
from tot.decoders import load_decoder
from tot.decoders.cache import cache_folder
from tot.decoders.request import Message, before_stop
from tot.task.task import answer_text
from tot.tasks import Ask

pytestmark = pytest.mark.clients

Harness = Callable[..., CompletedProcess[str]]
LM_EVAL = ("python", "-m", "tot.evaluation.lm_eval_model", "--model", "tot", "--include_path", ".", "--log_samples")
INSPECT = ("--model", "none/none", "--display", "plain", "--log-format", "json", "--log-dir", "logs")
TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample, example_dataset
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, ContentImage
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import use_tools
from inspect_ai.tool import bash

def of(input, **options):
    return Task(dataset=[Sample(input=input, target="A")], scorer=includes(), **options)

@task
def mind():
    return Task(dataset=example_dataset("theory_of_mind")[:3], scorer=includes())

@task
def planets():
    choices = ["Mars", "Jupiter", "Venus"]
    return Task(dataset=[Sample(input="Which planet is the largest?", choices=choices, target="B")], scorer=choice())

@task
def terse():
    return of([ChatMessageSystem(content="Answer in one word."), ChatMessageUser(content="Name an animal.")])

@task
def image():
    return of([ChatMessageUser(content=[ContentImage(image="data:image/png;base64,iVBORw0KGgo=")])])

@task
def tools():
    return of("List the files.", setup=use_tools(bash()))

@task
def empty():
    return of("")

@task
def stories():
    return Task(dataset=[Sample(input=f"Write a long story about {n} cats.") for n in range(40)], scorer=includes())
"""


@pytest.fixture
def environment(clients: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of a program of the clients' environment that can also import this project."""
    own = clients.parent / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    # Inspect reads from the metadata in site-packages that the project is installed; its folder may hold others.
    paths = [str(own), *(path for path in sys.path if path.endswith("site-packages")), str(Path(__file__).parents[2])]
    variables = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "TOT_CACHE": str(cache_folder())}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture
def harness(clients: Path, environment: dict[str, str], tmp_path: Path) -> Harness:
    """Run a program of the clients in a folder with the tasks of Inspect."""
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")

    def run(program: str, *arguments: str) -> CompletedProcess[str]:
        command = [str(clients / program), *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=600)

    return run


@pytest.fixture
def inspect(harness: Harness, tmp_path: Path, smollm2: str) -> Callable[..., dict[str, Any]]:
    """Evaluate a task of `TASKS` with Inspect and return its log."""

    def run(task: str, *options: str) -> dict[str, Any]:
        solver = ("--solver", "tot/search", "-S", f"model={smollm2}")
        done = harness("inspect", "eval", f"tasks.py@{task}", *solver, *options, *INSPECT)
        (log,) = (tmp_path / "logs").glob("*.json") or pytest.fail(done.stdout + done.stderr)
        return dict(json.loads(log.read_text(encoding="utf-8")))

    return run


def test_inspect_scores_the_answers_of_votes(inspect: Callable[..., dict[str, Any]]) -> None:
    log = inspect("mind", "-S", "search=self-consistency:samples=3", "-S", "max_tokens=40")
    assert (log["status"], len(log["samples"])) == ("success", 3)
    right = [sample["scores"]["includes"]["value"] == "C" for sample in log["samples"]]
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(sum(right) / 3)
    for sample in log["samples"]:
        output, found = sample["output"], sample["metadata"]["tot"]
        assert output["model"] == "tot/smollm2-135m"
        assert output["choices"][0]["message"]["content"] == found["answer"] == sample["messages"][-1]["content"]
        assert 1 <= found["votes"][0] <= found["votes"][1] <= 3
        assert output["usage"]["output_tokens"] == found["usage"]["new_tokens"] > 3
        assert len(sample["store"]["tot"]["tree"]["nodes"]) == 4
        assert (right[sample["id"] - 1]) == (sample["target"].lower() in found["answer"].lower())


def test_an_epoch_is_the_search_of_the_next_seed(inspect: Callable[..., dict[str, Any]], smollm2: str) -> None:
    options = {"search": "cot", "reproducible": True, "temperature": 1.5}
    words = [word for name, value in options.items() for word in ("-S", f"{name}={str(value).lower()}")]
    log = inspect("terse", "--epochs", "2", "-S", "seed=7", *words)
    assert [sample["epoch"] for sample in log["samples"]] == [1, 2]
    answers = [sample["metadata"]["tot"]["answer"] for sample in log["samples"]]
    task = Ask().with_prompts(history=[Message(role="system", content="Answer in one word.")])
    assert answers == [solve(task, "Name an animal.", model=smollm2, seed=seed, **options).answer for seed in (7, 8)]
    assert len(set(answers)) == 2


def test_choices_get_the_prompt_of_multiple_choice(inspect: Callable[..., dict[str, Any]]) -> None:
    (sample,) = inspect("planets", "-S", "temperature=0", "-S", "search=cot")["samples"]
    assert "B) Jupiter" in sample["messages"][0]["content"]
    assert sample["scores"]["choice"]["value"] in "CI"
    assert sample["metadata"]["tot"]["answer"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("image", "has image, and a search answers text"),
        ("tools", "has tools, and a search answers text"),
        ("empty", "the last message is '' of the role 'user': end with a question"),
    ],
)
def test_a_sample_that_no_search_answers_has_an_error(
    task: str, message: str, inspect: Callable[..., dict[str, Any]]
) -> None:
    log = inspect(task)
    assert log["status"] == "error"
    assert message in log["samples"][0]["error"]["message"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model=gpt", "unknown model 'gpt': choose one of"),
        ("serch=cot", "unknown option 'serch' (did you mean search?)"),
        ("search=beam", "unknown search 'beam'"),
        ("task=chess", "unknown task 'chess'"),
    ],
)
def test_an_unknown_name_is_one_message(option: str, message: str, harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text(ROLLING, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "A cat."}\n', encoding="utf-8")
    runs = [
        harness("inspect", "eval", "tasks.py@mind", "--solver", "tot/search", "-S", option, *INSPECT),
        harness(*LM_EVAL, "--tasks", "rows", "--model_args", option, "--output_path", "results"),
    ]
    for done in runs:
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0
        assert message in text
        assert "Traceback" not in text


ROLLING = """
task: rows
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


def their_task(clients: Path, path: str, rows: list[dict[str, Any]], folder: Path) -> None:
    """Write a task of lm-eval's own, as `rows`, whose data set is these rows."""
    (file,) = clients.parent.glob(f"lib/*/site-packages/lm_eval/tasks/{path}")
    removed = ("tag:", "  - ", "task:", "dataset_", "training_split", "validation_split", "test_split", "fewshot_split")
    head, _, rest = file.read_text(encoding="utf-8").partition("output_type:")
    kept = [line for line in rest.splitlines() if not line.startswith(removed[2:])]
    lines = [*ROLLING.strip().splitlines()[:4], f"output_type:{kept[0]}", *kept[1:]]
    (folder / "rows.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert head.startswith(("tag:", "task:"))


def samples(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.rglob("samples_rows_*.jsonl")
    return sorted(map(json.loads, log.read_text(encoding="utf-8").splitlines()), key=lambda one: int(one["doc_id"]))


def gsm8k(data: Path, count: int) -> list[dict[str, Any]]:
    with (data / "gsm8k_test_0_400.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, count)]


@pytest.mark.parametrize("chat", [True, False])
def test_lm_eval_reads_the_answers_of_searches(
    chat: bool, harness: Harness, clients: Path, data: Path, smollm2: str, tmp_path: Path
) -> None:
    rows = gsm8k(data, 3)
    their_task(clients, "gsm8k/gsm8k.yaml", rows, tmp_path)
    options = {"model": smollm2, "search": "cot", "reproducible": True}
    words = ["--model_args", json.dumps(options), "--gen_kwargs", "max_gen_toks=50", "--num_fewshot", "0"]
    words += ["--apply_chat_template"] if chat else []
    done = harness(*LM_EVAL, "--tasks", "rows", "--output_path", "results", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact_match" in done.stdout
    found = [sample["resps"] for sample in samples(tmp_path) if sample["filter"] == "strict-match"]
    questions = [f"Question: {row['question']}\nAnswer:" for row in rows]
    answers = [solve("ask", one, temperature=0.0, max_tokens=50, **options).answer for one in questions]
    stops = ("Question:", "</s>", "<|im_end|>")
    assert found == [[[before_stop("" if one is None else answer_text(one), stops)]] for one in answers]
    assert any(text for ((text,),) in found)


def test_lm_eval_scores_choices_as_transformers(harness: Harness, clients: Path, smollm2: str, tmp_path: Path) -> None:
    texts = [("Which animal barks?", ["cat", "dog", "fish"]), ("2 + 2 is", ["4", "five"]), ("Trees have", ["leaves"])]
    rows = [
        {"question": question, "choices": {"text": choices, "label": [*"ABC"[: len(choices)]]}, "answerKey": "A"}
        for question, choices in texts
    ]
    their_task(clients, "arc/arc_easy.yaml", rows, tmp_path)
    words = ("--tasks", "rows", "--output_path", "results", "--model_args", f"model={smollm2},dtype=fp32")
    done = harness(*LM_EVAL, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    with load_decoder("ar", smollm2, dtype="fp32") as decoder:
        model, tokenizer = decoder.model.float(), decoder.tokenizer
        for sample, (question, choices) in zip(samples(tmp_path), texts, strict=True):
            context = f"Question: {question}\nAnswer:"
            for [[score, greedy]], choice in zip(sample["resps"], choices, strict=True):
                ids, start = tokenizer.encode(f"{context} {choice}"), len(tokenizer.encode(context))
                with torch.no_grad():
                    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
                targets = torch.tensor(ids[start:])
                expected = logprobs.gather(1, targets[:, None]).sum().item()
                assert float(score) == pytest.approx(expected, abs=2e-3)
                assert str(greedy) == str(bool((logprobs.argmax(-1) == targets).all()))


def test_lm_eval_scores_whole_texts_as_transformers(harness: Harness, smollm2: str, tmp_path: Path) -> None:
    texts = ["The sun is a star at the center of the Solar System.", "Ünïcode <|im_end|> text."]
    (tmp_path / "rows.yaml").write_text(ROLLING, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    words = ("--tasks", "rows", "--output_path", "results", "--model_args", f"model={smollm2},dtype=fp32")
    done = harness(*LM_EVAL, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    with load_decoder("ar", smollm2, dtype="fp32") as decoder:
        model, codec = decoder.model.float(), decoder.engine.codec
        for sample, text in zip(samples(tmp_path), texts, strict=True):
            ids = [decoder.tokenizer.bos_token_id, *codec.encode(text, continues=False)]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
            assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("program", ["inspect", "lm_eval"])
def test_ctrl_c_ends_an_evaluation(
    program: str, clients: Path, environment: dict[str, str], smollm2: str, harness: Harness, tmp_path: Path
) -> None:
    their_task(
        clients, "gsm8k/gsm8k.yaml", [{"question": f"Tell me about {n}.", "answer": "#"} for n in range(40)], tmp_path
    )
    commands = {
        "inspect": (
            "inspect",
            "eval",
            "tasks.py@stories",
            "--solver",
            "tot/search",
            "-S",
            f"model={smollm2}",
            *INSPECT,
        ),
        "lm_eval": (*LM_EVAL, "--tasks", "rows", "--num_fewshot", "0", "--output_path", "results"),
    }
    started = {"inspect": "stories (40 samples)", "lm_eval": "Running generate_until"}[program]
    name, *words = commands[program]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(
        [str(clients / name), *words], env=environment, cwd=tmp_path, text=True, **streams
    ) as process:
        for line in process.stdout or ():
            if started in line:
                break
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=300)
    assert "Traceback" not in text
    if program == "inspect":
        (log,) = (tmp_path / "logs").glob("*.json")
        assert json.loads(log.read_text(encoding="utf-8"))["status"] == "cancelled"
    else:
        assert process.returncode == 130
