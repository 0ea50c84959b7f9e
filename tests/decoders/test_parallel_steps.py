"""PDOS: each step is what it would be alone, the text goes on as from its own tokens, and skeletons may break."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tot.decoders import (
    Budget,
    Completion,
    Engine,
    LocalDecoder,
    Message,
    Meter,
    OptionError,
    Request,
    RequestError,
    Sampling,
    load_decoder,
    load_model,
)
from tot.decoders.engine.runner import Feed, Forward
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.engine.text import TextCodec
from tot.decoders.parallel_steps import STEP_KEY
from tot.decoders.steps_format import PDOSOptions, StepsFormat, listed

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
CITIES = ("Oslo", "Rome", "the other one", "10")
END = 2
Make = Callable[..., LocalDecoder]


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    return make_model(request.param, readable=True)


@pytest.fixture
def make(model: Any, tokenizer: Any) -> Iterator[Make]:
    """Decoders by name, each on a copy of one model; no branch may live in the end."""
    engines: list[Engine] = []

    def load(name: str = "pdos", kv_budget: int = 6000, chunk: int = 512, **options: Any) -> LocalDecoder:
        engines.append(Engine(load_model(copy.deepcopy(model), tokenizer=tokenizer), kv_budget, chunk))
        return load_decoder(name, engine=engines[-1], **options)

    yield load
    for engine in engines:
        engine.close()
        assert engine.tree.live == 0


@pytest.fixture(scope="module")
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer)


def ids(decoder: LocalDecoder, text: str) -> tuple[int, ...]:
    return tuple(decoder.engine.codec.encode_prompt(text))


def shown(completions: Sequence[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts, c.answer) for c in completions]


def kinds(completion: Completion) -> list[str]:
    return [part.kind for part in completion.parts]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Watch:
    """Sees every forward of a decoder: each feed's branch up to its end, and what was live and promised before it."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.engine = decoder.engine
        self.tokens: list[list[list[int]]] = []
        self.texts: list[list[str]] = []
        self.rows: list[int] = []
        self.slots: list[tuple[str, int]] = []
        self._forward, self._admit = decoder.engine.runner.forward, decoder.engine._admit
        decoder.engine.runner.forward = self.forward  # type: ignore[method-assign]
        decoder.engine._admit = self.admit  # type: ignore[method-assign]

    def admit(self) -> None:
        self._admit()
        running = self.engine._running
        if running:
            self.slots.append(("may be", self.engine.tree.live + sum(job.policy.growth() for job in running)))

    def forward(self, feeds: Sequence[Feed]) -> Forward:
        tree = self.engine.tree
        self.tokens.append([tree.tokens(feed.branch)[: feed.stop] for feed in feeds])
        self.texts.append([self.engine.codec.decode(tokens) for tokens in self.tokens[-1]])
        self.rows.append(sum(feed.stop - feed.start for feed in feeds))
        self.slots.append(("are", tree.live))
        return self._forward(feeds)

    def leave(self) -> None:
        self.engine.runner.forward, self.engine._admit = self._forward, self._admit  # type: ignore[method-assign]


class Script(Watch):
    """Puts words into a model's mouth: what it writes next is what follows the text so far in the first document that
    begins with it. A text that is one of them ends; any other is left to the model. Texts begin after the prompt's "|"
    and line break."""

    def __init__(self, decoder: LocalDecoder, *documents: str) -> None:
        super().__init__(decoder)
        self.documents = documents

    def next(self, text: str) -> int | None:
        written = text.rpartition("|\n")[2]
        if written in self.documents:
            return END
        for document in self.documents:
            if document.startswith(written):
                return self.engine.codec.encode(document[len(written) :])[0]
        return None

    def forward(self, feeds: Sequence[Feed]) -> Forward:
        forward = super().forward(feeds)
        for feed, rows in zip(feeds, forward.rows, strict=True):
            tokens = self.engine.tree.tokens(feed.branch)
            for back, row in enumerate(reversed(rows)):
                token = self.next(self.engine.codec.decode(tokens[: feed.stop - back]))
                if token is not None:
                    forward.logits[row] = 0.0
                    forward.logits[row, token] = 8.0
        return forward


OSLO, ROME = "I compare.\n#### Oslo: cold\n####", "I compare.\n#### Rome: warm, they say.\n####"
SKELETON = "I compare.\n#### Oslo:...\n#### Rome:...\n####%%%"
TEXT = "I compare.\n#### Oslo: cold\n#### Rome: warm, they say.\n####%%%\nSo Oslo is colder."
DOCUMENTS = (OSLO, ROME, SKELETON, TEXT)
PARTS = [
    ("exact", "I compare.\n"),
    ("step", "#### Oslo: cold\n"),
    ("step", "#### Rome: warm, they say.\n"),
    ("exact", "####%%%\n"),
    ("exact", "So Oslo is colder."),
]


def ask(decoder: LocalDecoder, prompt: str = "Which?|\n", **more: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 200, **more.pop("sampling", {})})
    return Request(prompt=ids(decoder, prompt), sampling=sampling, **more)


