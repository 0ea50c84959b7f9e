"""Ray and the local executor give the same samples and trees, also if one resumes a run of the other.

These tests take 40 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.ray


def untimed(folder: Path) -> dict[str, Any]:
    """Return a folder's trees without seconds and log-probabilities, whose last digits depend on the packing."""
    trees = {path.name: json.loads(path.read_text()) for path in (folder / "trees").iterdir()}
    for tree in trees.values():
        for node in tree["nodes"]:
            node.pop("seconds", None)
            for part in (node.get("thought") or {}).get("drawn", {}).values():
                part.pop("logprobs")
    return trees


def test_two_engines_give_the_samples_and_trees_of_one(
    run: Any, tiny: Any, address: str, lines: Any, unfinished: Any, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with tiny() as decoder:
        decoder.model.save_pretrained("model")
        decoder.tokenizer.save_pretrained("model")
    options = {"model": "model", "decoder": "ar", "kv_budget": 4000, "repeats": 2, "reproducible": True}
    run(out="local", **options)
    expected = lines(tmp_path / "local")
    assert len({json.loads(line + "}")["answer"] for line in expected}) > 8
    results = run(out="ray", executor="ray", ray_address=address, concurrency=5, **options)
    assert results.samples == 16
    assert lines(tmp_path / "ray") == expected
    trees = untimed(tmp_path / "ray")
    assert len(trees) == 16
    assert trees == untimed(tmp_path / "local")
    config = yaml.safe_load((tmp_path / "ray" / "config.yaml").read_text())
    assert (config["executor"], config["ray_address"]) == ("ray", address)
    for began, goes_on in (("local", {"executor": "ray", "ray_address": address, "replicas": 1}), ("ray", {})):
        unfinished(tmp_path / began, tmp_path / f"{began}-half", 9)
        run(out=f"{began}-half", resume=True, **options, **goes_on)
        assert lines(tmp_path / f"{began}-half") == expected
    assert capfd.readouterr().out == ""
