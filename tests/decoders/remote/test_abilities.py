"""Abilities of servers: probes, the table of `tot models --server`, and searches on doubles of Ollama and LM Studio.

The doubles follow the documentation and issues of the two servers, as far as the decoder notices: Ollama ignores `n`,
`top_k` and `min_p`, and runs one request at a time. LM Studio ignores `n`, `min_p`, logprobs and, with MLX, the seed;
its errors have the status 200; thinking is in `reasoning_content`.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from tot import Budget, SelfConsistency, solve
from tot.cli.app import main
from tot.decoders import Message, OptionError, RemoteDecoder, Request, RequestError, Sampling, load_decoder
from tot.decoders.remote import decoder as remote_decoder

QUESTION = "Ann has 3 apples and buys 4 more. How many apples does she have?"
LONG = 64
"""New tokens of the probe that a short request may overtake."""


class Double:
    """A server with one model, whose words depend on the prompt, and on the seed if it has seeds."""

    ignores: ClassVar[set[str]]
    one_at_a_time = False
    continues = False
    thinking = ""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self._unseeded = count()
        self._running, self._changed = threading.Lock(), threading.Condition()
        self._shorts = 0

    # -- the model ------------------------------------------------------------------------------------------------

    def words(self, body: dict[str, Any]) -> list[str]:
        given = {name: value for name, value in body.items() if name not in self.ignores}
        messages, limit = body["messages"], body["max_tokens"]
        if messages[-1]["role"] == "assistant":
            return ["0,", "11"] if self.continues else ["1,", "2"]
        one_token = given.get("top_k") == 1 or given.get("top_p", 1) <= 0.01 or given.get("min_p") == 1
        greedy = not body["temperature"] or one_token
        seed = given["seed"] if "seed" in given else next(self._unseeded)
        drawn = random.Random(0 if greedy else f"{seed} {messages[-1]['content']}")
        if "apples" in messages[-1]["content"]:
            return f"3 + 4 = 7. The answer is {drawn.choice((7, 7, 7, 8))}.".split()[:limit]
        return [f"word{drawn.randrange(1000)}" for _ in range(limit)]

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        words = self.words(body)
        message = {"role": "assistant", "content": " ".join(words)}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs") and "logprobs" not in self.ignores:
            choice["logprobs"] = {"content": [{"token": f" {word}", "logprob": -len(word) / 10} for word in words]}
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9 + len(words)}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}

    def unknown(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        return 404, {"detail": "Not Found"}

    # -- requests -------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "qwen3:8b", "object": "model", "owned_by": "library"}]}
        if path != "/v1/chat/completions":
            return self.unknown(method, path)
        with self._changed:
            self.posts.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self._changed.notify_all()
        try:
            return self._one_of_several(body)
        finally:
            with self._changed:
                self.at_once -= 1
                self._shorts += body["max_tokens"] == 1
                self._changed.notify_all()

    def _one_of_several(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Reply to the long probe after a short one, or before it if the server runs one request at a time."""
        long, held = body["max_tokens"] == LONG, body["messages"][0]["content"].startswith("held")
        if self.one_at_a_time:
            with self._running:
                with self._changed:
                    self._changed.wait_for(lambda: not long or self.at_once > 1, 10)
                time.sleep(0.2 * (body["max_tokens"] == 1))  # the reply before has arrived
                return self.reply(body)
        with self._changed:
            shorts = self._shorts
            self._changed.wait_for(lambda: self._shorts > shorts if long else not held or self.most_at_once > 1, 10)
        return self.reply(body)


class Ollama(Double):
    ignores: ClassVar[set[str]] = {"n", "top_k", "min_p"}
    one_at_a_time = True
    continues = True


class LMStudio(Double):
    ignores: ClassVar[set[str]] = {"n", "min_p", "logprobs", "seed"}
    thinking = "The user wants words."

    def unknown(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        return 200, {"error": f"Unexpected endpoint or method. ({method} {path})"}

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(body["messages"][0]["content"]) > 1000:
            return 200, {"error": "The number of tokens to keep is greater than the context length"}
        return super().reply(body)


YES = {
    Ollama: {"seed", "top_p", "logprobs", "continues", "status"},
    LMStudio: {"top_k", "top_p", "parallel", "thinking"},
}
UNKNOWN: dict[type[Double], set[str]] = {Ollama: {"thinking"}, LMStudio: set()}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Double], str]]:
    """Serve a double, and return its address."""
    monkeypatch.setattr(remote_decoder, "_PROBED", {})
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(double: Double) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length)) if length else {}
                status, data = double.answer(self.command, self.path, body)
                content = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=[Ollama, LMStudio])
def double(request: pytest.FixtureRequest) -> Double:
    made: Double = request.param()
    return made


def opened(url: str, **options: Any) -> RemoteDecoder:
    return load_decoder("openai", "qwen3:8b", base_url=url, **options)


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(temperature=1.0, **sampling))


# -- probes -----------------------------------------------------------------------------------------------------------