class Alone:
    """Decoding one text at a time on the untouched model."""

    def __init__(self, model: Any, decoder: LocalDecoder, logits_alone: Callable[..., torch.Tensor]) -> None:
        self._model = copy.deepcopy(model)
        self._run = logits_alone
        self.codec = decoder.engine.codec

    def tokens(
        self,
        context: Sequence[int],
        s: Sampling,
        limit: int,
        sample: int = 0,
        first: int = 0,
        until: Sequence[str] = (),
    ) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < limit:
            draw = Draw(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, sample, first + len(drawn))
            drawn.append(read(self._run(self._model, [*context, *drawn])[-1:], [draw])[0].token)
            text = self.codec.decode(drawn)
            if (drawn[-1] in self.codec.end_ids and not s.ignore_eos) or any(mark in text for mark in until):
                break
        return drawn

    def kept(self, drawn: list[int], until: Sequence[str]) -> tuple[str, list[int]]:
        """The text of a step without the marker that ended it and blanks before that, and its tokens."""
        drawn = drawn[:-1] if drawn[-1] == END else drawn
        text = self.codec.decode(drawn)
        said = text[: min([len(text), *(text.find(mark) for mark in until if mark in text)])].rstrip()
        count = max(k for k in range(len(drawn) + 1) if said.startswith(self.codec.decode(drawn[:k])))
        return said, drawn[:count] + self.codec.encode(said[len(self.codec.decode(drawn[:count])) :])


# -- stage 2 and 3 against the untouched model -----------------------------------------------------


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("marker", ["####", "e"])  # tiny models write an e now and then, also inside of tokens
def test_steps_and_what_follows_are_what_decoding_them_alone_gives(
    make: Make, model: Any, logits_alone: Callable[..., torch.Tensor], heat: float, marker: str
) -> None:
    decoder = make(marker=marker, step_tokens=14)
    alone = Alone(model, decoder, logits_alone)
    sampling = Sampling(max_tokens=160, temperature=heat, seed=5, n=2)
    prompt = ids(decoder, LONG + "|\n")
    until = (marker, "%%%")
    ended = 0
    for sample, got in enumerate(decoder.generate([Request(prompt=prompt, sampling=sampling, steps=CITIES)])):
        block, drawn_so_far, parts = list(prompt), [], []
        for number, title in enumerate(CITIES, 1):
            header = alone.codec.encode(f"{marker} {title}:")
            drawn = alone.tokens([*prompt, *header], sampling, 14, sample + number * STEP_KEY, until=until)
            said, kept = alone.kept(drawn, until)
            ended += len(drawn) < 14
            block += [*header, *kept, *alone.codec.encode("\n")]
            drawn_so_far += drawn
            parts.append(f"{marker} {title}:{said}\n")
        end = f"{marker}%%%\n"
        block += alone.codec.encode(end)
        room = 160 - (len(block) - len(prompt))
        rest = alone.tokens(block, sampling, room, sample, len(drawn_so_far))
        assert [part.text for part in got.parts] == [*parts, end, alone.codec.decode(rest)]
        assert list(got.tokens) == drawn_so_far + rest
        assert got.finish_reason == ("eos" if rest[-1] == END else "length")
    assert ended or marker == "####"


def test_at_temperature_zero_the_text_goes_on_as_ar_goes_on_from_it(make: Make) -> None:
    decoder = make()
    watch = Watch(decoder)
    sampling = Sampling(max_tokens=120, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=CITIES)])
    count = got.parts[-1].tokens
    fed = watch.tokens[-1][0]
    joined = fed[: len(fed) + 1 - count]
    assert decoder.engine.codec.decode(joined) == LONG + "|\n" + "".join(part.text for part in got.parts[:-1])
    asked = Request(prompt=tuple(joined), sampling=Sampling(max_tokens=count, ignore_eos=True))
    (expected,) = make("ar").generate([asked])
    assert count > 10
    assert got.tokens[-count:] == expected.tokens


def test_a_long_block_is_fed_in_pieces_without_its_first_step(make: Make) -> None:
    decoder = make(chunk=8)
    watch = Watch(decoder)
    sampling = Sampling(max_tokens=140, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, "abc|\n"), sampling=sampling, steps=CITIES)])
    step, count = got.parts[0], got.parts[-1].tokens
    begun = next(i for i, texts in enumerate(watch.texts) if texts[0].startswith("abc|\n" + step.text))
    last = len(watch.texts) - count  # the others feed one token each
    codec = decoder.engine.codec
    known = len(codec.encode("abc|\n#### Oslo:")) + step.tokens
    missing = len(watch.tokens[last][0]) - known
    assert max(watch.rows[begun : last + 1]) <= 8
    assert 30 < missing <= sum(watch.rows[begun : last + 1]) <= missing + 3


def test_steps_do_not_see_one_another(make: Make) -> None:
    """What a step says is the same whatever other steps there are, as long as its number is."""
    decoder = make(step_tokens=12)
    sampling = Sampling(max_tokens=150, temperature=1.0, seed=3)
    steps = [("Oslo", "Rome"), ("Oslo", "10 and 11"), ("Oslo", "Rome", "abc")]
    asked = [Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=each) for each in steps]
    first, second, third = decoder.generate(asked)
    assert first.parts[0] == second.parts[0] == third.parts[0]
    assert first.parts[1] == third.parts[1] != second.parts[1]


