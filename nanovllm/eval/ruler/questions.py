"""Questions about documents, from a SQuAD or HotpotQA file, among documents of other questions."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.draft import Draft, Materials

_INTRODUCTION = (
    "Read the documents below and answer the question that follows them. Give the answer alone, in "
    "as few words as possible."
)
_DOCUMENT = "\n\nDocument {number}:"
_QUESTION = "\n\nAnswer in as few words as possible, from the documents above.\n\nQuestion: {text}"
_PREFIX = " Answer:"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answers, and the documents that hold them."""

    text: str
    answers: list[str]
    documents: list[int]
    """Indices into `QuestionFile.documents`."""


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """All questions and all documents of a file."""

    questions: list[Question]
    documents: list[str]


class QuestionDraft(Draft):
    """The documents of a question among others, in any order. A unit is one other document."""

    def __init__(self, materials: Materials) -> None:
        source: QuestionFile | None = materials.questions
        if source is None or not source.questions:
            raise ConfigError("the questions come from a SQuAD or HotpotQA file: give its path")
        # The file's order, begun anew where it ends: the same questions at every length.
        question = source.questions[materials.index % len(source.questions)]
        random = materials.random
        self._own = [source.documents[i] for i in question.documents]
        own = set(question.documents)
        others = [i for i in range(len(source.documents)) if i not in own]
        random.shuffle(others)
        self._others = [source.documents[i] for i in others]
        self._depths = [random.random() for _ in self._own]
        self.outputs = question.answers
        self.answer_prefix = _PREFIX
        self.max_units = len(self._others)
        self._tail = _QUESTION.format(text=question.text)

    def pieces(self, num_units: int) -> list[str]:
        documents = self._others[:num_units]
        for depth, document in zip(self._depths, self._own, strict=True):
            documents.insert(round(depth * len(documents)), document)
        pieces = [_INTRODUCTION]
        for number, document in enumerate(documents, 1):
            pieces += [_DOCUMENT.format(number=number), "\n" + document]
        return [*pieces, self._tail]


def read_questions(path: Path, seed: int) -> QuestionFile:
    """Read a SQuAD (1.1 or 2.0) or HotpotQA (distractor) file, questions in an order by seed.

    Raises:
        ConfigError: the file cannot be read as either.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = _hotpot(content) if isinstance(content, list) else _squad(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as SQuAD or HotpotQA: {error!r}") from error
    Random(seed).shuffle(found.questions)
    return found


def _squad(content: dict[str, Any]) -> QuestionFile:
    documents: dict[str, int] = {}
    questions = []
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            document = documents.setdefault(paragraph["context"], len(documents))
            for qa in paragraph["qas"]:
                answers = list({answer["text"]: None for answer in qa["answers"]})
                if answers and not qa.get("is_impossible"):
                    questions.append(Question(qa["question"], answers, [document]))
    return QuestionFile(questions, list(documents))


def _hotpot(content: list[dict[str, Any]]) -> QuestionFile:
    documents: dict[str, int] = {}
    questions = []
    for entry in content:
        own = [
            documents.setdefault(f"{title}\n{''.join(lines)}", len(documents))
            for title, lines in entry["context"]
        ]
        questions.append(Question(entry["question"], [entry["answer"]], own))
    return QuestionFile(questions, list(documents))