def test_a_probe_finds_the_abilities_of_each_server(double: Double, serve: Callable[[Double], str]) -> None:
    with opened(serve(double)) as decoder:
        found = decoder.probe()
    assert {name for name, has in found.items() if has} == YES[type(double)]
    assert {name for name, has in found.items() if has is None} == UNKNOWN[type(double)]
    assert sum(body["max_tokens"] for body in double.posts) < 400  # tiny


def test_each_server_is_probed_once_a_process(double: Double, serve: Callable[[Double], str]) -> None:
    url = serve(double)
    with opened(url) as decoder:
        first, again = decoder.probe(), decoder.probe()
    probes = len(double.posts)
    with opened(url) as other:
        assert other.probe() == first == again
    assert len(double.posts) == probes
    with opened(url, served="another") as third:
        third.probe()
    assert len(double.posts) > probes


def test_a_server_that_ignores_the_temperature_leaves_seeds_and_filters_unknown(serve: Callable[[Double], str]) -> None:
    class Greedy(Ollama):
        def words(self, body: dict[str, Any]) -> list[str]:
            return super().words({**body, "temperature": 0})

    with opened(serve(Greedy())) as decoder:
        found = decoder.probe()
    assert [found[name] for name in ("seed", "top_k", "top_p", "min_p")] == [None] * 4


def test_fields_that_a_server_rejects_are_missing_abilities(serve: Callable[[Double], str]) -> None:
    class Strict(Ollama):
        ignores: ClassVar[set[str]] = set()

        def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            for name in ("seed", "top_k", "logprobs"):
                if name in body:
                    return 400, {"error": {"message": f"Unsupported parameter: '{name}'"}}
            return super().reply(body)

    with opened(serve(Strict())) as decoder:
        found = decoder.probe()
    assert [found[name] for name in ("seed", "top_k", "logprobs", "min_p")] == [False, False, False, True]


# -- the table --------------------------------------------------------------------------------------------------------


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    assert main(["models", *arguments]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    return {name: rest for name, *rest in rows}


def test_tot_models_prints_the_table_of_a_server(
    serve: Callable[[Double], str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(capsys, "--server", serve(LMStudio()))
    assert rows["seed"] == ["no", "samples differ from run to run"]
    assert rows["logprobs of new tokens"] == ["no", "votes count equally; logprobs=true is refused"]
    assert rows["several requests at once"] == ["yes", "sent together"]
    rows = table(capsys, "--server", serve(Ollama()), "--model", "qwen3:8b")
    assert rows["several samples a request"] == ["no", "each sample is a request of its own"]
    assert rows["top_k"] == ["no", "top_k is refused: leave it out"]
    assert rows["thinking in its own field"] == ["unknown"]
    assert len(rows) == 11


def test_tot_models_says_what_to_change(serve: Callable[[Double], str], capsys: pytest.CaptureFixture[str]) -> None:
    class Two(Ollama):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return 200, {"data": [{"id": "small"}, {"id": "large"}]}

    assert main(["models", "--server", serve(Two())]) == 2
    assert "lists small, large: choose one with --model NAME" in capsys.readouterr().err
    assert main(["models", "--server", serve(Ollama()).removesuffix("/v1")]) == 2
    assert "lists no model (an address usually ends in /v1)" in capsys.readouterr().err
    assert main(["models", "--model", "small"]) == 2
    assert "has an effect only with --server" in capsys.readouterr().err
    assert main(["models", "--server", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err


# -- missing abilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("min_p", 0.1)])
def test_a_filter_that_the_server_ignores_is_refused(serve: Callable[[Double], str], name: str, value: float) -> None:
    with opened(serve(Ollama())) as decoder, pytest.raises(OptionError, match=f"ignores {name}: leave {name} out"):
        decoder.generate([ask(**{name: value})])


def test_a_filter_that_the_server_has_is_sent(serve: Callable[[Double], str]) -> None:
    double = LMStudio()
    with opened(serve(double)) as decoder:
        decoder.generate([ask(top_k=5), ask(top_k=6)])
    assert {body["top_k"] for body in double.posts if body["messages"][0]["content"] == "q"} == {5, 6}


def test_a_chosen_seed_that_the_server_ignores_is_reported_once(
    double: Double, serve: Callable[[Double], str], caplog: pytest.LogCaptureFixture
) -> None:
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double)}
    for seed in (0, 5):
        search = SelfConsistency(samples=3)
        solution = solve("gsm8k", QUESTION, search=search, evaluator="random", seed=seed, **where)
        assert solution.answer == "7"
        ignored = [text for text in caplog.messages if "ignores the seed: its samples are not reproducible" in text]
        assert len(ignored) == (seed == 5 and isinstance(double, LMStudio))


def test_a_probe_is_not_part_of_a_search_and_its_budget(double: Double, serve: Callable[[Double], str]) -> None:
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double)}
    search = SelfConsistency(samples=3)
    solution = solve("gsm8k", QUESTION, search=search, evaluator="random", seed=5, budget=Budget(tokens=50), **where)
    assert sum(body["max_tokens"] for body in double.posts if "random words" in str(body)) > 50
    assert (solution.stopped, solution.usage.new_tokens) == (None, 3 * 9)  # "3 + 4 = 7. The answer is 7."


def test_requests_are_sent_one_by_one_to_a_server_that_runs_one_at_a_time(
    double: Double, serve: Callable[[Double], str]
) -> None:
    with opened(serve(double)) as decoder:
        decoder.probe()
        double.most_at_once = 0
        decoder.generate([ask(f"held {i}") for i in range(20)])
    assert (double.most_at_once == 1) == double.one_at_a_time
    with opened(serve(double), concurrency=8) as decoder:
        assert decoder.probe()["parallel"] is not double.one_at_a_time
        double.most_at_once = 0
        decoder.generate([ask(f"q{i}") for i in range(20)])
    assert 1 <= double.most_at_once <= 8


def test_logprobs_that_the_server_lacks_are_refused(serve: Callable[[Double], str]) -> None:
    with opened(serve(LMStudio()), logprobs=True) as decoder, pytest.raises(RequestError, match="remove the option"):
        decoder.generate([ask()])

    class Strict(Ollama):
        def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if "logprobs" in body:
                return 400, {"error": {"message": "This model does not support logprobs"}}
            return super().reply(body)

    message = r"rejects the request \(400\): This model does not support logprobs: remove the option logprobs"
    with opened(serve(Strict()), logprobs=True) as decoder, pytest.raises(RequestError, match=message):
        decoder.generate([ask()])


def test_an_error_in_a_reply_with_status_200_is_an_error(serve: Callable[[Double], str]) -> None:
    with opened(serve(LMStudio())) as decoder, pytest.raises(RequestError, match="greater than the context length"):
        decoder.generate([ask("word " * 300)])


# -- searches ---------------------------------------------------------------------------------------------------------


def test_a_vote_runs_on_each_server(double: Double, serve: Callable[[Double], str]) -> None:
    logprobs = "logprobs" not in double.ignores
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double), "logprobs": logprobs}
    search = SelfConsistency(samples=5, weighted=True)
    if logprobs:
        solution = solve("gsm8k", QUESTION, search=search, evaluator="logprob", **where)
    else:
        with pytest.warns(UserWarning, match="votes count equally"):
            solution = solve("gsm8k", QUESTION, search=search, evaluator="logprob", **where)
    assert solution.answer == "7"
    values = [node.value for node in solution.tree if node.thought is not None]
    assert len(values) == 5
    assert all(0 < value < 1 for value in values) if logprobs else values == [1.0] * 5
    assert [body.get("n", 1) for body in double.posts] == [5, 1, 1, 1, 1]
    assert len({body["seed"] for body in double.posts}) == 5