def test_titles_take_one_forward_and_ended_steps_none(make: Make) -> None:
    decoder = make()
    script = Script(
        decoder, "#### A: on\n####", "#### B: on and on and on\n####", "#### A: on\n#### B: on and on and on\n####%%%\n"
    )
    for _ in range(2):  # the second time with the prompt computed
        (got,) = decoder.generate([ask(decoder, steps=("A", "B"))])
    assert [part.text for part in got.parts] == ["#### A: on\n", "#### B: on and on and on\n", "####%%%\n", ""]
    header = len(decoder.engine.codec.encode("#### A:"))
    drawn = [part.tokens for part in got.parts[:2]]
    steps = script.texts[-max(drawn) - 1 : -1]
    assert [len(texts) for texts in steps] == [2] * drawn[0] + [1] * (drawn[1] - drawn[0])
    assert script.rows[-max(drawn) - 1] == 2 * (header + 1)  # the prompt's last token before each
    assert got.usage.forwards == drawn[1] + 1
    assert got.finish_reason == "eos"


# -- stage 1: skeletons ----------------------------------------------------------------------------


def test_a_skeleton_becomes_steps_and_a_conclusion(make: Make) -> None:
    decoder = make()
    script = Script(decoder, *DOCUMENTS)
    (got,) = decoder.generate([ask(decoder)])
    assert [(part.kind, part.text) for part in got.parts] == PARTS
    assert (got.text, got.finish_reason, got.answer) == (TEXT, "eos", TEXT)
    account = decoder.engine.accounts["generate"]
    assert (account.skeletons, account.broken) == (1, 0)
    assert account.block_tokens == sum(part.tokens for part in got.parts if part.kind == "step")
    assert account.tokens == len(got.tokens) == got.usage.new_tokens
    seen = [text.rpartition("|\n")[2] for texts in script.texts for text in texts]
    assert "I compare.\n#### Oslo:...\n####" in seen  # the model would have gone on with " cold"
    assert "I compare.\n#### Oslo:..." not in seen  # fed at once, not drawn
    assert not any("Oslo" in text and "Rome" in text and " cold" in text and "they" not in text for text in seen)


def test_every_drawn_token_is_counted_once_and_given_ones_never(make: Make) -> None:
    decoder = make()
    script = Script(decoder, *DOCUMENTS)
    (got,) = decoder.generate([ask(decoder)])
    codec = decoder.engine.codec
    drawn = [
        "I compare.\n####",
        " Oslo:",
        " Rome:",
        "%%%",
        " cold\n####",
        " warm, they say.\n####",
        "So Oslo is colder.",
    ]
    assert codec.decode(got.tokens) == "".join(drawn)
    skeleton = len(codec.encode("".join(drawn[:4])))
    longest = max(part.tokens for part in got.parts if part.kind == "step")
    assert got.usage.forwards == skeleton + longest + len(codec.encode(drawn[-1])) + 1
    assert got.usage.forwards <= len(script.texts)


def test_a_colon_may_be_part_of_a_token_and_follow_one_without_text(make: Make) -> None:
    class Ends(Script):
        """After a title's first letter it writes an end token, which is to be ignored, and then "the"."""

        visits = 0

        def next(self, text: str) -> int | None:
            if not text.endswith("|\n#### A"):
                return super().next(text)
            self.visits += 1
            return END if self.visits == 1 else self.engine.codec.encode("the")[0]

    decoder = make(colon="t")
    script = Ends(decoder, "#### At on\n####", "#### At...\n####%%%", "#### At on\n####%%%\n.")
    (got,) = decoder.generate([ask(decoder, sampling={"ignore_eos": True, "max_tokens": 70})])
    assert script.visits == 2
    assert got.text.startswith("#### At on\n####%%%\n.")
    skeleton = next(tokens for tokens, *_ in script.tokens if decoder.engine.codec.decode(tokens).endswith("...\n####"))
    assert END not in skeleton


def test_another_skeleton_begins_another_block(make: Make) -> None:
    again = TEXT + "\n#### Ulm: mild.\n####"
    skeleton = TEXT + "\n#### Ulm:...\n####%%%"
    whole = TEXT + "\n#### Ulm: mild.\n####%%%\nDone."
    decoder = make()
    Script(decoder, OSLO, ROME, SKELETON, again, skeleton, whole)
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == whole
    assert kinds(got) == ["exact", "step", "step", "exact", "exact", "step", "exact", "exact"]
    assert decoder.engine.accounts["generate"].skeletons == 2


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"marker": "#####", "terminator": "%%%"}, "#####"),
        ({"marker": "####", "terminator": "####%"}, "####"),
        ({"marker": "<step>", "colon": "=", "ellipsis": ".....", "terminator": "</steps>"}, "<step>"),
    ],
)
def test_markers_are_options(make: Make, options: dict[str, str], written: str) -> None:
    decoder = make(**options)
    end = options["terminator"].removeprefix(written)
    colon, dots = options.get("colon", ":"), options.get("ellipsis", "...")
    one, other = f"{written} A{colon} on\n{written}", f"{written} B{colon} and on\n{written}"
    skeleton = f"{written} A{colon}{dots}\n{written} B{colon}{dots}\n{written}{end}"
    whole = f"{written} A{colon} on\n{written} B{colon} and on\n{written}{end}\nSo."
    script = Script(decoder, one, other, skeleton, whole)
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == whole
    assert any(texts[0].endswith(f"{colon}{dots}\n{written}") for texts in script.texts)


