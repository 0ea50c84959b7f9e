"""One GGUF file -> a folder in transformers format: config, generation config, tokenizer, bfloat16 safetensors.

Reads the file itself (a header of 100,000 strings in 0.1 s) and dequantises with the `gguf` package. Whatever the
folder could not say (an unknown pre-tokenizer, scaled RoPE, tensors left over or missing) is refused, never dropped.
Knows nothing of caches.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

# GGUF's `general.architecture` -> the class transformers has for it. Mistral files say "llama", and run as it.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Scalar kinds of a metadata value (ggml's gguf.md): number of the kind -> its struct format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token

# `tokenizer.ggml.pre` names the rule that splits text before merging; the file does not spell the rule out.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
_SPLITS = {"gpt-2": None, "smollm": None, "qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in the file. `shape` is torch's order, `kind` a `gguf.GGMLQuantizationType` number."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and table of tensors; no tensor is read until asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def setting(self, key: str, default: Any = None) -> Any:
        """The metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    @property
    def converted_bytes(self) -> int:
        """Bytes the converted folder takes: two a weight, and what a large tokenizer needs."""
        return 2 * sum(prod(tensor.shape) for tensor in self.tensors.values()) + 32 * 2**20


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and check that the file holds every tensor it lists.

    Raises ModelError for a file that is not GGUF, is damaged, or ends too early.
    """
    import gguf

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            reader = _Reader(blob)
            metadata, entries = reader.read()
            alignment = metadata.get("general.alignment", 32)
            data = (reader.position + alignment - 1) // alignment * alignment
            tensors = {}
            for name, (shape, kind, offset) in entries.items():
                block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
                tensors[name] = Tensor(shape, kind, data + offset, prod(shape) // block * block_bytes)
            end = max((tensor.start + tensor.size for tensor in tensors.values()), default=0)
            if end > len(blob):
                raise ValueError(f"it ends at {len(blob):,} of {end:,} bytes")
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    # struct.error, UnicodeDecodeError, an unknown quantisation, an empty file: the bytes are not a whole GGUF file.
    except (ValueError, KeyError, TypeError, ArithmeticError, MemoryError, struct.error) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({_one_line(error)}): download it again") from error
    return GGUFFile(path, metadata, tensors)


class _Reader:
    """A position in the bytes of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

    def __init__(self, blob: mmap.mmap) -> None:
        self.blob = blob
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """(metadata, tensor name -> (shape, kind, offset)); leaves the position at the end of the header."""
        if self.blob[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        version, tensor_count, metadata_count = self.scalars("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not known, 2 and 3 are")
        metadata = {}
        for _ in range(metadata_count):
            key = self.string()
            metadata[key] = self.value(*self.scalars("I"))
        tensors = {}
        for _ in range(tensor_count):
            name = self.string()
            shape = self.scalars(f"{self.scalars('I')[0]}Q")
            tensors[name] = (shape[::-1], *self.scalars("IQ"))
        return metadata, tensors

    def scalars(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + kinds, self.blob, self.position)
        self.position += struct.calcsize("<" + kinds)
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.blob, self.position)
        start = self.position + 8
        self.position = start + length
        if self.position > len(self.blob):
            raise ValueError(f"it ends at {len(self.blob):,} bytes, inside its header")
        return self.blob[start : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalars("IQ")
            if element in _SCALARS:
                return list(self.scalars(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        return self.scalars(_SCALARS[kind])[0]


def build_config(file: GGUFFile) -> Any:
    """The transformers config of a GGUF file. Raises ModelError where the engine can't run it faithfully."""
    from transformers import AutoConfig

    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise _refusal(file, f"its architecture is {architecture}; read from GGUF are {', '.join(ARCHITECTURES)}")
    if file.setting("attention.sliding_window"):
        raise _refusal(file, "it uses sliding-window attention")
    if file.setting("rope.scaling.type", "none") != "none":
        raise _refusal(file, "it uses scaled RoPE")
    hidden, heads = file.setting("embedding_length"), file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length") or hidden // heads
    if file.setting("rope.dimension_count", head_dim) != head_dim:
        raise _refusal(file, "its RoPE turns only a part of each head")
    biased = {"attention_bias": "blk.0.attn_q.bias" in file.tensors} if architecture != "qwen2" else {}
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in eos if token is not None))
    return AutoConfig.for_model(
        architecture,
        architectures=[ARCHITECTURES[architecture]],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=file.setting("feed_forward_length"),
        num_hidden_layers=file.setting("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.setting("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=file.setting("context_length"),
        rms_norm_eps=float(f"{file.setting('attention.layer_norm_rms_epsilon'):.7g}"),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **biased,
    )


def build_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer of a GGUF file, as transformers' fast tokenizer.

    Byte-level vocabularies are built here: transformers splits those it does not know (SmolLM's among them) by GPT-2's
    rule, which gives other tokens (two spaces before a digit become two tokens). Sentencepiece ones are left to it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := metadata.get(f"{theirs}_token_id")) is not None:
            special[f"{ours}_token"] = metadata["tokens"][index]
    options = {
        **special,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": file.setting("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if metadata["model"] == "llama":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name, **options)
        # Where this file happened to lie is no property of its tokenizer, and would be saved with it.
        for leak in ("is_local", "local_files_only", "name_or_path"):
            tokenizer.init_kwargs.pop(leak, None)
        return tokenizer
    rule = metadata.get("pre")
    if metadata["model"] != "gpt2" or rule not in _SPLITS:
        raise _refusal(file, f"its tokenizer ({metadata['model']}, {rule}) is not among those tested")

    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe"))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_SPLITS[rule] is None)
    if rule == "smollm":  # llama.cpp: "\p{N}" first, then GPT-2's rule
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    elif (split := _SPLITS[rule]) is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), by_bytes])
    else:
        backend.pre_tokenizer = by_bytes
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, token in zip(metadata.get("token_type", ()), metadata["tokens"], strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    # llama.cpp puts BOS before Llama 3's text unless the file says not to.
    add_bos = bool(metadata.get("add_bos_token", rule == "llama-bpe")) and "bos_token" in special
    return PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=add_bos, **options)


