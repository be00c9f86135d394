"""The table of tasks, and how samples of them are generated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.eval.haystack import Prose
from nanovllm.eval.ruler.draft import Draft, Materials, PieceCounter, fit
from nanovllm.eval.ruler.niah import Niah
from nanovllm.eval.ruler.questions import QuestionDraft, read_questions
from nanovllm.eval.ruler.sample import PromptWriter, Sample
from nanovllm.eval.ruler.scoring import Metric
from nanovllm.eval.ruler.variables import ChainDraft
from nanovllm.eval.ruler.word_counts import CommonWordsDraft, FrequentWordsDraft

# Steps of this share spread any number of points evenly over [0, 1).
_GOLDEN_STEP = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Task:
    """One of RULER's tasks."""

    name: str
    num_answer_tokens: int
    """Most tokens of an answer; a part of the length asked for."""
    draft: Callable[[Materials], Draft]
    metric: Metric = "all"
    needs_file: bool = False
    """Whether its questions come from a file that the user brings."""


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("niah_single_1", 128, Niah(hay="noise")),
            Task("niah_single_2", 128, Niah()),
            Task("niah_single_3", 128, Niah(values="code")),
            Task("niah_multikey_1", 128, Niah(num_keys=4)),
            Task("niah_multikey_2", 128, Niah(hay="needles")),
            Task("niah_multikey_3", 128, Niah(hay="needles", word_keys=False, values="code")),
            Task("niah_multivalue", 128, Niah(num_values=4)),
            Task("niah_multiquery", 128, Niah(num_keys=4, num_asked=4)),
            Task("vt", 30, ChainDraft),
            Task("cwe", 120, CommonWordsDraft),
            Task("fwe", 50, FrequentWordsDraft),
            Task("qa_1", 32, QuestionDraft, "part", needs_file=True),
            Task("qa_2", 32, QuestionDraft, "part", needs_file=True),
        )
    }
)
"""Every task by its name in RULER: what it allows for an answer, and how that is scored."""


def get_task(name: str) -> Task:
    """Return a task by name.

    Raises:
        ConfigError: there is none of this name; the message lists those that there are.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; tasks: {', '.join(TASKS)}")
    return TASKS[name]


def generate(
    task: str,
    tokenizer: Any,
    length: int,
    num_samples: int,
    seed: int = 0,
    *,
    indices: Sequence[int] | None = None,
    question_file: Path | None = None,
) -> list[Sample]:
    """Make samples of a task whose prompts fill `length` tokens together with the answer's budget.

    A prompt is at most one sentence, line, word or document shorter than that. A sample depends on
    seed, task, length and index alone, not on how many others are made. Needles that are asked for
    lie at depths that are evenly spread over the samples.

    Args:
        task: a key of `TASKS`.
        tokenizer: transformers tokenizer of the model. If it has a chat template, the prompt is the
            user's message and the answer's beginning follows the assistant's header.
        length: tokens of prompt and answer together.
        num_samples: how many.
        seed: chooses everything that is drawn.
        indices: make these samples instead of the first `num_samples`.
        question_file: SQuAD or HotpotQA in JSON, for `qa_1` and `qa_2`.

    Raises:
        ConfigError: there is no such task, `length` is too short for it, or its file is missing or
            not readable.
    """
    kind = get_task(task)
    if kind.needs_file and question_file is None:
        raise ConfigError(f"{task} takes questions from a SQuAD or HotpotQA file: give its path")
    questions = read_questions(question_file, seed) if question_file and kind.needs_file else None
    counter = PieceCounter(PromptWriter(tokenizer))
    prose = Prose(seed)
    wanted = range(num_samples) if indices is None else indices
    phase = Random(f"{seed}/{task}/{length}").random()
    drafts = [
        kind.draft(
            Materials(
                random=Random(f"{seed}/{task}/{length}/{index}"),
                index=index,
                length=length,
                depth=(phase + index * _GOLDEN_STEP) % 1,
                count=counter.total,
                prose=prose,
                questions=questions,
            )
        )
        for index in wanted
    ]
    try:
        fitted = fit(drafts, counter, length - kind.num_answer_tokens)
    except ConfigError as error:
        raise ConfigError(f"{task} at length {length}: {error}") from error
    return [
        Sample(
            index=index,
            input=user_text,
            outputs=list(draft.outputs),
            length=len(token_ids) + kind.num_answer_tokens,
            answer_prefix=draft.answer_prefix,
            task=task,
            token_ids=token_ids,
        )
        for index, draft, (user_text, token_ids) in zip(wanted, drafts, fitted, strict=True)
    ]
