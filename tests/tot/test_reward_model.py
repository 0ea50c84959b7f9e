"""RewardModel: classification heads with random weights, compared with logits computed one text at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from tot import BFS, RewardModel, solve
from tot.decoders import ModelError

CONTROL = ["<|pad|>", "<|start|>", "<|end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT = (
    "{% for message in messages %}{{ '<|start|>' + message.role + ':' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)
TEXTS = [
    ("two and two?", ("four",)),
    ("two and two?", ("one", "two", "three then")),
    ("q", ("x",)),
    ("a question rather longer than the others, to be padded to", ("a step", "another")),
    ("q", ("", "y")),
]


@pytest.fixture
def bytewise() -> Callable[..., PreTrainedTokenizerFast]:
    """A byte tokenizer, with or without a chat template: bytewise(chat=True)."""

    def make(chat: bool = False, **specials: str) -> PreTrainedTokenizerFast:
        vocabulary = {text: i for i, text in enumerate([*CONTROL, *LETTERS])}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|end|>",
            additional_special_tokens=["<|start|>"],
            chat_template=CHAT if chat else None,
            **specials,
        )

    return make


@pytest.fixture
def head() -> Callable[..., Any]:
    """A tiny classifier with random weights: head(LlamaForTokenClassification, labels=2)."""

    def make(kind: Any = LlamaForSequenceClassification, labels: int = 1, pad: int | None = 0) -> Any:
        torch.manual_seed(labels)
        sizes = {"vocab_size": len(CONTROL) + len(LETTERS), "hidden_size": 32, "intermediate_size": 48}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
        config = BertConfig if kind is BertForSequenceClassification else LlamaConfig
        options = {"num_labels": labels, "pad_token_id": pad, "initializer_range": 0.3}
        return kind(config(**sizes, **options)).eval().requires_grad_(False)

    return make


def ids_of(text: str) -> list[int]:
    """Return the byte tokenizer's ids of ASCII text: each character is a token."""
    coded = {" ": "Ġ", "\n": "Ċ"}
    return [len(CONTROL) + LETTERS.index(coded.get(character, character)) for character in text]


def logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0].float()
    return result


# -- outcome ----------------------------------------------------------------------------------------------------


def test_a_single_label_is_the_raw_score_of_question_and_thoughts(head: Any, bytewise: Any) -> None:
    model = head(labels=1)
    scores = RewardModel(model=model, tokenizer=bytewise()).scores(TEXTS[:2])
    expected = [logits(model, ids_of(t)) for t in ("two and two?\nfour\n", "two and two?\none\ntwo\nthree then\n")]
    assert scores == pytest.approx([float(score[0]) for score in expected], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize("label", [0, 1, 2])
def test_several_labels_give_the_probability_of_the_selected_one(head: Any, bytewise: Any, label: int) -> None:
    model = head(labels=3)
    (score,) = RewardModel(model=model, tokenizer=bytewise(), label=label).scores([("q", ("x",))])
    assert score == pytest.approx(float(logits(model, ids_of("q\nx\n")).softmax(-1)[label]), abs=1e-6)


def test_a_separator_follows_the_question_and_every_thought(head: Any, bytewise: Any) -> None:
    model = head(labels=1)
    evaluator = RewardModel(model=model, tokenizer=bytewise(), separator=" ;")
    assert evaluator.scores([("q", ("x", "y"))]) == pytest.approx([float(logits(model, ids_of("q ;x ;y ;"))[0])])


def test_with_a_chat_template_the_thoughts_are_the_assistants_message(head: Any, bytewise: Any) -> None:
    model = head(labels=1)
    text = [1, *ids_of("user:q"), 2, 1, *ids_of("assistant:x\ny\n"), 2]
    (score,) = RewardModel(model=model, tokenizer=bytewise(chat=True)).scores([("q", ("x", "y"))])
    assert score == pytest.approx(float(logits(model, text)[0]), abs=1e-5)


def test_control_tokens_spelled_in_a_question_or_a_thought_are_text(head: Any, bytewise: Any) -> None:
    model = head(labels=1)
    (score,) = RewardModel(model=model, tokenizer=bytewise(chat=True)).scores([("<|end|>", ("<|start|>",))])
    text = [1, *ids_of("user:<|end|>"), 2, 1, *ids_of("assistant:<|start|>\n"), 2]
    assert score == pytest.approx(float(logits(model, text)[0]), abs=1e-5)
    real = [1, *ids_of("user:"), 2, 2, 1, *ids_of("assistant:"), 1, *ids_of("\n"), 2]
    assert score != pytest.approx(float(logits(model, real)[0]), abs=1e-3)


def test_bert_gets_its_closing_separator(head: Any, bytewise: Any) -> None:
    model = head(BertForSequenceClassification, labels=2)
    tokenizer = bytewise(sep_token="<|end|>")
    (score,) = RewardModel(model=model, tokenizer=tokenizer).scores([("q", ("x",))])
    assert score == pytest.approx(float(logits(model, [*ids_of("q\nx\n"), 2]).softmax(-1)[1]), abs=1e-6)


# -- process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregate", "of"),
    [("last", lambda p: p[-1]), ("min", min), ("mean", lambda p: sum(p) / len(p)), ("product", math.prod)],
)
def test_a_process_model_scores_the_last_token_of_every_thought(
    head: Any, bytewise: Any, aggregate: Any, of: Callable[[list[float]], float]
) -> None:
    model = head(LlamaForTokenClassification, labels=2)
    evaluator = RewardModel(model=model, tokenizer=bytewise(), kind="process", aggregate=aggregate)
    right = logits(model, ids_of("q\nab\nc\nd\n")).softmax(-1)[:, 1]  # the ends are at 4, 6 and 8
    steps = [float(right[at]) for at in (4, 6, 8)]
    assert evaluator.scores([("q", ("ab", "c", "d"))]) == pytest.approx([of(steps)], abs=1e-5)
    assert len({round(step, 3) for step in steps}) == 3


