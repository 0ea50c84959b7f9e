"""Memory: freed on closing, taken by the KV cache, and limited by a container."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tot.decoders import Engine, ModelError, RequestError, load_decoder, load_model, machine
from tot.decoders.engine import runner

CPU = "cpu"
CYCLES = """
import sys
import psutil
from tot.decoders import Request, Sampling, load_decoder

options = dict(option.split("=") for option in sys.argv[3:])
for _ in range(10):
    decoder = load_decoder(sys.argv[1], sys.argv[2], kv_budget=3000, **options)
    decoder.generate([Request(prompt="on and on", sampling=Sampling(max_tokens=4))])
    decoder.close()
    print(psutil.Process().memory_info().rss)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "decoder",
    [("ar",), ("sd", "draft={}")],
)
def test_memory_stays_flat_over_loading_and_closing(decoder: tuple[str, ...], save_model: Callable[..., Path]) -> None:
    """The model has 75 MB in weights of 4 MB, which allocators may keep after they are freed."""
    folder = save_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    name, *options = (part.format(folder) for part in decoder)
    done = subprocess.run(
        [sys.executable, "-c", CYCLES, name, folder, *options], capture_output=True, text=True, check=True
    )
    resident = [int(line) for line in done.stdout.split()]
    assert len(resident) == 10
    assert resident[-1] < 1.1 * resident[1]


def test_a_closed_engine_holds_no_keys_and_values(make_model: Callable[..., Any], tokenizer: Any) -> None:
    engine = Engine(load_model(make_model(), tokenizer=tokenizer), 500)
    engine.close()
    backend: Any = engine.runner.backend
    assert not any(isinstance(one, np.ndarray) and one.size for one in vars(backend).values())
    assert not backend._store


@pytest.mark.parametrize("free", [2**22, 2**24])
def test_the_kv_budget_depends_on_the_free_memory(
    free: int, make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "free_memory", lambda device: free)
    loaded = load_model(make_model(), tokenizer=tokenizer)
    with Engine(loaded) as engine:
        slot = engine.runner.slot_bytes
        assert free / 4 - slot < engine.cache.capacity * slot <= free / 4
    monkeypatch.setattr(runner, "MAX_TOKENS", 100)
    with Engine(loaded) as engine:
        assert engine.cache.capacity == 100


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the files of two nested control groups: groups({name: content of the outer one}, {...of the inner one})."""
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")

    def write(outer: dict[str, str], inner: dict[str, str]) -> None:
        for folder, files in ((tmp_path / "outer", outer), (tmp_path / "outer" / "inner", inner)):
            folder.mkdir(exist_ok=True)
            for name, content in files.items():
                (folder / name).write_text(content)

    return write


def test_free_memory_is_limited_by_the_container(groups: Callable[..., None]) -> None:
    """The tightest limit of nested groups applies, and cached files count as free."""
    plenty = int(psutil.virtual_memory().available)
    inner = {"memory.max": "max", "memory.current": "100", "memory.stat": "anon 1\ninactive_file 0\n"}
    outer = {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "anon 1\ninactive_file 50000\n"}
    groups(outer, inner)
    assert machine.free_memory(CPU) == 1000000 - 400000 + 50000
    groups({"memory.max": "max"}, {})
    assert machine.free_memory(CPU) > 0.5 * plenty


@pytest.mark.parametrize(
    ("outer", "inner", "threads"),
    [
        ("50000 100000", "max 100000", 1),
        ("max 100000", "120000 100000", 2),
        ("max 100000", "max 100000", 4),
        ("?", "", 4),
    ],
)
def test_threads_are_limited_by_the_containers_cpu_time(
    groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch, outer: str, inner: str, threads: int
) -> None:
    groups({"cpu.max": outer}, {"cpu.max": inner})
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine._quota.cache_clear()
    assert machine.threads() == threads


def test_free_memory_is_limited_by_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    used = machine.psutil.Process().memory_info().vms
    for limit in (used + 10**9, used - 10**6):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda kind, limit=limit: (limit, -1))
        assert machine.free_memory(CPU) == pytest.approx(max(0, limit - used), abs=10**8)


def test_a_model_is_not_opened_in_too_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tot.decoders.models.loading.free_in_limit", lambda: 2**25)
    with pytest.raises(ModelError, match=r"^32 MiB of the process's memory are free, and opening .* needs 128: raise"):
        load_model(tmp_path)


def test_closing_a_decoder_frees_a_model_that_it_loaded(save_model: Callable[..., Path]) -> None:
    folder = save_model()
    decoder = load_decoder("sd", folder, kv_budget=500, draft=str(folder))
    held = weakref.ref(decoder.model)
    decoder.close()
    gc.collect()
    assert held() is None
    with pytest.raises(RequestError, match="this engine is closed and its model is freed: make a new one"):
        _ = decoder.model
    with pytest.raises(RequestError, match="this decoder is closed: make a new one"):
        decoder.generate([])
    assert decoder.engine.cache.live == 0