@pytest.mark.parametrize(
    "written",
    [
        "#### a title without a colon\nand on.\n#### more: of it",
        "####: no title\n#### more: of it",
        "####\n\nno title\n#### more: of it",
        "#### a title that goes on and on and on and on and on and on and on: too long\n#### more: of it",
        "#### the text ends in its title",
        "####%%% no title at all\n#### more: of it",
        "#### A%%%: a terminator in a title",
    ],
)
def test_a_skeleton_without_steps_is_the_text_of_ar(make: Make, written: str) -> None:
    decoder, plain = make(title_tokens=24), make("ar")
    for each in (decoder, plain):
        Script(each, "One.\n" + written)
    (got,), (expected,) = (each.generate([ask(each)]) for each in (decoder, plain))
    assert shown([got]) == shown([expected])
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert got.usage.forwards == expected.usage.forwards
    account = decoder.engine.accounts["generate"]
    assert (account.skeletons, account.broken) == (1, 1)


@pytest.mark.parametrize("broken", ["#### no colon\n", "####: ", "####\n", "#### ends", "#### Oslo:", "#### A%%%"])
def test_a_skeleton_that_breaks_runs_the_steps_it_has(make: Make, broken: str) -> None:
    decoder = make()
    joined = "#### Oslo: cold\n####%%%\nSo."
    Script(decoder, "#### Oslo: cold\n####", f"#### Oslo:...\n{broken}", joined)
    (got,) = decoder.generate([ask(decoder)])
    assert (got.text, kinds(got), got.finish_reason) == (joined, ["step", "exact", "exact"], "eos")
    account = decoder.engine.accounts["generate"]
    assert (account.skeletons, account.broken) == (1, 1)


def test_more_of_a_marker_than_there_should_be_is_no_title(make: Make) -> None:
    decoder = make()
    joined = "#### Oslo: cold\n####%%%\nSo."
    Script(decoder, "##### Oslo:", "#### Oslo: cold\n####", "##### Oslo:...\n####%%%", joined)
    (got,) = decoder.generate([ask(decoder)])
    assert (got.text, decoder.engine.accounts["generate"].broken) == (joined, 0)


def test_a_skeleton_ends_at_its_limit_of_steps(make: Make) -> None:
    decoder = make(max_steps=2)
    skeleton = "".join(f"#### {title}:...\n" for title in "ABCDE")
    steps = [f"#### {title}: on\n####" for title in "AB"]
    Script(decoder, *steps, skeleton, "#### A: on\n#### B: on\n####%%%\n.")
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == "#### A: on\n#### B: on\n####%%%\n."
    assert decoder.engine.accounts["generate"].broken == 0


def test_a_skeleton_has_no_more_steps_than_there_is_room_for(make: Make) -> None:
    decoder = make()
    script = Script(decoder, "".join(f"#### {title}:...\n" for title in "ABCDEFGHIJ"))
    (got,) = decoder.generate([ask(decoder, sampling={"max_tokens": 60})])
    steps = [part for part in got.parts if part.kind == "step"]
    assert 2 <= len(steps) < 10
    assert len(decoder.engine.codec.encode(got.text)) <= 60
    assert script.engine.accounts["generate"].broken == 1


def test_a_skeleton_takes_no_step_that_there_is_no_room_for(make: Make) -> None:
    decoder = make(ellipsis=".")
    Script(decoder, "".join(f"#### {title}:.\n" for title in "ABCDEFGHIJ"))
    for room in range(30, 50):
        (got,) = decoder.generate([ask(decoder, sampling={"max_tokens": room})])
        assert "step" in kinds(got)
        assert len(decoder.engine.codec.encode(got.text)) <= room


# -- any text at all -------------------------------------------------------------------------------


def mixed(decoder: LocalDecoder, count: int = 12) -> list[Request]:
    rng = random.Random(4)
    requests = []
    for i in range(count):
        prompt = LONG[: rng.randint(1, len(LONG))] + rng.choice(["and", " 10", "abc\n"])
        sampling = Sampling(
            max_tokens=rng.choice([2, rng.randint(40, 90), 160]),
            temperature=rng.choice([0.0, 1.0, 2.0]),
            top_p=rng.choice([0.9, 1.0]),
            stop=rng.choice([(), (), ("10", "zz")]),
            seed=i,
            n=rng.choice([1, 1, 3]),
            ignore_eos=rng.random() < 0.4,
        )
        trigger = rng.choice([None, None, " So the answer is"])
        steps = rng.choice([(), (), ("Oslo", "Rome", "10")]) if sampling.max_tokens > 2 else ()
        choices = ("1", "10") if rng.random() < 0.2 and (trigger or (sampling.n == 1 and not steps)) else ()
        requests.append(
            Request(
                prompt=ids(decoder, prompt), sampling=sampling, answer_trigger=trigger, choices=choices, steps=steps
            )
        )
    return requests


