"""Configurations that cannot run on Ray are rejected in one line, in bounded time, without a folder.

These tests take 15 seconds, the slow one 20.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import ModelError, TotError

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "dask"}, "executor = 'dask': Input should be 'local' or 'ray'"),
        ({"replicas": 2}, "--replicas 2 is for Ray workers only: add --executor ray, or leave --replicas out"),
        ({"ray_address": "x:1"}, "--ray-address x:1 is for Ray workers only: add --executor ray"),
        ({"executor": "ray", "replicas": 0}, "replicas = 0: "),
        ({"gpus_per_replica": 0.5}, "option 'gpus_per_replica' was removed: run vLLM on the GPUs"),
        ({"executor": "ray", "ray_address": "nonsense"}, "the Ray cluster at nonsense can't be joined ("),
        ({"executor": "ray", "ray_address": "ray://a:1"}, "the Ray cluster at ray://a:1 can't be joined ("),
        (
            {"executor": "ray", "ray_address": "127.0.0.1:1"},
            "127.0.0.1:1 can't be joined (Connection refused): give the host:port that `ray",
        ),
    ],
)
def test_invalid_options_are_rejected(run: Any, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(TotError) as error:
        run(**options)
    assert message in str(error.value)
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_without_ray_the_error_names_the_install_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.evaluation.run.find_spec", lambda name: None)
    with pytest.raises(TotError, match="needs Ray, which is not installed: pip install ray"):
        run(executor="ray")


def test_a_decoder_with_an_engine_cannot_be_sent(run: Any, tiny: Any) -> None:
    with tiny() as decoder, pytest.raises(TotError, match=r"can't be sent to Ray's workers \(.*\): give decoder and"):
        run(executor="ray", decoder=decoder)


def test_a_worker_with_other_model_weights_is_rejected(tiny: Any, task: Any, rows: Path) -> None:
    from tot.evaluation.config import EvaluationRun
    from tot.evaluation.ray_executor import Worker, packed  # importing ray reads the cluster's settings

    with tiny() as decoder:
        work = EvaluationRun.of({"task": task("Riddles"), "data": str(rows), "model": decoder.model})
        worker = Worker(packed(work, [type(work.task)]), {"model_sha256": "0" * 64}, str(Path.cwd()))
        with pytest.raises(ModelError, match="on a Ray worker, and 0000000000000000 where the run was started: put"):
            asyncio.run(worker.open())


@pytest.mark.smoke
def test_more_resources_than_the_cluster_has_are_rejected_with_the_numbers(
    run: Any, address: str, tmp_path: Path
) -> None:
    message = r"room for 2 replicas, not for 3 \(nodes of 1 core and 1 core\): lower --replicas, or add nodes"
    with pytest.raises(TotError, match=message):
        run(executor="ray", ray_address=address, replicas=3)
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_waiting_for_a_busy_cluster_has_a_time_limit(
    run: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    import ray

    monkeypatch.setattr("tot.evaluation.ray_executor.SAY", 0.5)
    monkeypatch.setattr("tot.evaluation.ray_executor.PATIENCE", 1.0)
    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        with pytest.raises(TotError, match="has already joined a Ray cluster; leave it out"):
            run(executor="ray", ray_address=address)
        in_use = [ray.remote(Busy).options(num_cpus=1).remote() for _ in range(2)]
        ray.get([each.__ray_ready__.remote() for each in in_use])
        with pytest.raises(ModelError, match="no Ray worker became available in 1 s: 2 of 1 core are required"):
            run(executor="ray")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    assert "waiting for Ray workers: 2 of 1 core are required; of 2 cores, 0 are free" in capfd.readouterr().err


class Busy:
    """An actor that occupies a core."""


@pytest.mark.slow
def test_an_address_that_is_not_a_ray_cluster_is_given_up(python: Any, task: Any, rows: Path) -> None:
    code = (
        "import sys; from tot.evaluation import ray_executor; ray_executor.ANSWER = 3; from tot.cli.app import main\n"
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        place = "{}:{}".format(*listening.getsockname())
        arguments = ["eval", task("Riddles"), "--data", str(rows), "--executor", "ray", "--ray-address", place]
        process = python("-c", f"{code}sys.exit(main({[*arguments, '--model', 'none']!r}))")
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (2, "")
    assert f"tot: no Ray cluster has answered at {place} in 3 s: give the host:port that" in errors
