"""Prompts on disk: later engines load them with the same results, and bad files or folders fail no request."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from tot.decoders import Completion, Request, Sampling, load_decoder
from tot.decoders.engine import prefix_cache
from tot.decoders.engine.prefix_cache import BLOCK, PrefixCache
from tot.decoders.kernels.native.tiles import kernels_run

DEMONSTRATIONS = "The sum of 10 and 11 is in the range on and on, and the other one: " * 8


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder for prompts."""
    monkeypatch.setattr(prefix_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "prefixes"


@pytest.fixture
def folder(save_model: Callable[..., Path]) -> Callable[..., Path]:
    """Save a tiny model that runs in C, by seed."""
    if not kernels_run(32, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2 or NEON")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    return lambda seed=0: save_model(name=f"model{seed}", seed=seed, **sizes)


@pytest.fixture
def run(root: Path, folder: Callable[..., Path]) -> Callable[..., Completion]:
    """Complete one prompt in an engine of its own, as a process of its own would."""
    path = folder()

    def complete(prompt: str, temperature: float = 0.0, method: str = "ar", **options: Any) -> Completion:
        with load_decoder(method, path, **{"dtype": "fp32", "kv_budget": 3000} | options) as decoder:
            sampling = Sampling(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
            return decoder.generate([Request(prompt=prompt, sampling=sampling)])[0]

    return complete


def files_in(root: Path) -> list[Path]:
    return sorted(root.glob("*.kv"))


def stored_part(length: int) -> int:
    """Tokens of a prompt that its files hold. The last token is computed for its logits."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["ar", "sd"])
def test_a_later_engine_loads_the_prompt_and_writes_the_same_text(
    run: Callable[..., Completion], root: Path, dtype: str, method: str
) -> None:
    if dtype == "bf16" and not kernels_run(32, 2, np.dtype(bfloat16), "cpu"):
        pytest.skip("needs a processor with bfloat16 products")
    first, second = (run(DEMONSTRATIONS, 1.0, method, dtype=dtype) for _ in range(2))
    without = run(DEMONSTRATIONS, 1.0, method, dtype=dtype, prefix_cache=False)
    assert second.tokens == first.tokens == without.tokens
    length = first.usage.prompt_tokens
    assert [one.usage.reused_prompt_tokens for one in (first, second, without)] == [0, stored_part(length), 0]
    assert len(files_in(root)) == stored_part(length) // BLOCK
    assert {path.stat().st_mode & 0o777 for path in files_in(root)} == {0o600}
    assert root.stat().st_mode & 0o777 == 0o700


def test_another_question_loads_the_demonstrations(run: Callable[..., Completion], root: Path) -> None:
    run(DEMONSTRATIONS + "10 and 11?")
    count = len(files_in(root))
    other = run(DEMONSTRATIONS + "the range?")
    assert other.usage.reused_prompt_tokens == stored_part(len(DEMONSTRATIONS) and other.usage.prompt_tokens - 5)
    assert len(files_in(root)) == count  # little was new, so nothing was written
    assert other.tokens == run(DEMONSTRATIONS + "the range?", prefix_cache=False).tokens


def test_short_prompts_and_later_ones_of_a_kind_are_not_written(root: Path, folder: Callable[..., Path]) -> None:
    with load_decoder("ar", folder(), dtype="fp32", kv_budget=9000) as decoder:

        def complete(prompt: str) -> int:
            decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=2))])
            for writer in decoder.engine._prefixes._writers:  # type: ignore[union-attr]
                writer.join()
            return len(files_in(root))

        assert complete("the sum of 10 and 11") == 0
        many = complete(DEMONSTRATIONS)
        assert many > 0
        assert complete(DEMONSTRATIONS + "abc " * 60) == many  # half of it was known
        counts = [complete(f"{number} " + DEMONSTRATIONS) for number in range(20)]
    assert len(set(counts)) == prefix_cache._MAX_PROMPTS - 1
    assert counts[-1] == counts[-2]


def test_another_model_dtype_or_processor_level_does_not_match(
    root: Path, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reused(path: Path, **options: Any) -> int:
        with load_decoder("ar", path, **{"dtype": "fp32", "kv_budget": 3000} | options) as decoder:
            request = Request(prompt=DEMONSTRATIONS, sampling=Sampling(max_tokens=2))
            return decoder.generate([request])[0].usage.reused_prompt_tokens

    first = folder()
    assert reused(first) == 0
    assert reused(folder(1)) == 0
    if kernels_run(32, 2, np.dtype(bfloat16), "cpu"):
        assert reused(first, dtype="bf16") == 0
    assert reused(first) > 0
    with monkeypatch.context() as patch:
        patch.setattr("tot.decoders.kernels.native.forward.processor", lambda: "another processor")
        assert reused(first) == 0
    weights = first / "model.safetensors"
    os.utime(weights, ns=(1, 1))  # as a training run that saves the model again
    assert reused(first) == 0


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-5] + bytes([path.read_bytes()[-5] ^ 1]) + bytes(4)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "another block": lambda path: path.write_bytes(
        next(one for one in path.parent.iterdir() if one != path).read_bytes()
    ),
    "writable by others": lambda path: path.chmod(0o666),
    "of another user": lambda path: os.chown(path, 1234, -1),
    "a link": lambda path: path.rename(path.with_suffix(".real")) and path.symlink_to(path.with_suffix(".real")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_computed_again(
    run: Callable[..., Completion], root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(DEMONSTRATIONS)
    first = min(files_in(root), key=lambda path: -path.stat().st_mtime_ns)  # of the first block
    if damage == "of another user" and os.getuid() != 0:
        pytest.skip("only root can give files away")
    DAMAGES[damage](first)
    with caplog.at_level(logging.WARNING):
        again = run(DEMONSTRATIONS)
    assert (again.tokens, again.usage.reused_prompt_tokens) == (expected.tokens, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{first} ")
    assert line.endswith(", so its prompt is computed again")
    restored = run(DEMONSTRATIONS)
    assert restored.usage.reused_prompt_tokens == stored_part(expected.usage.prompt_tokens)


def test_a_folder_that_others_can_write_to_is_not_used(
    run: Callable[..., Completion], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(DEMONSTRATIONS)
    root.chmod(0o777)
    assert run(DEMONSTRATIONS).usage.reused_prompt_tokens == 0
    assert f"{root} can be written to by others, so no prompts are kept in it: make it private" in caplog.text


@contextmanager
def full_disk() -> Iterator[None]:
    """Let every write beyond 4 kB fail with an OSError."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_fails_no_request_and_leaves_no_part_of_a_file(
    run: Callable[..., Completion], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(DEMONSTRATIONS, prefix_cache=False).tokens
    with caplog.at_level(logging.INFO), full_disk():
        assert run(DEMONSTRATIONS).tokens == expected
    assert "no more prompts are kept in" in caplog.text
    assert not any(root.iterdir())


def test_a_folder_that_cannot_be_made_or_vanishes_fails_no_request(
    run: Callable[..., Completion], root: Path, folder: Callable[..., Path]
) -> None:
    expected = run(DEMONSTRATIONS, prefix_cache=False).tokens
    root.parent.write_text("a file")
    assert run(DEMONSTRATIONS).tokens == expected
    root.parent.unlink()
    with load_decoder("ar", folder(), dtype="fp32", kv_budget=3000) as decoder:
        root.rmdir()
        sampling = Sampling(max_tokens=12, seed=3, ignore_eos=True)
        assert decoder.generate([Request(prompt=DEMONSTRATIONS, sampling=sampling)])[0].tokens == expected


def test_the_least_recently_used_prompts_are_deleted_later_blocks_first(
    run: Callable[..., Completion], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (f"{name} " + DEMONSTRATIONS for name in ("abc", "the", "ing"))
    monkeypatch.setattr(prefix_cache, "_PROMPT_SHARE", 1)
    run(first)
    blocks = len(files_in(root))
    size = files_in(root)[0].stat().st_size
    monkeypatch.setattr(prefix_cache, "_MAX_BYTES", (2 * blocks + 1) * size)
    run(second)
    whole = run(first).usage.reused_prompt_tokens  # used again, after the second one
    run(third)
    assert len(files_in(root)) == 2 * blocks + 1
    reused = [run(prompt).usage.reused_prompt_tokens for prompt in (first, third, second)]
    assert reused == [whole, whole, BLOCK]


def test_prompts_of_damaged_weights_are_not_written(root: Path, folder: Callable[..., Path]) -> None:
    path = folder() / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, path, metadata={"format": "pt"})
    with load_decoder("ar", path.parent, dtype="fp32", kv_budget=3000) as decoder:
        with pytest.raises(Exception, match="not finite"):
            decoder.generate([Request(prompt=DEMONSTRATIONS, sampling=Sampling(max_tokens=2))])
        assert isinstance(decoder.engine._prefixes, PrefixCache)
    assert files_in(root) == []
