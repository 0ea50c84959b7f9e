"""The tokenizer of a GGUF file, built from its metadata without transformers.

A file holds the vocabulary, and the name of the rule that splits text before it is encoded, but not the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tot.decoders.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types
_ENDS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>"),
    *("<|calls|>", "<|flush|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("[EOS]", "<eos>", "</s>", "<|call|>"),
}
"""Tokens that llama.cpp treats as the end of a turn or text by name, regardless of the file's end token."""

# `tokenizer.ggml.pre` names the pre-tokenizer; the file does not contain its rule.
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_QWEN35 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _BLANKS
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_WORDS = _WORD % ("*", "+"), _WORD % ("+", "*")
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
_GPT4O = "".join(f"{word}{_SUFFIX}?|" for word in _WORDS) + r"\p{N}{1,3}" + _MARKS
_TEKKEN = "".join(f"{word}|" for word in _WORDS) + r"\p{N}" + _MARKS
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
"""Rules that put BOS before a text, and take a whole word from the vocabulary even if no merges lead to it."""
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "a.x-4.0", "granite-docling", "mellum", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), (_QWEN2,)),
    **dict.fromkeys((*_WHOLE_WORDS, "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""Regular expressions of byte-level tokenizers by name, as llama.cpp defines them; each splits the pieces of the one
before. Granite's is "refact", SmolLM3's is "smaug-bpe", Seed-OSS's is "seed-coder", Mistral's is "tekken"."""
_SPACE = "▁"
"""SentencePiece's spelling of a space."""


class UnknownTokenizerError(Exception):
    """The tokenizer of a file is not supported."""


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: the file's end tokens, then tokens with known names."""
    declared = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [_CONTROL] * len(tokens))
    named = (i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends(token, kind))
    return list(dict.fromkeys([*(i for i in declared if i is not None and 0 <= i < len(tokens)), *named]))


def _ends(token: str, kind: int) -> bool:
    """Return whether a token ends a text by its name. A text token "</s>" is HTML, as in Gemma."""
    return token in _ENDS and (kind == _CONTROL or token != "</s>")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises UnknownTokenizerError, and LookupError for missing metadata."""
    architecture = str(metadata.get("general.architecture"))
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, rule = given["tokens"], given.get("pre")
    if given["model"] == "llama":
        backend = _sentencepiece(given, architecture)
    elif given["model"] == "gpt2" and rule in _SPLITS:
        backend = _byte_level(given, rule)
    else:
        raise UnknownTokenizerError(f"its tokenizer ({given['model']}, {rule}) is not supported")
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := given.get(f"{theirs}_token_id")) is not None:
            special[f"{ours}_token"] = tokens[index]
    added = []
    for kind, token in zip(given.get("token_type", ()), tokens, strict=False):
        control = kind == _CONTROL or _ends(token, kind)
        # Gemma's runs of spaces are tokens of its vocabulary, in which a space has another spelling.
        if control or (kind == _USER_DEFINED and backend.token_to_id(token) is not None):
            added.append(AddedToken(token, normalized=False, special=control))
    backend.add_tokens(added)
    add_bos = given.get("add_bos_token", given["model"] == "llama" or rule in _WHOLE_WORDS)
    if add_bos and (bos := special.get("bos_token")) is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    return Tokenizer(
        backend,
        {
            **special,
            "chat_template": given.get("tokenizer.chat_template"),
            "model_max_length": metadata.get(f"{architecture}.context_length"),
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_level(given: Mapping[str, Any], rule: str) -> Backend:
    """Return a byte-level BPE tokenizer, whose splitting rule has a name."""
    vocab = {token: index for index, token in enumerate(given["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in given["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[rule]]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    if _SPLITS[rule][0] in (_QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(given: Mapping[str, Any], architecture: str) -> Backend:
    """Return a SentencePiece BPE tokenizer. Its merges follow from the vocabulary: the best token first."""
    gemma = architecture.startswith("gemma")
    tokens = [_SPACE * len(token) if gemma and not token.strip(" ") else token for token in given["tokens"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    # The scores of Gemma's files are not in the order of its merges; the tokens are.
    scores = (
        {token: -index for token, index in vocab.items()} if gemma else dict(zip(tokens, given["scores"], strict=False))
    )
    unknown = given.get("unknown_token_id")
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=None if unknown is None or not gemma else tokens[unknown],
        )
    )
    ending = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.get("add_space_prefix", not gemma):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        ending.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(ending)
    return backend


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    """Return the pairs that spell each token: of the best-scored token first, with the longest start first."""
    pairs = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2]), vocab[pair[1]], vocab[pair[2]]))
    return [(start, end) for _, start, end in pairs]
