"""Creative Writing: a coherent passage whose paragraphs end in given sentences (ToT, section 4.2; SEED, Appendix C).

A thought is a plan and the passage written after it; or, of chat models, a paragraph. `endings` and `verify` check the
sentences without a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tot.llm.parallel_steps import title
from tot.task.dataset import text_of
from tot.task.task import Task
from tot.tasks.sentences import paragraphs, split, typed
from tot.tree.thought import State, Thought

_PASSAGE = re.compile(r"^[ \t*#]{0,9}passage[ \t*]{0,9}:[ \t*]{0,9}", re.IGNORECASE | re.MULTILINE)
_NEXT = re.compile(r"^[ \t*#]{0,9}(?:analysis|sentences)[ \t*]{0,9}:", re.IGNORECASE | re.MULTILINE)
_NUMBER = r"([0-9]{1,2}(?:\.[0-9]{1,9})?)(?![0-9])"
_SCORES = (  # the best sign of a score first
    re.compile(rf"\bscore[ \t*_]{{0,9}}(?:\bis\b|\bof\b|:|=)[\s:*_\[({{\"'$]{{0,9}}{_NUMBER}", re.IGNORECASE),
    re.compile(rf"(?<![0-9.]){_NUMBER}[ \t]{{0,3}}(?:/|out[ \t]of)[ \t]{{0,3}}10\b", re.IGNORECASE),
    re.compile(rf"\A[\s*_\[(]{{0,9}}{_NUMBER}[\s*_\]).]{{0,9}}\Z"),
)
_LABEL = re.compile(r"\A[\s*#_]{0,9}paragraph[ \t]{0,3}[0-9]{0,2}[\s*_]{0,9}:[\s*_]{0,9}", re.IGNORECASE)
_RULE = re.compile(r"[-*_=#][-*_=# ]{2,}")
_FENCE = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
_HEADING = re.compile(
    r"#{1,6}[ \t].*|(\*\*|__).*[^.!?…\n]\1:?|.+\n[=-]{3,}|[\s*_]*paragraph [0-9]{1,2}[\s*_:.]*", re.IGNORECASE
)
_BEFORE = re.compile(
    r"#.*|(\*\*|__|\*|_)[^\n]*\1|.*:[*_]{0,2}|(?:.*[^.!?…\"'”’)*_])|[\"“].*[\"”]"
    r"|(?:sure|certainly|absolutely|of course|ok(?:ay)?|here(?:['’]s| is| are)|below is)\b.*",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"[(\[].*[)\]]|\W*(?:note|explanation|each paragraph|(?:please )?let me know|i hope)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_EMPHASIS = re.compile(r"\*+|(?<!\w)_+|_+(?!\w)")
_AFTER_PASSAGE = ("\nAnalysis:", "\nSentences:")


class CreativeWriting(Task):
    """Input: four sentences. Output: a passage of as many paragraphs, each ending in its sentence.

    The sentences are given in one line, one a line, or as a JSON list of texts; a line is split at its full stops. A
    question that does not split into four is taken as it is: as many paragraphs are looked for as it has sentences.
    A thought is a plan and a passage; its value, from 1 to 10, is the passage's coherence. T = 2: one level of
    thoughts, and the best passage is the answer. In deeper trees each passage is a draft for the next. A chat model
    writes one paragraph after another, each up to its sentence, which is put behind it. Score: the share of sentences
    that end their paragraph exactly.
    """

    name = "creative_writing"
    verdict = "constraints met"
    thought = ("plan", "passage")
    depth = 2
    search = "bfs:thoughts=3,breadth=1"
    evaluator = "value"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plan": {"max_tokens": 96, "stop": ("\nPassage:", *_AFTER_PASSAGE)},
        "passage": {"max_tokens": 400, "stop": _AFTER_PASSAGE},
        "value": {"max_tokens": 160, "stop": ("\nSentences:",)},
        "propose": {"max_tokens": 320, "stop": ("\n\n", "\nPassage:")},
        "vote": {"max_tokens": 8, "stop": ("\n",)},
        "chain": {"max_tokens": 500, "stop": _AFTER_PASSAGE},
        "answer": {"max_tokens": 400, "stop": _AFTER_PASSAGE},
    }
    chat: ClassVar[Mapping[str, Any]] = {
        "thought": ("paragraph",),
        "depth": 13,
        "search": "bfs:thoughts=1,breadth=1",
        "evaluator": "vote",
        "sampling": {
            "paragraph": {"max_tokens": 160},
            "value": {"max_tokens": 160},
            "vote": {"max_tokens": 8},
            "chain": {"max_tokens": 500},
            "answer": {"max_tokens": 500},
        },
    }

    def question_of(self, row: Mapping[str, Any]) -> str:
        """The sentences: the line of a text file (`text`), else `question`, which may be a list of them."""
        given = row["text"] if "text" in row else row["question"]
        if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
            return json.dumps(given, ensure_ascii=False)
        return text_of(given)

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """The sentences again: they are all it takes to check an answer."""
        return self.question_of(row)

    def variables(self, state: State) -> dict[str, Any]:
        """Also `sentences`, those required, and `written`, the passage so far."""
        return {
            **super().variables(state),
            "demonstrations": self.data("demonstrations"),
            "sentences": required(state.question),
            "written": self.candidate(state) if state.thoughts else "",
        }

    def steps(self, template: str, state: State) -> Sequence[str]:
        """A passage's paragraphs, each with the sentence that it has to end in."""
        if template != "passage":
            return ()
        return [title(f"Paragraph {i} ends in {one}") for i, one in enumerate(required(state.question), 1)]

    def step(self, state: State, thought: Thought) -> State | None:
        """A paragraph gets its sentence, unless the model has written that, too; the last one ends the passage."""
        if "paragraph" not in thought.parts:
            return state.then(thought)
        sentences, place = required(state.question), len(state.thoughts)
        if place >= len(sentences):
            return None
        before = " ".join(thought.parts["paragraph"].split()).partition(sentences[place])[0].strip()
        written = _ends_in(typed(before), typed(sentences[place]))  # in other quotes or dashes
        last = place + 1 == len(sentences)
        text = before if written else f"{before} {sentences[place]}".strip()
        parts = {"paragraph": text if last else f"{text}\n\n"}
        return state.then(thought.model_copy(update={"parts": parts, "ended": last}))

    def candidate(self, state: State) -> str:
        """The last passage, without its plan; or the paragraphs so far."""
        return (
            self.answer_at(state)
            or (state.message if "paragraph" in self.thought else super().candidate(state)).strip()
        )

    def parse_thought(self, template: str, text: str) -> str | None:
        """Of a paragraph only the first that there is, without a label."""
        text = _LABEL.sub("", text).strip().partition("\n\n")[0] if template == "paragraph" else text
        return super().parse_thought(template, text)

    def parse_value(self, text: str) -> float | None:
        """The score announced last ("Thus the coherency score is 8"), else the last "8/10", else a number alone.

        Other numbers are not scores: an analysis may well count paragraphs.
        """
        low, high = self.scale
        for pattern in _SCORES:
            scores = [score for score in map(float, pattern.findall(text)) if low <= score <= high]
            if scores:
                return scores[-1]
        return None

    def parse_answer(self, text: str) -> str | None:
        """What follows the last "Passage:", else all of the text, up to an analysis; None where that is empty."""
        start = 0
        for found in _PASSAGE.finditer(text):
            start = found.end()
        after = _NEXT.search(text, start)
        return text[start : after.start() if after else None].strip() or None

    def answer_at(self, state: State) -> str | None:
        """The last passage written; None before there is one."""
        return state.thoughts[-1].parts.get("passage") if state.thoughts else None

    def heuristic(self, state: State) -> float:
        """The sentences that do not end their paragraph in the last passage, all where there is none."""
        said = self.candidate(state) if state.thoughts else ""
        return float(endings(state.question, self.parse_answer(said) or "").count(False))

    def verify(self, question: str, answer: Any) -> bool:
        """True where there is one paragraph for each sentence, and each ends in it exactly. Coherence is not judged."""
        if not isinstance(answer, str):
            return False
        exact = endings(question, answer)
        return len(exact) > 0 and all(exact) and len(_body(answer, len(exact))) == len(exact)

    def score(self, answer: Any | None, reference: Any) -> float:
        """The share of the sentences in `reference` that end their paragraph exactly."""
        exact = endings(str(reference), answer) if isinstance(answer, str) else []
        return sum(exact) / len(exact) if exact else 0.0