def loose(make: Make, **options: Any) -> LocalDecoder:
    """A model that writes markers, colons and terminators all the time: many skeletons, some of them good."""
    decoder = make(marker="e", colon="a", terminator="o", title_tokens=12, max_steps=3, **options)
    for mark, more in (("e", 3.0), ("a", 6.0), ("o", 2.0)):
        decoder.model.lm_head.bias.data[decoder.engine.codec.encode(mark)] += more
    return decoder


def test_company_waves_and_pieces_change_nothing(make: Make) -> None:
    decoder = loose(make)
    requests = mixed(decoder)
    for seed in range(20):
        sampling = Sampling(max_tokens=120, temperature=2.0, seed=seed)
        requests.append(Request(prompt=ids(decoder, f"abc 10 {seed}"), sampling=sampling))
    alone = [shown(decoder.generate([request])) for request in requests]
    account = decoder.engine.accounts["generate"]
    own = [each for request, each in zip(requests, alone, strict=True) if not request.steps]
    stepped = sum(any(part.kind == "step" for part in parts) for each in own for *_, parts, _ in each)
    assert stepped > 5
    assert account.skeletons > account.broken + 1
    assert account.broken > 5
    expected = [one for each in alone for one in each]
    for options in ({}, {"width": 1}, {"width": 2}, {"chunk": 5, "kv_budget": 20_000}, {"kv_budget": 1200}):
        other = loose(make, **options)
        assert shown(other.generate(requests)) == expected
        order = list(range(len(requests)))[::-1]
        again = other.generate([requests[i] for i in order])
        assert sorted(map(str, shown(again))) == sorted(map(str, expected))


def test_without_a_marker_the_text_is_that_of_ar(make: Make) -> None:
    decoder = make(marker="\u00e9")
    requests = [request.model_copy(update={"steps": ()}) for request in mixed(decoder)]
    assert shown(decoder.generate(requests)) == shown(make("ar").generate(requests))


def test_parts_are_the_text_and_usage_adds_up(make: Make) -> None:
    decoder = loose(make)
    meter = Meter()
    requests = mixed(decoder)
    completions = [one for handle in decoder.submit(requests, meter) for one in handle.result(60)]
    asked = [request for request in requests for _ in range(request.sampling.n)]
    for request, one in zip(asked, completions, strict=True):
        assert "".join(part.text for part in one.parts) == one.text
        assert one.usage.new_tokens == len(one.tokens)
        assert 0 < one.usage.forwards <= len(one.tokens) + 1 + bool(request.choices)
        for stop in request.sampling.stop:
            for part in one.parts:
                assert part.kind == "trigger" or stop not in part.text.removeprefix("e 10a")
    assert meter.new_tokens == sum(len(one.tokens) for one in completions)
    assert sum(one.usage.prompt_tokens for one in completions) == sum(len(request.prompt) for request in requests)


def test_two_requests_at_different_stages_share_forwards(make: Make) -> None:
    decoder = make()
    step = "#### A:" + " on and" * 9
    script = Script(decoder, *DOCUMENTS, f"{step}\n####", f"{step}\n####%%%\nSo.")
    asked = [ask(decoder), ask(decoder, "Other?|\n", steps=("A",))]
    got = decoder.generate(asked)
    assert [one.text for one in got] == [TEXT, f"{step}\n####%%%\nSo."]

    def together(one: str, other: str) -> bool:
        return any(any(one in a for a in texts) and any(other in b for b in texts) for texts in script.texts)

    assert together("|\nI compare", "|\n#### A: on")
    assert together("Oslo:...\n####", "|\n#### A: on")


# -- slots -----------------------------------------------------------------------------------------


def promises_are_kept(watch: Watch) -> bool:
    """Whether what was live and promised at any time was enough for all that came later."""
    most = 0
    for what, slots in reversed(watch.slots):
        most = max(most, slots) if what == "are" else most
        if what == "may be" and most > slots:
            return False
    return True


@pytest.mark.parametrize("steps", [(), CITIES])
def test_growth_is_never_too_little(make: Make, steps: tuple[str, ...]) -> None:
    decoder = loose(make)
    for seed in range(12):
        watch = Watch(decoder)
        sampling = Sampling(max_tokens=120, temperature=1.0, seed=seed, n=2, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps, answer_trigger=" So")])
        watch.leave()
        assert promises_are_kept(watch)


def test_growth_counts_what_others_hold_on_to(make: Make) -> None:
    """Two texts whose steps are the same at first: when one goes on, the other still needs what they share."""
    decoder = make()
    watch = Watch(decoder)
    for tokens in ((250, 800), (250, 800, 500)):
        samplings = [Sampling(max_tokens=count, ignore_eos=True) for count in tokens]
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=s, steps=CITIES) for s in samplings])
        assert promises_are_kept(watch)
        watch.slots.clear()


