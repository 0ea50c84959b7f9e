"""Abilities of servers: probes, the table of `tot models --server`, and how the decoder does without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot.cli.app import main
from tot.decoders import Message, OptionError, RemoteDecoder, Request, RequestError, Sampling, load_decoder

Serve = Callable[[Any], str]
YES = {
    "Ollama": {"seed", "top_p", "logprobs", "continues", "status"},
    "LMStudio": {"top_k", "top_p", "parallel", "thinking"},
}
UNKNOWN: dict[str, set[str]] = {"Ollama": {"thinking"}, "LMStudio": set()}


def opened(url: str, **options: Any) -> RemoteDecoder:
    return load_decoder("openai", "qwen3:8b", base_url=url, **options)


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(temperature=1.0, **sampling))


# -- probes -----------------------------------------------------------------------------------------------------------


def test_a_probe_finds_the_abilities_of_each_server(double: Any, serve: Serve) -> None:
    with opened(serve(double)) as decoder:
        found = decoder.probe()
    assert {name for name, has in found.items() if has} == YES[type(double).__name__]
    assert {name for name, has in found.items() if has is None} == UNKNOWN[type(double).__name__]
    assert sum(body["max_tokens"] for body in double.posts) < 400  # tiny


def test_each_server_is_probed_once_a_process(double: Any, serve: Serve) -> None:
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


def test_a_server_that_ignores_the_temperature_leaves_seeds_and_filters_unknown(ollama: Any, serve: Serve) -> None:
    class Greedy(ollama):
        def words(self, body: dict[str, Any]) -> list[str]:
            return super().words({**body, "temperature": 0})

    with opened(serve(Greedy())) as decoder:
        found = decoder.probe()
    assert [found[name] for name in ("seed", "top_k", "top_p", "min_p")] == [None] * 4


def test_fields_that_a_server_rejects_are_missing_abilities(ollama: Any, serve: Serve) -> None:
    class Strict(ollama):
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
    ollama: Any, lm_studio: Any, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(capsys, "--server", serve(lm_studio()))
    assert rows["seed"] == ["no", "samples differ from run to run"]
    assert rows["logprobs of new tokens"] == ["no", "votes count equally; logprobs=true is refused"]
    assert rows["several requests at once"] == ["yes", "sent together"]
    rows = table(capsys, "--server", serve(ollama()), "--model", "qwen3:8b")
    assert rows["several samples a request"] == ["no", "each sample is a request of its own"]
    assert rows["top_k"] == ["no", "top_k is refused: leave it out"]
    assert rows["thinking in its own field"] == ["unknown"]
    assert len(rows) == 11


def test_tot_models_says_what_to_change(ollama: Any, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    class Two(ollama):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return 200, {"data": [{"id": "small"}, {"id": "large"}]}

    assert main(["models", "--server", serve(Two())]) == 2
    assert "lists small, large: choose one with --model NAME" in capsys.readouterr().err
    assert main(["models", "--server", serve(ollama()).removesuffix("/v1")]) == 2
    assert "lists no model (an address usually ends in /v1)" in capsys.readouterr().err
    assert main(["models", "--model", "small"]) == 2
    assert "has an effect only with --server" in capsys.readouterr().err
    assert main(["models", "--server", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err


# -- missing abilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("min_p", 0.1)])
def test_a_filter_that_the_server_ignores_is_refused(ollama: Any, serve: Serve, name: str, value: float) -> None:
    with opened(serve(ollama())) as decoder, pytest.raises(OptionError, match=f"ignores {name}: leave {name} out"):
        decoder.generate([ask(**{name: value})])


def test_a_filter_that_the_server_has_is_sent(lm_studio: Any, serve: Serve) -> None:
    double = lm_studio()
    with opened(serve(double)) as decoder:
        decoder.generate([ask(top_k=5), ask(top_k=6)])
    assert {body["top_k"] for body in double.posts if body["messages"][0]["content"] == "q"} == {5, 6}


def test_requests_are_sent_one_by_one_to_a_server_that_runs_one_at_a_time(double: Any, serve: Serve) -> None:
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


def test_logprobs_that_the_server_lacks_are_refused(ollama: Any, lm_studio: Any, serve: Serve) -> None:
    with opened(serve(lm_studio()), logprobs=True) as decoder, pytest.raises(RequestError, match="remove the option"):
        decoder.generate([ask()])

    class Strict(ollama):
        def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if "logprobs" in body:
                return 400, {"error": {"message": "This model does not support logprobs"}}
            return super().reply(body)

    message = r"rejects the request \(400\): This model does not support logprobs: remove the option logprobs"
    with opened(serve(Strict()), logprobs=True) as decoder, pytest.raises(RequestError, match=message):
        decoder.generate([ask()])


def test_an_error_in_a_reply_with_status_200_is_an_error(lm_studio: Any, serve: Serve) -> None:
    with opened(serve(lm_studio())) as decoder, pytest.raises(RequestError, match="greater than the context length"):
        decoder.generate([ask("word " * 300)])
