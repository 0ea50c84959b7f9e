"""Detailed recordings: nested spans, the load of each forward, traces, and cleanup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tot.decoders import LocalDecoder, Request, Sampling, load_decoder
from tot.decoders.engine.recording import recording
from tot.decoders.timeline import LANE, Load, Span, Timeline, add_spans, recorded, span

Serve = Callable[..., LocalDecoder]
PARTS = {"forward", "sampling", "commit"}


class Script:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Script:
    return Script()


@pytest.fixture
def timeline(clock: Script) -> Iterator[Timeline]:
    """A timeline on the scripted clock that records this thread's parts."""
    made = Timeline(clock, detailed=True)
    with recorded(made):
        yield made


def kinds(timeline: Timeline, lane: str = LANE) -> list[tuple[str, float]]:
    """Return each span's path and exclusive seconds."""
    return [("/".join(span.kind for span in path), own) for path, own in timeline.exclusive(lane)]


def ask(prompt: str = "The sum of 10 and 11", tokens: int = 6, purpose: Any = "generate", n: int = 1) -> Request:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, n=n, seed=3, temperature=5.0)  # no two texts are equal
    return Request(prompt=prompt, purpose=purpose, sampling=sampling)


# -- parts --------------------------------------------------------------------------------------------------------


def test_parts_are_exclusive_and_sum_to_the_elapsed_time(clock: Script, timeline: Timeline) -> None:
    with span("forward"):
        clock.now = 1.0
        with span("attention"):
            clock.now = 4.0
            with span("linear"):
                clock.now = 9.0
        with span("linear"):
            clock.now = 11.0
        clock.now = 12.5
    with span("sampling"):
        clock.now = 20.0
    assert kinds(timeline) == [
        ("forward/attention/linear", 5.0),
        ("forward/attention", 3.0),
        ("forward/linear", 2.0),
        ("forward", 2.5),
        ("sampling", 7.5),
    ]
    assert sum(own for _, own in timeline.exclusive(LANE)) == clock.now


def test_of_simultaneous_spans_the_last_recorded_contains_the_others(clock: Script, timeline: Timeline) -> None:
    with span("forward"), span("attention"):
        clock.now = 2.0
    assert kinds(timeline) == [("forward/attention", 2.0), ("forward", 0.0)]


def test_seconds_counted_elsewhere_become_parts_that_end_now(clock: Script, timeline: Timeline) -> None:
    with span("forward"):
        clock.now = 10.0
        add_spans({"linear": 6.0, "attention": 3.0})
        clock.now = 10.5
    assert kinds(timeline) == [("forward/linear", 6.0), ("forward/attention", 3.0), ("forward", 1.5)]
    assert [span.began for span in timeline.spans] == [1.0, 7.0, 0.0]


def test_parts_are_recorded_on_detailed_timelines_only(clock: Script) -> None:
    plain = Timeline(clock)
    with recorded(plain), span("forward"):
        clock.now = 1.0
    with recorded(None), span("forward"):
        clock.now = 2.0
        add_spans({"linear": 1.0})
    detailed = Timeline(clock, detailed=True)
    with recorded(detailed):
        pass
    with span("forward"):
        clock.now = 3.0
    assert plain.spans == detailed.spans == []


# -- an engine's recording ----------------------------------------------------------------------------------------


def test_a_run_consists_of_steps_and_a_step_of_parts(serve: Serve) -> None:
    decoder = serve()
    with recording(decoder.engine) as timeline:
        decoder.generate([ask()])
    paths = [path for path, _ in kinds(timeline)]
    steps = paths.count("run/step")
    assert steps == decoder.engine.forwards == 6  # the first also prefills the prompt
    assert all(paths.count(f"run/step/{name}") == steps for name in PARTS)
    assert paths[-1] == "run"
    (run,) = [span for span in timeline.spans if span.kind == "run"]
    assert all(own >= 0 for _, own in kinds(timeline))
    assert sum(own for _, own in kinds(timeline)) == pytest.approx(run.ended - run.began)