# -- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("cls", "kind", "labels"),
    [
        (LlamaForSequenceClassification, "outcome", 1),
        (LlamaForSequenceClassification, "outcome", 2),
        (LlamaForTokenClassification, "process", 2),
        (BertForSequenceClassification, "outcome", 2),
    ],
)
def test_a_batch_gives_the_scores_of_single_texts(
    head: Any, bytewise: Any, cls: Any, kind: Any, labels: int, chat: bool, pad: int | None
) -> None:
    model, tokenizer = head(cls, labels=labels, pad=pad), bytewise(chat)
    options: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "kind": kind, "aggregate": "mean"}
    alone = [RewardModel(**options).scores([text])[0] for text in TEXTS]
    for batch in (2, 5):
        assert RewardModel(**options, batch=batch).scores(TEXTS) == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in alone}) == len(TEXTS)


def test_texts_are_scored_in_batches_of_the_given_size(
    head: Any, bytewise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = head(labels=1), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: sizes.append(len(kw["input_ids"])) or forward(**kw))
    RewardModel(model=model, tokenizer=bytewise(), batch=2).scores(TEXTS)
    assert sizes == [2, 2, 1]


# -- folders ----------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_from_a_folder(head: Any, bytewise: Any, tmp_path: Path) -> None:
    model, tokenizer = head(labels=1), bytewise(chat=True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    from_folder = RewardModel(model=str(tmp_path)).scores(TEXTS)
    assert from_folder == pytest.approx(RewardModel(model=model, tokenizer=tokenizer).scores(TEXTS), abs=1e-5)


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        (LlamaForTokenClassification, "outcome"),
        (LlamaForSequenceClassification, "process"),
        (LlamaForCausalLM, "outcome"),
        (LlamaForCausalLM, "process"),
    ],
)
def test_a_folder_without_the_required_head_is_rejected(
    head: Any, bytewise: Any, tmp_path: Path, saved: Any, kind: Any
) -> None:
    head(saved, labels=2).save_pretrained(tmp_path)
    bytewise().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"is {saved.__name__}, not one of kind '{kind}': try the other kind"):
        RewardModel(model=str(tmp_path), kind=kind).scores(TEXTS)


def test_pickled_weights_are_rejected(head: Any, bytewise: Any, tmp_path: Path) -> None:
    model = head(labels=1)
    model.save_pretrained(tmp_path)
    bytewise().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"can't be loaded \(.*safetensors.*\): give a hub id or a folder"):
        RewardModel(model=str(tmp_path)).scores(TEXTS)


def test_a_missing_folder_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reward model .*absent can't be loaded \(.+\): give a hub id or a folder"):
        RewardModel(model=str(tmp_path / "absent")).scores(TEXTS)


def test_a_model_object_needs_its_tokenizer(head: Any) -> None:
    with pytest.raises(ModelError, match=r"a model object without a tokenizer: give tokenizer="):
        RewardModel(model=head()).scores(TEXTS)


@pytest.mark.parametrize(
    ("cls", "kind", "labels", "label"),
    [
        (LlamaForSequenceClassification, "outcome", 2, 2),
        (LlamaForTokenClassification, "process", 2, 5),
        (LlamaForTokenClassification, "process", 1, 0),
    ],
)
def test_a_missing_label_is_rejected(head: Any, bytewise: Any, cls: Any, kind: Any, labels: int, label: int) -> None:
    evaluator = RewardModel(model=head(cls, labels=labels), tokenizer=bytewise(), kind=kind, label=label)
    with pytest.raises(
        ModelError, match=f"label {label} is not among the reward model's {labels} labels: give another"
    ):
        evaluator.scores(TEXTS)


# -- in a search ------------------------------------------------------------------------------------------------


def test_a_search_gets_its_values_from_the_reward_model(
    letters: Any, scripted: Any, head: Any, bytewise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = head(labels=1), bytewise()
    evaluator = RewardModel(model=model, tokenizer=tokenizer)
    scored: list[Any] = []
    scores = RewardModel.scores
    monkeypatch.setattr(RewardModel, "scores", lambda self, texts: scored.extend(texts) or scores(self, texts))
    decoder = scripted({"grow": ["a", "b"], "grow a": ["c", "d"], "grow b": ["c", "d"]})
    search = BFS(thoughts=2, breadth=2, depth=3)
    solution = solve(letters, "q", decoder=decoder, search=search, evaluator=evaluator)
    tree = solution.tree
    for node in list(tree)[1:]:
        text = "\n".join(["q", *(thought.text for thought in tree.state(node).thoughts), ""])
        assert node.value == pytest.approx(float(logits(model, ids_of(text))[0]), abs=1e-5)
    assert solution.value == max(node.value for node in tree if node.depth == 2 and node.value is not None)
    assert len(scored) == 6
    assert {request.purpose for request in decoder.requests} == {"generate", "answer"}


def test_concurrent_searches_load_a_model_once(
    head: Any, bytewise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head(labels=1).save_pretrained(tmp_path)
    bytewise().save_pretrained(tmp_path)
    loads, load = [], PreTrainedTokenizerFast.from_pretrained

    def slow(*args: Any, **options: Any) -> Any:
        loads.append(args)
        time.sleep(0.2)  # without a lock, all threads are in here together
        return load(*args, **options)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", slow)
    with ThreadPoolExecutor(4) as threads:
        scores = list(threads.map(lambda _: RewardModel(model=str(tmp_path)).scores(TEXTS), range(4)))
    assert len(loads) == 1
    assert all(each == pytest.approx(scores[0]) for each in scores)
