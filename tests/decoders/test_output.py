"""Output: the text of a sample while it grows, and its end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tot.decoders import Sampling
from tot.decoders.engine.output import LONGEST_CHARACTER, Output
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.programs import ending

END = 2


def feed(output: Output, ids: list[int]) -> list[str]:
    """Add tokens until the text ends, and return the settled text after each."""
    settled = []
    for token in ids:
        ended = output.add(Sampled(token, -0.5))
        settled.append(output.settled())
        assert ended == (output.finish_reason is not None)
        if ended:
            break
    return settled


def assert_grows(texts: list[str]) -> None:
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def written(codec: TextCodec, text: str, *stops: str, limit: int = 100) -> Output:
    output = Output(codec, Sampling(stop=stops), 0, limit)
    feed(output, codec.encode(text))
    return output


def test_an_ignored_end_token_has_no_text(codec: TextCodec) -> None:
    output = Output(codec, Sampling(ignore_eos=True, stop=("cd",)), 0, 100)
    feed(output, [*codec.encode("xabc"), END, *codec.encode("d!")])
    assert (output.text, output.finish_reason) == ("xab", "stop")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one.two", (".",), "one"),
        ("x the end", ("he e",), "x t"),  # begins inside " the" and spans three tokens
        ("aXYZb", ("XYZ",), "a"),
        ("a 10 b", ("0",), "a 1"),  # inside the token "10"
        ("abcd", ("cd", "bc"), "a"),  # the first in the text, not in the list
        ("abcd", ("c", "bc"), "a"),
        ("aaab", ("aab",), "a"),
        ("xyz", ("xyz",), ""),
        ("ab", ("abc",), "ab"),
        ("é漢🙂!", ("漢🙂",), "é"),
    ],
)
def test_a_stop_string_cuts_at_its_first_character(
    codec: TextCodec, text: str, stops: tuple[str, ...], expected: str
) -> None:
    output = written(codec, text + " and more" * (expected != text), *stops)
    assert output.text == expected
    assert output.finish_reason == (None if expected == text else "stop")


@given(st.text("ab 10theé🙂\n", max_size=25), st.lists(st.text("ab the10🙂", min_size=1, max_size=4), max_size=3))
@example("xthe", ["he"])
def test_settled_text_only_grows_and_ends_as_the_text(codec: TextCodec, text: str, stops: list[str]) -> None:
    output = Output(codec, Sampling(stop=tuple(stops)), 0, 100)
    settled = feed(output, codec.encode(text))
    whole = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    output.end("cancelled")
    assert_grows([*settled, output.text])
    if output.finish_reason == "stop":
        assert not any(stop in output.text for stop in stops)
        assert text.startswith(output.text)
        # The stop string that is complete first wins, even over one that began earlier.
        assert len(output.text) >= whole
    else:
        assert output.text == text


@given(st.lists(st.integers(0, 299), max_size=30), st.booleans())
def test_any_tokens_give_the_tokenizers_text_up_to_its_last_whole_character(
    codec: TextCodec, ids: list[int], ends: bool
) -> None:
    """Cover invalid UTF-8, control tokens and ids beyond the tokenizer's (padded vocabularies)."""
    output = Output(codec, Sampling(ignore_eos=not ends), 0, 100)
    settled = feed(output, ids)
    output.end("cancelled")
    assert output.text == codec.decode(output.tokens).rstrip("\N{REPLACEMENT CHARACTER}")
    assert_grows([*settled, output.text])


def test_a_piece_has_at_least_one_whole_character(codec: TextCodec) -> None:
    """With one token a piece, "é" would never be complete, and no token would follow."""
    first, second = codec.encode("é")
    output = Output(codec, Sampling(max_tokens=1, keep_stop=True), 0, LONGEST_CHARACTER)
    feed(output, [first, second, *codec.encode("a")])
    assert (output.text, output.finish_reason, output.tokens) == ("é", "length", [first, second])
    output = Output(codec, Sampling(max_tokens=2, keep_stop=True), 0, LONGEST_CHARACTER)
    feed(output, [*codec.encode("a"), first, second])
    assert (output.text, output.finish_reason, output.tokens) == ("a", "length", codec.encode("a"))


def test_a_completion_ends_in_the_tokens_that_its_text_retains(codec: TextCodec) -> None:
    cut = Output(codec, Sampling(stop=("he e",)), 0, 100)
    feed(cut, codec.encode("x the end"))
    tokens, rest, after = ending(codec, cut.completion(0.0))
    assert (codec.decode(tokens), rest) == ("x", " t")  # " the" was split
    assert after.startswith("he e")
    whole = Output(codec, Sampling(), 0, 100)
    ids = codec.encode("x the")
    feed(whole, [*ids, END])
    assert ending(codec, whole.completion(0.0)) == (ids, "", "")
    assert ending(codec, whole.completion(0.0), "x t") == (ids[:1], " t", "he")


@pytest.mark.parametrize(
    ("text", "expected"), [("ab\n\ncd", "ab\n\n"), ("\n\nab\n\ncd", "\n\nab\n\n"), ("ab\n\n \n cd", "ab\n\n \n ")]
)
def test_a_kept_stop_needs_text_before_it_and_includes_the_whitespace_after_it(
    codec: TextCodec, text: str, expected: str
) -> None:
    output = Output(codec, Sampling(stop=("\n\n",), keep_stop=True), 0, 100)
    feed(output, codec.encode(text))
    assert (output.text, output.finish_reason) == (expected, "stop")
    assert codec.decode(output.tokens) == expected
    assert len(output.logprobs) == len(output.tokens)
    assert output.completion(0.0).usage.new_tokens == len(output.tokens) + 1  # plus the discarded lookahead token