def required(question: str) -> list[str]:
    """The sentences that a question asks for: a JSON list's texts, else its lines, else the sentences of its line."""
    if question.lstrip().startswith("["):
        try:
            given = json.loads(question)
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, list) and given and all(isinstance(item, str) and item.strip() for item in given):
            return [" ".join(item.split()) for item in given]
    lines = [" ".join(line.split()) for line in question.splitlines() if line.strip()]
    return lines if len(lines) > 1 else split(question)


def endings(question: str, passage: str) -> list[bool]:
    """Whether each required sentence ends its paragraph, the first the first, and so on: word for word, but for spacing
    and the kind of quotes and dashes. False where the paragraph is missing; those beyond the last sentence don't count.
    """
    sentences = required(question)
    written = iter(_body(passage, len(sentences)))
    return [_ends_in(_unmarked(next(written, "")), _unmarked(sentence)) for sentence in sentences]


def _body(passage: str, count: int) -> list[str]:
    """The paragraphs of a passage, without rules.

    If there are more than `count`: without headings, then without a title or an introduction, then without a note.
    """
    found = [one for one in paragraphs(_FENCE.sub("", passage)) if not _RULE.fullmatch(one)]
    while len(found) > count:
        heading = next((place for place, one in enumerate(found) if _HEADING.fullmatch(one)), None)
        if heading is not None:
            del found[heading]
        elif _BEFORE.fullmatch(found[0]):
            del found[0]
        elif _AFTER.fullmatch(found[-1]):
            del found[-1]
        else:
            break
    return found


def _unmarked(text: str) -> str:
    """The text as typed, without Markdown's emphasis."""
    return typed(_EMPHASIS.sub("", text))


def _ends_in(paragraph: str, sentence: str) -> bool:
    before = paragraph.removesuffix(sentence)
    return len(before) < len(paragraph) and not before[-1:].isalnum()