def test_a_skeleton_takes_no_more_slots_than_the_text_may(make: Make) -> None:
    decoder = make(ellipsis="." * 35)
    watch = Script(decoder, "".join(f"#### {title}:{'.' * 35}\n" for title in "ABCDEFGHIJ"))
    request = ask(decoder, sampling={"max_tokens": 140})
    (got,) = decoder.generate([request])
    assert 1 < kinds(got).count("step") < 10
    assert decoder.engine.tree.peak_live <= len(request.prompt) + 140
    assert promises_are_kept(watch)


def test_steps_take_no_more_slots_than_the_text_does(make: Make) -> None:
    peaks = []
    for steps in ((), CITIES):
        decoder = make(marker="\u00e9")
        sampling = Sampling(max_tokens=200, temperature=1.0, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps)])
        peaks.append(decoder.engine.tree.peak_live)
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("short", [0, 1])
def test_what_just_fits_the_store_runs(make: Make, short: int) -> None:
    prompt = ids(make(), LONG)
    decoder = make(kv_budget=len(prompt) + 120 - short)
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=120, ignore_eos=True), steps=CITIES)
    if short:
        with pytest.raises(RequestError, match=rf"may need {len(prompt) + 120} tokens"):
            decoder.generate([request])
    else:
        (got,) = decoder.generate([request])
        assert got.finish_reason == "length"


def test_at_most_so_many_steps_run_at_once(make: Make) -> None:
    decoder = make(width=3)
    watch = Watch(decoder)
    steps = tuple(f"Number {i}" for i in range(10))
    sampling = Sampling(max_tokens=300, temperature=1.0, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, "abc|\n"), sampling=sampling, steps=steps)])
    assert kinds(got).count("step") == 10
    assert max(map(len, watch.texts[1:])) == 3  # the first also feeds the prompt


# -- how texts end ---------------------------------------------------------------------------------


def test_a_stop_string_in_a_step_ends_the_text(make: Make) -> None:
    for width in (1, 64):
        decoder = make(width=width)
        Script(decoder, *(f"#### {title}: on\n####" for title in "ACD"), "#### B: on and off, and on\n####")
        (got,) = decoder.generate([ask(decoder, steps=tuple("ABCD"), sampling={"stop": ("off",)})])
        assert [part.text for part in got.parts] == ["#### A: on\n", "#### B: on and ", ""]
        assert got.finish_reason == "stop"
        assert got.usage.new_tokens == len(got.tokens) == sum(part.tokens for part in got.parts)


def test_a_stop_string_in_a_title_ends_the_text_as_in_ar(make: Make) -> None:
    decoder, plain = make(), make("ar")
    for each in (decoder, plain):
        Script(each, "One.\n#### Oslo: cold")
    for stop in ("slo", "# O", "####", "\n##"):
        (got,), (expected,) = (each.generate([ask(each, sampling={"stop": (stop,)})]) for each in (decoder, plain))
        assert (got.text, got.finish_reason, got.tokens) == (expected.text, "stop", expected.tokens)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_a_step_ends_by_its_marker_its_end_token_or_its_limit(make: Make) -> None:
    decoder = make(step_tokens=9)
    Script(decoder, "#### A: on\n####", "#### B: and", "#### C: on and on and on and on", "#### D: x %%%")
    (got,) = decoder.generate([ask(decoder, steps=tuple("ABCD"))])
    a, b, c, d = (part for part in got.parts if part.kind == "step")
    assert (a.text, b.text, d.text) == ("#### A: on\n", "#### B: and\n", "#### D: x\n")
    assert "#### C: on and on and on and on\n".startswith(c.text.rstrip())
    assert c.tokens == 9 > a.tokens
    assert b.tokens == len(decoder.engine.codec.encode(" and")) + 1


def test_a_step_whose_end_cuts_a_token_keeps_its_limit(make: Make) -> None:
    decoder = make(marker="e", step_tokens=1)
    Script(decoder, "e A: the")  # one token, " the", of which the two of " th" are left
    (got,) = decoder.generate([ask(decoder, steps=("A",))])
    assert (got.parts[0].text, got.parts[0].tokens) == ("e A: \n", 1)


def test_steps_share_max_tokens_with_what_follows(make: Make) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=100, temperature=1.0, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=CITIES)])
    codec = decoder.engine.codec
    frame = sum(len(codec.encode(f"#### {title}:")) + 1 for title in CITIES) + len(codec.encode("####%%%\n"))
    assert [part.tokens for part in got.parts if part.kind == "step"] == [(100 - frame) // 5] * 4
    assert (got.finish_reason, kinds(got)) == ("length", ["step"] * 4 + ["exact"] * 2)
    assert got.parts[-1].tokens >= (100 - frame) // 5


@pytest.mark.parametrize("by", ["cancel", "budget"])
def test_a_block_that_is_cut_short_shows_what_it_has(make: Make, by: str) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=900, temperature=1.0, ignore_eos=True, n=2)
    request = Request(prompt=ids(decoder, "abc|\n"), sampling=sampling, steps=CITIES)
    (whole, *_) = decoder.generate([request])
    if by == "budget":
        (handle,) = decoder.submit([request], Meter(Budget(tokens=80)))
    else:
        watch = Watch(decoder)
        (handle,) = decoder.submit([request])
        wait_until(lambda: len(watch.texts) > 6)
        handle.cancel()
    first, second = handle.result(30)
    assert first.finish_reason == second.finish_reason == ("cancelled" if by == "cancel" else "budget")
    assert kinds(first) == ["step"] * 4 + ["exact"]
    for cut, part in zip(first.parts, whole.parts, strict=False):
        assert part.kind == "exact" or part.text.startswith(cut.text.removesuffix("\n"))
    assert len(first.tokens) == sum(part.tokens for part in first.parts) > 0
    assert by == "cancel" or len(first.tokens) + len(second.tokens) == 80
    wait_until(lambda: decoder.engine.tree.live == 0)