def test_loads_report_the_computed_rows_by_purpose_and_phase(serve: Serve) -> None:
    decoder = serve()
    requests = [ask(tokens=2), ask("abc", tokens=1, purpose="evaluate")]
    one, other = (len(decoder.engine.codec.encode_prompt(request.prompt)) for request in requests)
    with recording(decoder.engine) as timeline:
        decoder.generate(requests)
    prompts = {("generate", "prefill"): one, ("evaluate", "prefill"): other}
    assert [span.load for span in timeline.spans if span.kind == "step"] == [
        Load(prompts, 2, one * (one + 1) // 2 + other * (other + 1) // 2, one + other),
        Load({("generate", "decode"): 1}, 1, one + 1, one + 1),
    ]


def test_a_prefix_shared_by_branches_counts_once_in_a_load(serve: Serve) -> None:
    decoder = serve()
    prompt = len(decoder.engine.codec.encode_prompt(ask().prompt))
    with recording(decoder.engine) as timeline:
        decoder.generate([ask(n=3)])
    first, *others = [span.load for span in timeline.spans if span.load is not None]
    assert first == Load({("generate", "prefill"): prompt}, 1, prompt * (prompt + 1) // 2, prompt)
    last = others[-1]
    rows = sum(last.rows.values())
    assert rows > 1
    assert (last.keys, last.reads) == (rows * (prompt + 5), rows)
    assert prompt + 5 < last.slots <= prompt + 5 * rows


def test_rows_of_drafted_texts_are_verify_rows(serve: Serve) -> None:
    engine = serve().engine
    decoder = load_decoder("sd", engine=engine)
    with recording(engine) as timeline:
        decoder.generate([ask(purpose="evaluate")])
    rows = {key for span in timeline.spans if span.load is not None for key in span.load.rows}
    assert rows == {("evaluate", "prefill"), ("evaluate", "verify")}
    assert "run/step/draft" in dict(kinds(timeline))


def test_recording_changes_no_token(serve: Serve) -> None:
    decoder = serve()
    before = decoder.generate([ask()])
    with recording(decoder.engine) as timeline:
        within = decoder.generate([ask()])
    spans = len(timeline.spans)
    assert [one.tokens for one in decoder.generate([ask()])] == [one.tokens for one in before]
    assert [one.tokens for one in within] == [one.tokens for one in before]
    assert len(timeline.spans) == spans
    assert decoder.engine.timeline is None


def test_a_closed_engine_ends_its_recording(serve: Serve) -> None:
    decoder = serve()
    with recording(decoder.engine) as timeline:
        decoder.generate([ask()])
        decoder.engine.close()
    assert decoder.engine.timeline is None
    assert kinds(timeline)[-1][0] == "run"


# -- traces -------------------------------------------------------------------------------------------------------


def test_events_are_sorted_and_nested_like_the_spans() -> None:
    load = Load({("answer", "decode"): 2}, 2, 40, 21)
    spans = [
        Span("engine", "forward", 10.0, 10.5),
        Span("branch 3", "draft", 9.5, 10.25, branch=3),
        Span("engine", "step", 10.0, 11.0, load=load),
    ]
    events = Timeline(spans=spans, queue=[(10.25, 1)]).events()
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert lanes == {"engine": 0, "branch 3": 1}
    assert events[2:] == [
        {"name": "draft", "ph": "X", "ts": 0.0, "dur": 750000.0, "pid": 0, "tid": 1, "args": {"branch": 3}},
        {"name": "step", "ph": "X", "ts": 500000.0, "dur": 1000000.0, "pid": 0, "tid": 0,
         "args": {"rows": {"answer, decode": 2}, "reads": 2, "keys": 40, "slots": 21}},
        {"name": "forward", "ph": "X", "ts": 500000.0, "dur": 500000.0, "pid": 0, "tid": 0},
        {"name": "queue", "ph": "C", "ts": 750000.0, "pid": 0, "tid": 0, "args": {"drafts": 1}},
    ]  # fmt: skip


def test_an_engines_events_are_nested(serve: Serve) -> None:
    decoder = serve()
    with recording(decoder.engine) as timeline:
        decoder.generate([ask(n=2)])
    events = json.loads(json.dumps(timeline.events()))
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    tid = next(event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == LANE)
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == tid]
    assert len(spans) == sum(span.lane == LANE for span in timeline.spans)
    open_until: list[float] = []
    for event in spans:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        ends = event["ts"] + event["dur"]
        assert not open_until or ends <= open_until[-1] + 1e-3
        open_until.append(ends)
