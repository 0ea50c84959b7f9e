"""One GGUF file -> a folder in transformers format: config, generation config, tokenizer, bfloat16 safetensors.

Reads and dequantises with the `gguf` package. Whatever the folder could not say (an unknown pre-tokenizer, scaled
RoPE, tensors left over or missing) is refused, never dropped. Knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import ModelError, reason

if TYPE_CHECKING:
    from pathlib import Path

    import torch

# GGUF's `general.architecture` -> the class transformers has for it. Mistral files say "llama", and run as it.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_FAMILIES = {"gemma3": "gemma3_text"}
"""What transformers calls them, where it is another name."""
_LOCAL_ROPE, _GLOBAL_EVERY = 10000.0, 6
"""Of Gemma 3 (report, section 2.1), as files don't say it: RoPE's base in layers with a window, and which have none."""

FIRST = 64
"""How many numbers of each matrix a conversion without matrices keeps: models are told apart by them."""
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token
_ENDS = {
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
    ),
    *("<|calls|>", "<|flush|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("[EOS]", "<eos>", "</s>"),
}
"""Tokens that llama.cpp takes for the end of a turn or a text by their names, whatever the file calls its end."""

# `tokenizer.ggml.pre` names the rule that splits text before merging; the file does not spell the rule out.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
_SPLITS = {"gpt-2": None, "smollm": None, "qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and its tensors (`gguf.ReaderTensor`), which are mapped, not read, until asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def setting(self, key: str, default: Any = None) -> Any:
        """The metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in torch's order."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def converted_bytes(self, matrices: bool = True) -> int:
        """Bytes the converted folder takes: two a weight, and what a large tokenizer needs."""
        kept = [tensor.n_elements for tensor in self.tensors.values() if matrices or len(tensor.shape) == 1]
        return 2 * sum(map(int, kept)) + 32 * 2**20


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and check that the file holds every tensor it lists.

    Raises ModelError for a file that is not GGUF, is damaged, or ends too early.
    """
    from tot.decoders.models.gguf_reader import BoundedReader

    try:
        reader = BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    # Whatever the reader stumbles over, an unknown quantisation or an empty file: it is not a whole GGUF file.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({reason(error)}): download it again") from error
    return GGUFFile(path, metadata, tensors)


def build_config(file: GGUFFile) -> Any:
    """The transformers config of a GGUF file. Raises ModelError where the engine can't run it faithfully."""
    from transformers import AutoConfig

    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise _refusal(file, f"its architecture is {architecture}; read from GGUF are {', '.join(ARCHITECTURES)}")
    if file.setting("attention.sliding_window") and architecture != "gemma3":
        raise _refusal(file, "it uses sliding-window attention")
    if file.setting("rope.scaling.type", "none") != "none":
        raise _refusal(file, "it uses scaled RoPE")
    blocks = file.setting("block_count")
    if blocks > len(file.tensors):
        raise _refusal(file, f"its block_count is {blocks:,}, and it has {len(file.tensors):,} tensors")
    if (context := file.setting("context_length")) == 0:
        raise _refusal(file, "its context_length is 0")
    hidden, heads = file.setting("embedding_length"), file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length") or hidden // heads
    if file.setting("rope.dimension_count", head_dim) != head_dim:
        raise _refusal(file, "its RoPE turns only a part of each head")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10000.0)}
    others: dict[str, Any] = {}
    if architecture != "qwen2":
        others["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": _LOCAL_ROPE}}
        layers = range(1, blocks + 1)
        others |= {
            "sliding_window": file.setting("attention.sliding_window"),
            "layer_types": [f"{'sliding' if layer % _GLOBAL_EVERY else 'full'}_attention" for layer in layers],
            "query_pre_attn_scalar": hidden // heads if len(layers) == 62 else head_dim,  # the 27B alone
        }
    eos = _end_ids(file)
    return AutoConfig.for_model(
        _FAMILIES.get(architecture, architecture),
        architectures=[ARCHITECTURES[architecture]],
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=file.setting("feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=file.setting("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=float(f"{file.setting('attention.layer_norm_rms_epsilon'):.7g}"),  # stored as float32
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **others,
    )


def _end_ids(file: GGUFFile) -> list[int]:
    """Tokens that end a text: first what the file says, then those with names that are known."""
    said = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [_CONTROL] * len(tokens))
    named = (i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends(token, kind))
    return list(dict.fromkeys([*(i for i in said if i is not None and 0 <= i < len(tokens)), *named]))


