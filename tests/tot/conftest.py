"""A scripted decoder, a task whose prompts are paths in the tree, a tiny random model, and the command line.

Import mode is importlib, so what tests share are fixtures: classes and factories.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot import Task
from tot.cli.app import main
from tot.decoders import Completion, LocalDecoder, Request, Usage, load_decoder

settings.register_profile("tot", deadline=None, derandomize=True, database=None)
settings.load_profile("tot")

PATH = "{{ thoughts | map(attribute='thought') | join('/') }}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


TWO_LEVELS = {
    "grow": ["a", "b"],
    "value a": "3",
    "value b": "7",
    "grow b": ["c", "d"],
    "grow a": ["e", "f"],
    "value b/c": "2",
    "value b/d": "9",
    "value a/e": "9",
    "value a/f": "5",
    "answer b/d": "the end",
}
"""What a decoder replies to Letters, two thoughts at a time: b is the better one, and d the best after it."""


class Letters(Task):
    """Prompts name the purpose and the path of thoughts: "grow b/c" asks what comes after the thoughts b and c."""

    templates: ClassVar = {"thought": f"grow {PATH}", "value": f"value {PATH}", "answer": f"answer {PATH}"}
    depth = 3


class Scripted:
    """A decoder that replies by a table from prompts to texts, and keeps what it was asked, batch by batch.

    A prompt's entry is a text, a list of texts (one a sample), or whole completions in their place. A prompt that isn't
    in the table is answered with itself. Every completion made here says that it took `tokens` new tokens.
    """

    def __init__(self, replies: dict[str, Any], tokens: int = 5) -> None:
        self.replies = replies
        self.tokens = tokens
        self.batches: list[list[Request]] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        prompt = request.prompt[-1].content
        reply = self.replies.get(prompt, prompt)
        if isinstance(reply, list):
            reply = reply[sample]
        if isinstance(reply, Completion):
            return reply
        return self.completion(reply, new_tokens=self.tokens)

    @staticmethod
    def completion(text: str, reason: Any = "eos", new_tokens: int = 5, **fields: Any) -> Completion:
        return Completion(text, (), 0.0, reason, Usage(new_tokens=new_tokens), **fields)

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.batches for request in batch]

    @property
    def asked(self) -> list[list[str]]:
        """The prompts of every batch."""
        return [[request.prompt[-1].content for request in batch] for batch in self.batches]


@pytest.fixture
def letters() -> type[Task]:
    return Letters


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def two_levels() -> dict[str, Any]:
    return dict(TWO_LEVELS)


@pytest.fixture(scope="session")
def tiny() -> Callable[[], LocalDecoder]:
    """Makes decoders on one random Llama, in float32, over a tokenizer of single bytes with a ChatML template."""
    torch.set_num_threads(1)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=control[:2], chat_template=CHATML
    )

    def make(**options: Any) -> LocalDecoder:
        config = LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)  # an Engine changes its model and its config: every decoder gets its own
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        return load_decoder("ar", model, tokenizer=tokenizer, **{"kv_budget": 4000} | options)

    return make


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python in an empty folder, with pipes: python("-m", "tot.cli.app", "models")."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "TERM": "xterm", "COLUMNS": "120"}
        command = [sys.executable, *arguments]
        ours = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and their children, ignore it
        try:
            process = subprocess.Popen(
                command, **{"cwd": tmp_path, "env": environment, "text": True, **pipes, **options}
            )
        finally:
            signal.signal(signal.SIGINT, ours)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def tot(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process, in an empty folder; gives its status, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        return status, *capfd.readouterr()

    return run
