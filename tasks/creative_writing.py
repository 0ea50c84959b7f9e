"""Creative Writing: a coherent passage whose paragraphs end in given sentences (ToT, section 4.2; SEED, Appendix D).

A thought is a plan with the passage that follows it; for chat models it is a paragraph. `endings` and `verify` check
the sentences without a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tot.task.task import Task, text_of
from tot.tasks.sentences import paragraphs, split, typed
from tot.tree.thought import State, Thought

_PASSAGE = re.compile(r"^[ \t*#]{0,9}passage[ \t*]{0,9}:[ \t*]{0,9}", re.IGNORECASE | re.MULTILINE)
_NEXT = re.compile(r"^[ \t*#]{0,9}(?:analysis|sentences)[ \t*]{0,9}:", re.IGNORECASE | re.MULTILINE)
_NUMBER = r"([0-9]{1,2}(?:\.[0-9]{1,9})?)(?![0-9])"
_SCORES = (  # the most reliable pattern first
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
    """Input: four sentences. Output: a passage of four paragraphs, each ending in its sentence.

    The sentences are in one line, one per line, or in a JSON list of texts; a single line is split into sentences. A
    question with another number of sentences needs that number of paragraphs. A thought is a plan and a passage; its
    value, from 1 to 10, is the passage's coherence. T = 2: one level of thoughts, and the best passage is the answer.
    In deeper trees each passage is a draft for the next. A chat model writes one paragraph at a time, and its
    sentence is appended. Score: the fraction of sentences that end their paragraph exactly.
    """

    name = "creative_writing"
    verdict = "paragraphs end as asked"
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
        """Return the sentences: `text`, a line of a text file, otherwise `question`, which may be a list of texts."""
        sentences = row["text"] if "text" in row else row["question"]
        if isinstance(sentences, list) and sentences and all(isinstance(item, str) for item in sentences):
            return json.dumps(sentences, ensure_ascii=False)
        return text_of(sentences)

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the sentences, which are sufficient to check an answer."""
        return self.question_of(row)

    def variables(self, state: State) -> dict[str, Any]:
        """Template variables, with the required `sentences` and the passage so far (`written`)."""
        return {
            **super().variables(state),
            "demonstrations": self.prompts.data("demonstrations"),
            "sentences": required(state.question),
            "written": self.candidate(state) if state.thoughts else "",
        }

    def steps(self, template: str, state: State) -> Sequence[str]:
        """Return the titles of a passage's paragraphs, each with its required last sentence."""
        if template != "passage":
            return ()
        titles = [f"Paragraph {i} ends in {sentence}" for i, sentence in enumerate(required(state.question), 1)]
        return [title.replace(":", ",").replace("#", "") for title in titles]  # characters that end a title

    def step(self, state: State, thought: Thought) -> State | None:
        """Append the required sentence to a paragraph that does not have it; the last paragraph ends the passage."""
        if "paragraph" not in thought.parts:
            return state.then(thought)
        sentences, index = required(state.question), len(state.thoughts)
        if index >= len(sentences):
            return None
        before = " ".join(thought.parts["paragraph"].split()).partition(sentences[index])[0].strip()
        complete = _ends_in(typed(before), typed(sentences[index]))  # with other quotes or dashes
        last = index + 1 == len(sentences)
        text = before if complete else f"{before} {sentences[index]}".strip()
        parts = {"paragraph": text if last else f"{text}\n\n"}
        return state.then(thought.model_copy(update={"parts": parts, "ended": last}))

    def candidate(self, state: State) -> str:
        """Return the last passage without its plan, or the paragraphs so far."""
        return (
            self.answer_at(state) or (state.message if "paragraph" in self.thought else state.thoughts[-1].text).strip()
        )

    def parse_thought(self, template: str, text: str) -> str | None:
        """Parse a thought. A paragraph ends at the first blank line, and loses its label."""
        text = _LABEL.sub("", text).strip().partition("\n\n")[0] if template == "paragraph" else text
        return super().parse_thought(template, text)

    def parse_value(self, text: str) -> float | None:
        """Return the last announced score ("Thus the coherency score is 8"), else the last "8/10", else a sole number.

        Other numbers are not scores: an analysis may count paragraphs.
        """
        low, high = self.scale
        for pattern in _SCORES:
            scores = [score for score in map(float, pattern.findall(text)) if low <= score <= high]
            if scores:
                return scores[-1]
        return None

    def parse_answer(self, text: str) -> str | None:
        """Return the text after the last "Passage:", else the whole text, up to an analysis; None if it is empty."""
        start = 0
        for match in _PASSAGE.finditer(text):
            start = match.end()
        after = _NEXT.search(text, start)
        return text[start : after.start() if after else None].strip() or None

    def answer_at(self, state: State) -> str | None:
        """Return the last passage; None if there is no passage yet."""
        return state.thoughts[-1].parts.get("passage") if state.thoughts else None

    def heuristic(self, state: State) -> float:
        """Return the number of sentences that do not end their paragraph in the last passage."""
        passage = self.candidate(state) if state.thoughts else ""
        return float(endings(state.question, self.parse_answer(passage) or "").count(False))

    def verify(self, question: str, answer: Any) -> bool:
        """Return True if there is one paragraph per sentence, each ending in it exactly. Coherence is not checked."""
        if not isinstance(answer, str):
            return False
        exact = endings(question, answer)
        return len(exact) > 0 and all(exact) and len(_body(answer, len(exact))) == len(exact)

    def score(self, answer: Any | None, reference: Any) -> float:
        """Return the fraction of the sentences in `reference` that end their paragraph exactly."""
        exact = endings(str(reference), answer) if isinstance(answer, str) else []
        return sum(exact) / len(exact) if exact else 0.0


def required(question: str) -> list[str]:
    """Return the required sentences of a question: a JSON list's texts, else its lines, else its line's sentences."""
    if question.lstrip().startswith("["):
        try:
            items = json.loads(question)
        except (ValueError, RecursionError):
            items = None
        if isinstance(items, list) and items and all(isinstance(item, str) and item.strip() for item in items):
            return [" ".join(item.split()) for item in items]
    lines = [" ".join(line.split()) for line in question.splitlines() if line.strip()]
    return lines if len(lines) > 1 else split(question)


def endings(question: str, passage: str) -> list[bool]:
    """Return for each required sentence whether it ends the paragraph with the same index.

    Spacing and the kind of quotes and dashes are ignored. The result is False if the paragraph is missing. Additional
    paragraphs are ignored.
    """
    sentences = required(question)
    body = iter(_body(passage, len(sentences)))
    return [_ends_in(_unmarked(next(body, "")), _unmarked(sentence)) for sentence in sentences]


def _body(passage: str, count: int) -> list[str]:
    """Return the paragraphs of a passage, without horizontal rules.

    If there are more than `count`, headings are removed, then a title or introduction, then a note.
    """
    result = [text for text in paragraphs(_FENCE.sub("", passage)) if not _RULE.fullmatch(text)]
    while len(result) > count:
        heading = next((i for i, text in enumerate(result) if _HEADING.fullmatch(text)), None)
        if heading is not None:
            del result[heading]
        elif _BEFORE.fullmatch(result[0]):
            del result[0]
        elif _AFTER.fullmatch(result[-1]):
            del result[-1]
        else:
            break
    return result


def _unmarked(text: str) -> str:
    """Return the text as typed, without Markdown emphasis."""
    return typed(_EMPHASIS.sub("", text))


def _ends_in(paragraph: str, sentence: str) -> bool:
    before = paragraph.removesuffix(sentence)
    return len(before) < len(paragraph) and not before[-1:].isalnum()
