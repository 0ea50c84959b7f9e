"""A model's tokenizer, special tokens and chat template, read without transformers, whose import takes a second.

The interface is the part of transformers' tokenizers that this project uses, so that either kind of object serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tot.decoders.errors import ModelError, reason

_FILE, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the settings of a tokenizer_config.json.

    `backend` may be a function that loads it, called in a thread at once, without the interpreter's lock.
    """

    def __init__(self, backend: Backend | Callable[[], Backend], settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.chat_template: str | None = self.settings.get("chat_template")
        extra = self.settings.get("extra_special_tokens")
        named = {name: token for name, token in self.settings.items() if name.endswith("_token")}
        named |= extra if isinstance(extra, Mapping) else {}
        named = {name: token for name, token in named.items() if isinstance(token, str | Mapping)}
        self.special_tokens_map = {name: _text(token) for name, token in named.items()}
        """Special tokens by name, such as "bos_token", as chat templates see them."""
        self._loading: Future[Backend] = Future()
        if isinstance(backend, Backend):
            self._loading.set_result(backend)
        else:
            Thread(target=self._load, args=(backend,), daemon=True).start()

    @classmethod
    def read(cls, folder: Path) -> Tokenizer:
        """Read a folder's tokenizer.json, tokenizer_config.json and chat template; the first in the background.

        Raises OSError or ValueError for settings that cannot be read. If tokenizer.json cannot be, the first use of the
        tokenizer raises ModelError.
        """
        settings = _read_json(folder / _SETTINGS)
        if "added_tokens_decoder" not in settings:
            settings |= _read_json(folder / "special_tokens_map.json")
        settings = {name: value for name, value in settings.items() if value is not None}
        template: Any = settings.get("chat_template")
        if (folder / _TEMPLATE).exists():
            template = (folder / _TEMPLATE).read_text(encoding="utf-8")
        elif isinstance(template, list):  # several by name
            template = {one["name"]: one["template"] for one in template}.get("default")
        return cls(partial(_parse, folder / _FILE), {**settings, "chat_template": template})

    def _load(self, load: Callable[[], Backend]) -> None:
        try:
            self._loading.set_result(load())
        except ModelError as error:  # the thread that waits raises it
            self._loading.set_exception(error)

    @cached_property
    def backend_tokenizer(self) -> Backend:
        """The tokenizer of the `tokenizers` library, with all added tokens. Raises ModelError if it can't be read."""
        backend = self._loading.result()
        backend.no_truncation()  # a tokenizer.json may hold the settings of its training
        backend.no_padding()
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        declared = self.settings.get("added_tokens_decoder") or {}
        listed = self.settings.get("extra_special_tokens") or self.settings.get("additional_special_tokens") or ()
        special = [*self.special_tokens_map.values(), *(() if isinstance(listed, Mapping) else map(_text, listed))]
        tokens = [_added(declared[index]) for index in sorted(declared, key=int)]
        tokens += [AddedToken(token, special=True, normalized=False) for token in special]
        for token in tokens:
            if token.content not in known:
                backend.add_tokens([token])
                known.add(token.content)
        return backend

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens, among them control tokens, by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text in which control tokens count, by default with a begin-of-text token."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        listed = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        return str(self.backend_tokenizer.decode(listed, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, index: int) -> str | None:
        """Return the spelling of a token in the vocabulary."""
        return self.backend_tokenizer.id_to_token(index)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None."""
        return self.backend_tokenizer.token_to_id(token)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.convert_tokens_to_ids(token)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if any."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if any."""
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills rows of a batch in training, if any."""
        return self._id_of("pad_token")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: Literal[False] = False,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        """Return the text of messages; `options` are other variables of the template.

        Raises any error of the template, and ValueError without a template."""
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        from tot.decoders.models.chat_template import render

        turns = [dict(message) for message in messages]
        about = {**self.special_tokens_map, **options}
        return render(self.chat_template, messages=turns, add_generation_prompt=add_generation_prompt, **about)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return _compact(self.backend_tokenizer.to_str())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that `read` and transformers read into a folder, which is created."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / _FILE).write_text(self.to_json(), encoding="utf-8")
        settings = {**self.settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        if (template := settings.pop("chat_template", None)) is not None:
            (place / _TEMPLATE).write_text(template, encoding="utf-8")
        (place / _SETTINGS).write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")


def _parse(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} can't be read ({reason(error)}): download it again") from error


def _compact(serialized: str) -> str:
    """Spell merges as "a b" instead of ["a", "b"], which is parsed a third faster, if no token has a blank."""
    content = json.loads(serialized)
    merges = content["model"].get("merges") or []
    if all(isinstance(merge, list) and not any(" " in part for part in merge) for merge in merges):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty if the file does not exist."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no mapping")
    return content


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added(token: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
    return AddedToken(str(token["content"]), **flags)