def build_weights(file: GGUFFile, config: Any) -> dict[str, torch.Tensor]:
    """Every weight of the model by its transformers name, in bfloat16. Raises ModelError if file and model differ."""
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wanted = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[config.model_type], config.num_hidden_layers)
    sources = {}
    for name in wanted:
        stem, _, suffix = name.rpartition(".")
        sources[name] = f"{names.get_name(stem)}.{suffix}"
    missing = [name for name, source in sources.items() if source not in file.tensors]
    left_over = sorted(set(file.tensors) - set(sources.values()))
    if missing or left_over:
        raise _refusal(file, f"it has no {missing[0]}" if missing else f"nothing here uses its {left_over[0]}")

    blob = np.memmap(file.path, mode="r", dtype=np.uint8)
    weights = {}
    for name, source in sources.items():
        tensor = file.tensors[source]
        if tensor.shape != wanted[name]:
            raise _refusal(file, f"{source} has shape {tensor.shape}, not {wanted[name]}")
        raw = blob[tensor.start : tensor.start + tensor.size].reshape(*tensor.shape[:-1], -1)
        values = torch.from_numpy(np.array(gguf.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind))))
        if config.model_type == "llama" and (".attn_q." in source or ".attn_k." in source):
            # llama.cpp turns neighbouring pairs, transformers the two halves of a head: put the rows back.
            heads = config.num_attention_heads if "attn_q" in source else config.num_key_value_heads
            values = values.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        weights[name] = values.to(torch.bfloat16)
    return weights


def convert(file: GGUFFile, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, in transformers format.

    Raises ModelError for a model that can't be converted faithfully; OSError or SafetensorError if writing fails.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    try:
        config, tokenizer = build_config(file), build_tokenizer(file)
        weights = build_weights(file, config)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # what libraries make of metadata that is missing or makes no sense
        reason = f"no {error}" if isinstance(error, KeyError) else _one_line(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({reason}): download it again") from error
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _refusal(file: GGUFFile, reason: str) -> ModelError:
    return ModelError(f"{file.path} can't be used: {reason}. Give the model's hub id or a folder with safetensors")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