def test_a_skeleton_that_is_cancelled_is_no_text(make: Make) -> None:
    decoder = make()
    script = Script(decoder, "I compare.\n" + "".join(f"#### {i}:...\n" for i in range(90)))
    (handle,) = decoder.submit([ask(decoder, sampling={"max_tokens": 900})], stream=True)
    wait_until(lambda: any(texts[0].endswith("#### 3") for texts in script.texts))
    handle.cancel()
    (got,) = handle.result(30)
    assert (got.text, got.finish_reason) == ("I compare.\n", "cancelled")
    wait_until(lambda: decoder.engine.tree.live == 0)


def test_streamed_pieces_are_the_text(make: Make) -> None:
    decoder = loose(make)
    for request in mixed(decoder):
        (handle,) = decoder.submit([request], stream=True)
        texts = dict.fromkeys(range(request.sampling.n), "")
        for sample, piece in handle:
            texts[sample] += piece
        assert list(texts.values()) == [one.text for one in handle.result()]


# -- triggers and choices --------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("cold",)])
def test_an_answer_follows_the_conclusion(make: Make, stop: tuple[str, ...]) -> None:
    decoder, plain = make(), make("ar")
    prompt = "Which?|\n"
    steps = ("Oslo", "Rome")
    documents = (
        "#### Oslo: is cold\n####",
        "#### Rome: warm\n####",
        "#### Oslo: is cold\n#### Rome: warm\n####%%%\nSo.",
    )
    Script(decoder, *documents)
    rationale = "#### Oslo: is " if stop else documents[-1]
    joined = Request(prompt=ids(plain, prompt + rationale + " Answer:"), choices=("1", "10", "a"))
    more = {"answer_trigger": " Answer:", "steps": steps, "sampling": {"stop": stop}}
    (scored,) = decoder.generate([ask(decoder, prompt, choices=joined.choices, **more)])
    Script(plain)
    (expected,) = plain.generate([joined])
    assert scored.text == rationale + " Answer:"
    totals = [[choice.total for choice in one.choice_logprobs] for one in (scored, expected)]
    assert totals[0] == pytest.approx(totals[1], abs=1e-2)
    again = Script(decoder, *documents, rationale + " Answer: 10#### x: y")
    (got,) = decoder.generate([ask(decoder, prompt, **more)])
    assert got.answer == " 10#### x: y"  # no skeleton in an answer
    assert got.parts[-2].kind == "trigger"
    assert again.texts[-1][0].endswith(rationale + " Answer: 10#### x: y")


def test_choices_alone_are_scored_as_by_ar(make: Make) -> None:
    decoder, plain = make(), make("ar")
    request = Request(prompt="Which is it?", choices=("1", "10"), sampling=Sampling())
    (got,), (expected,) = decoder.generate([request]), plain.generate([request])
    assert got.choice_logprobs == expected.choice_logprobs
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens


# -- what is asked for -----------------------------------------------------------------------------


def prepared(codec: TextCodec, prompt: Any, steps: tuple[str, ...] = (), **options: Any) -> Any:
    return StepsFormat(PDOSOptions(**options), codec).prepare(Request(prompt=prompt, steps=steps)).prompt


def test_instructions_go_where_the_prompt_can_take_them(codec: TextCodec) -> None:
    system, user = Message(role="system", content="S"), Message(role="user", content="Q?")
    begun = Message(role="assistant", content="Well,")
    told = Message(role="user", content="Q?\n\nMark steps.")
    alone = Message(role="user", content="Mark steps.")
    for prompt, expected in [
        ("Q: and on\nA:", "Mark steps.\n\nQ: and on\nA:"),
        ((system, user), (system, told)),
        ((system, user, begun), (system, told, begun)),
        ((user, begun, user), (user, begun, told)),
        ((begun,), (alone, begun)),
        ((system,), (system, alone)),
        ((5, 6, 7), (5, 6, 7)),
    ]:
        assert prepared(codec, prompt, instructions="Mark steps.") == expected
        assert prepared(codec, prompt, instructions="") == prompt


def test_a_prompt_is_prepared_on_its_way_to_the_model(make: Make) -> None:
    decoder = make(instructions="Mark steps.")
    watch = Watch(decoder)
    decoder.generate([Request(prompt="Q: and on\nA:", sampling=Sampling(max_tokens=3))])
    assert watch.texts[0][-1] == "Mark steps.\n\nQ: and on\nA:"


