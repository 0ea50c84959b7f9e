"""Conversion of a GGUF file to transformers format: config, generation config, tokenizer, bfloat16 safetensors.

Reads and dequantizes with the `gguf` package. Files with features that cannot be converted (an unknown pre-tokenizer,
scaled RoPE, extra or missing tensors) are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.gguf_model import build_config, build_weights, refusal
from tot.decoders.models.gguf_reader import GGUFFile

if TYPE_CHECKING:
    from pathlib import Path

_CONTROL, _USER_DEFINED = 3, 4  # token types
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
"""Tokens that llama.cpp treats as the end of a turn or text by name, regardless of the file's end token."""

# `tokenizer.ggml.pre` names the pre-tokenizer; the file does not contain its rule.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
_SPLITS = {"gpt-2": None, "smollm": None, "qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}


def _end_ids(file: GGUFFile) -> list[int]:
    """Return the tokens that end a text: the file's end tokens, then tokens with known names."""
    declared = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [_CONTROL] * len(tokens))
    named = (i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends(token, kind))
    return list(dict.fromkeys([*(i for i in declared if i is not None and 0 <= i < len(tokens)), *named]))


def _ends(token: str, kind: int) -> bool:
    """Return whether a token ends a text by its name. A text token "</s>" is HTML, as in Gemma."""
    return token in _ENDS and (kind == _CONTROL or token != "</s>")


def build_tokenizer(file: GGUFFile) -> Any:
    """Return the tokenizer of a GGUF file, as a fast tokenizer of transformers.

    Byte-level tokenizers are built here, as transformers falls back to GPT-2's pre-tokenizer for unknown ones (such as
    SmolLM's), which gives other tokens. transformers builds SentencePiece tokenizers.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := metadata.get(f"{theirs}_token_id")) is not None:
            special[f"{ours}_token"] = metadata["tokens"][index]
    rule = metadata.get("pre")
    # By default llama.cpp adds BOS to SentencePiece and Llama 3 text only.
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
        # The file's location would be saved with the tokenizer.
        for leak in ("is_local", "local_files_only", "name_or_path"):
            tokenizer.init_kwargs.pop(leak, None)
        return tokenizer
    if metadata["model"] != "gpt2" or rule not in _SPLITS:
        raise refusal(file, f"its tokenizer ({metadata['model']}, {rule}) is not supported")

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


def convert(file: GGUFFile, folder: Path, matrices: bool = True) -> None:
    """Write the model of a GGUF file into `folder`, in transformers format; `matrices` as for build_weights.

    Raises ModelError for a model that can't be converted faithfully; OSError or SafetensorError if writing fails.
    """
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    try:
        config, tokenizer = build_config(file, _end_ids(file)), build_tokenizer(file)
        weights = build_weights(file, config, matrices)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # libraries raise various errors for missing or invalid metadata
        cause = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({cause}): download it again") from error
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    metadata = {"format": "pt", "quantized": str(file.quantized)}
    save_file(weights, folder / "model.safetensors", metadata=metadata)