def test_two_rows_are_evaluated_on_each_server(
    double: Double, serve: Callable[[Double], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": QUESTION, "answer": "7"}, {"question": f"{QUESTION} Think.", "answer": "9"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--search", "self-consistency:samples=5", "--evaluator", "random", "--model", "qwen3:8b"]
    flags += ["--decoder", "openai", "--decoder-option", f"base_url={serve(double)}"]
    assert main(["eval", "gsm8k", "--data", "rows.jsonl", *flags, "--out", "out"]) == 0
    results = json.loads(Path("out/results.json").read_text())
    assert (results["samples"], results["errors"], results["score"]["mean"]) == (2, 0, 0.5)


@pytest.mark.processes
def test_tot_serve_in_front_of_each_server_votes_and_reports_what_is_missing(
    double: Double, serve: Callable[[Double], str], python: Any
) -> None:
    options = ("--model", "qwen3:8b", "--decoder-option", f"base_url={serve(double)}", "--port", "0")
    process = python("-m", "tot.cli.app", "serve", "--decoder", "openai", *options)
    lines: list[str] = []
    while not lines or "served at" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    missing = "seed, min_p, logprobs" if isinstance(double, LMStudio) else "top_k, min_p, logprobs of given"
    assert sum(f"lacks several samples a request, {missing}" in line for line in lines) == 1
    url = lines[-1].split()[-1]
    probes = len(double.posts)
    with openai.OpenAI(base_url=url, api_key="any") as client:
        for _ in range(2):
            messages: Any = [{"role": "user", "content": QUESTION}]
            reply = client.chat.completions.create(model="qwen3:8b:vote", messages=messages)
            assert str(reply.choices[0].message.content).startswith("3 + 4 = 7. The answer is ")
            assert "warning" not in reply.tot
        seeded = client.chat.completions.create(model="qwen3:8b:vote", messages=messages, seed=5).tot
    warning = "the server behind qwen3:8b ignores seed: samples differ from run to run"
    ignored = (None, warning) if isinstance(double, LMStudio) else (5, None)
    assert (seeded["seed"], seeded.get("warning")) == ignored
    assert len(double.posts) > probes
    assert all("random words" not in body["messages"][0]["content"] for body in double.posts[probes:])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