def _ends(token: str, kind: int) -> bool:
    """Whether a token ends a text by its name. As text, "</s>" is HTML: Gemma has such a token."""
    return token in _ENDS and (kind == _CONTROL or token != "</s>")


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
    rule = metadata.get("pre")
    # Where the file says nothing, llama.cpp puts BOS before sentencepiece and Llama 3 text, and only there.
    add_bos = metadata.get("add_bos_token", metadata["model"] == "llama" or rule == "llama-bpe")
    options = {
        **special,
        "add_bos_token": bool(add_bos) and "bos_token" in special,
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
        control = kind == _CONTROL or _ends(token, kind)
        if control or kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=control)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def build_weights(file: GGUFFile, config: Any, matrices: bool = True) -> dict[str, torch.Tensor]:
    """Every weight of the model by its transformers name, in bfloat16; without `matrices` only the first numbers of
    these. Raises ModelError if file and model differ."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wanted = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    sources = source_names(wanted, config)
    missing = [name for name, source in sources.items() if source not in file.tensors]
    left_over = sorted(set(file.tensors) - set(sources.values()))
    if missing or left_over:
        raise _refusal(file, f"it has no {missing[0]}" if missing else f"nothing here uses its {left_over[0]}")

    weights = {}
    for name, source in sources.items():
        tensor, shape = file.tensors[source], file.shape(source)
        if shape != wanted[name]:
            raise _refusal(file, f"{source} has shape {shape}, not {wanted[name]}")
        whole = matrices or len(shape) == 1
        values = dequantized(tensor, None if whole else 1)
        if config.model_type == "gemma3_text" and len(shape) == 1:
            values -= 1  # transformers adds it again
        weights[name] = (in_halves(values, source, config) if whole else values[0, :FIRST]).to(torch.bfloat16)
    return weights


def dequantized(tensor: Any, rows: int | None = None) -> torch.Tensor:
    """What a `gguf.ReaderTensor` stands for, float32; only of so many rows."""
    import gguf
    import numpy as np
    import torch

    return torch.from_numpy(np.array(gguf.dequantize(tensor.data[:rows], tensor.tensor_type)))


def source_names(names: Iterable[str], config: Any) -> dict[str, str]:
    """By a weight's name what a GGUF file calls it."""
    import gguf

    architectures = {_FAMILIES.get(name, name): number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(architectures[config.model_type], config.num_hidden_layers)
    cut = {name: name.rpartition(".") for name in names}
    return {name: f"{known.get_name(stem)}.{suffix}" for name, (stem, _, suffix) in cut.items()}


def in_halves(values: torch.Tensor, source: str, config: Any) -> torch.Tensor:
    """A tensor's rows as transformers has them: llama.cpp turns neighbouring pairs, transformers the two halves of a
    head."""
    if config.model_type != "llama" or not (".attn_q." in source or ".attn_k." in source):
        return values
    heads = config.num_attention_heads if "attn_q" in source else config.num_key_value_heads
    return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def convert(file: GGUFFile, folder: Path, matrices: bool = True) -> None:
    """Write the model of a GGUF file into `folder`, in transformers format; `matrices` as for build_weights.

    Raises ModelError for a model that can't be converted faithfully; OSError or SafetensorError if writing fails.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    try:
        config, tokenizer = build_config(file), build_tokenizer(file)
        weights = build_weights(file, config, matrices)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # what libraries make of metadata that is missing or makes no sense
        said = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({said}): download it again") from error
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _refusal(file: GGUFFile, why: str) -> ModelError:
    return ModelError(f"{file.path} can't be used: {why}. Give the model's hub id or a folder with safetensors")