@pytest.mark.parametrize("steps", [(), CITIES])
def test_our_instructions_name_the_markers(codec: TextCodec, steps: tuple[str, ...]) -> None:
    text = prepared(codec, "Which?", steps, marker="@@", terminator="@@END", colon="=")
    assert "@@END" in text
    assert "@@@@" not in text
    assert "####" not in text
    assert ("@@ Rome=..." in text) == (not steps)
    assert "{" not in text
    assert text.endswith("\n\nWhich?")


def test_a_template_that_refuses_is_the_requests_trouble(make: Make, tokenizer: Any) -> None:
    decoder = make(instructions="Mark steps.")
    chat = (Message(role="user", content="Q?"), Message(role="user", content="Please."))
    template = (
        "{% if messages|length > 2 %}{{ raise_exception('no more than two') }}{% endif %}{{ messages[-1].content }}"
    )
    codec = decoder.engine.codec
    codec.tokenizer = copy.deepcopy(tokenizer)
    codec.tokenizer.chat_template = template
    with pytest.raises(RequestError, match="no more than two"):
        decoder.generate([Request(prompt=(*chat, chat[0]))])
    (got,) = decoder.generate([Request(prompt=chat, sampling=Sampling(max_tokens=4))])  # no message was added
    assert len(got.tokens) > 0


def test_steps_are_found_in_the_prompt(make: Make) -> None:
    text = "Compare:\n1. Oslo: in the north\n2) Rome\n - the other one\n* 10\n3.5 is no item\n"
    assert listed(text) == ["Oslo", "Rome", "the other one", "10"]
    for finder in ("list", lambda prompt: prompt.split()[-2:]):
        decoder = make(find_steps=finder, instructions="")
        chat = (Message(role="user", content=text),)
        sampling = Sampling(max_tokens=120)
        for prompt in (text, chat, ids(decoder, text)):
            (got,) = decoder.generate([Request(prompt=prompt, sampling=sampling)])
            titles = [part.text.partition(":")[0].strip() for part in got.parts if part.kind == "step"]
            expected = listed(text) if finder == "list" else ["no", "item"]
            assert titles == [f"#### {title}" for title in expected]
        (given,) = decoder.generate([Request(prompt=text, sampling=sampling, steps=("A",))])
        assert kinds(given).count("step") == 1


def test_a_list_that_is_not_there_leaves_it_to_the_model(make: Make) -> None:
    decoder = make(find_steps="list")
    Script(decoder, *DOCUMENTS)
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == TEXT


@pytest.mark.parametrize(
    ("finder", "said"), [(lambda text: 1 / 0, "ZeroDivisionError"), (lambda text: [" "], "no title")]
)
def test_a_finder_that_fails_is_named(make: Make, finder: Callable[[str], Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"find_steps.*{said}"):
        make(find_steps=finder).generate([Request(prompt="abc")])


@pytest.mark.parametrize(("heat", "alike"), [(0.0, True), (1.0, False)])
def test_equal_titles_are_two_steps(make: Make, heat: float, alike: bool) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=120, temperature=heat, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=("Oslo", "Oslo"))])
    first, second = (part for part in got.parts if part.kind == "step")
    assert (first.text.strip() == second.text.strip()) == alike


def test_a_prompt_of_one_token_may_be_followed_by_steps(make: Make) -> None:
    decoder = make()
    (got,) = decoder.generate([Request(prompt=(60,), sampling=Sampling(max_tokens=60), steps=("Oslo", "Rome"))])
    assert [part.text.partition(":")[0] for part in got.parts[:3]] == ["\n", "#### Oslo", "#### Rome"]


def test_one_step_is_a_block_too(make: Make) -> None:
    decoder = make()
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG), sampling=Sampling(max_tokens=40), steps=("Oslo",))])
    assert got.parts[0].text == "\n"
    assert got.parts[1].text.startswith("#### Oslo:")


def test_steps_that_cannot_be_are_refused(make: Make) -> None:
    decoder = make(title_tokens=10)
    with pytest.raises(RequestError, match=r"'the other one and on' has a title of .* tokens and title_tokens is 10"):
        decoder.generate([Request(prompt="abc", steps=("A", "the other one and on"))])
    short = Sampling(max_tokens=20)
    with pytest.raises(RequestError, match=r"3 steps need \d+ tokens at least, .* room for 20: raise max_tokens"):
        decoder.generate([Request(prompt="abc", sampling=short, steps=("A", "B", "C"))])
    with pytest.raises(ValueError, match="step 2 has no title"):
        Request(prompt="abc", steps=("A", " "))
    with pytest.raises(ValueError, match="give an answer_trigger"):
        Request(prompt="abc", steps=("A",), choices=("1", "2"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"marker": ""}, "option marker"),
        ({"marker": "# "}, "white space"),
        ({"marker": "%%%"}, "the terminator is the marker"),
        ({"marker": "#:"}, "the colon, ':', is part of the marker"),
        ({"width": 0}, "option width"),
        ({"find_steps": "tables"}, "option find_steps"),
        ({"steps": 3}, "option steps"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Make, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make(**options)
