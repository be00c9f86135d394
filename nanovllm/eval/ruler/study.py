"""A study: the same samples under one or more policies, group by group, resumable."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.answers import Answer, AnswerFile, Key, answer_samples, prompt_hash
from nanovllm.eval.ruler.policies import PolicySpec
from nanovllm.eval.ruler.sample import Sample, read_samples
from nanovllm.eval.ruler.tasks import TASKS, generate, get_task
from nanovllm.llm import LLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which samples are answered."""

    tasks: Sequence[str]
    """Names of tasks; without `data_dir` at least one."""
    lengths: Sequence[int] = (4096,)
    """Tokens of prompt and answer together, of generated samples."""
    num_samples: int | None = None
    """How many of each task and length. None: 10, of files all."""
    indices: Sequence[int] | None = None
    """These samples instead of the first ones."""
    seed: int = 0
    """Of generated samples."""
    data_dir: Path | None = None
    """Read samples from RULER's files here instead of generating them."""
    question_file: Path | None = None
    """For qa_1 and qa_2."""
    max_new_tokens: int | None = None
    """Most tokens of an answer. None: as the task says."""


@dataclass(slots=True)
class Study:
    """Runs a plan under policies.

    Args:
        plan: which samples.
        file: where answers are kept; None: nowhere.
        show: called with a line on each group that is done.
        use_tqdm: whether to show progress within a group.
    """

    plan: Plan
    file: AnswerFile | None = None
    show: Callable[[str], None] = lambda line: None
    use_tqdm: bool = False
    errors: list[str] = field(default_factory=list)
    """Reasons of prompts that failed. They have no answer, and another run tries them again."""
    _samples: dict[tuple[str, int | None], list[Sample]] = field(default_factory=dict)

    def run(self, model: str, policy: PolicySpec, options: Mapping[str, Any]) -> list[Answer]:
        """Answer the plan's samples under a policy and return all answers, old ones included.

        The model is opened only if something is left to do. Prefix caching is off, so that each
        prompt is computed whole.

        Args:
            model: as `LLM` takes it.
            policy: the policy.
            options: further options of `LLM`.

        Raises:
            ConfigError, CapacityError: as `LLM`; a sample cannot be made or read; or the file's
                answers are to other prompts.
        """
        done = {answer.key: answer for answer in self.file.answers} if self.file else {}
        if self.plan.data_dir is None and self._is_complete(policy.label, done):
            return [done[policy.label, *group] for group in self._generated_keys()]
        answers: list[Answer] = []
        with LLM(model, **dict(options) | {"enable_prefix_caching": False} | policy.options) as llm:
            for task in self.plan.tasks:
                for length, samples in self._groups(task, llm.tokenizer):
                    answers += self._run_group(llm, policy.label, task, length, samples, done)
        return answers

    def _run_group(
        self,
        llm: LLM,
        label: str,
        task: str,
        length: int,
        samples: Sequence[Sample],
        done: Mapping[Key, Answer],
    ) -> list[Answer]:
        old = {
            sample.index: done[key]
            for sample in samples
            if (key := (label, task, length, sample.index)) in done
        }
        for sample in samples:
            if sample.index in old and old[sample.index].prompt != prompt_hash(sample):
                raise ConfigError(
                    f"{task} at length {length}, sample {sample.index}: the file's answer is to "
                    "another prompt; name another file"
                )
        new, errors = answer_samples(
            llm,
            [sample for sample in samples if sample.index not in old],
            policy=label,
            length=length,
            max_new_tokens=self.plan.max_new_tokens,
            use_tqdm=self.use_tqdm,
        )
        if self.file:
            self.file.add(new)
        self.errors += errors
        by_index = old | {answer.index: answer for answer in new}
        group = [by_index[sample.index] for sample in samples if sample.index in by_index]
        mean = sum(answer.score for answer in group) / len(group) if group else float("nan")
        self.show(f"{label} {task} {length}: score {mean:.3f} ({len(group)} samples)")
        return group

    def _indices(self) -> Sequence[int]:
        plan = self.plan
        if plan.indices is not None:
            return plan.indices
        return range(10 if plan.num_samples is None else plan.num_samples)

    def _generated_keys(self) -> list[tuple[str, int, int]]:
        return [
            (task, length, index)
            for task in self.plan.tasks
            for length in self.plan.lengths
            for index in self._indices()
        ]

    def _is_complete(self, label: str, done: Mapping[Key, Answer]) -> bool:
        return all((label, *group) in done for group in self._generated_keys())

    def _groups(self, task: str, tokenizer: Any) -> Iterator[tuple[int, list[Sample]]]:
        """Yield lengths and their samples, made or read once for all policies."""
        plan, made = self.plan, self._samples
        if plan.data_dir is not None:
            if (task, None) not in made:
                num_answer_tokens = get_task(task).num_answer_tokens
                made[task, None] = read_samples(plan.data_dir, task, tokenizer, num_answer_tokens)
            samples = made[task, None]
            length = max((sample.length for sample in samples), default=0)
            if plan.indices is not None:
                samples = [sample for sample in samples if sample.index in plan.indices]
            yield length, samples[: plan.num_samples]
            return
        for length in plan.lengths:
            if (task, length) not in made:
                made[task, length] = generate(
                    task,
                    tokenizer,
                    length,
                    len(self._indices()),
                    plan.seed,
                    indices=self._indices(),
                    question_file=plan.question_file,
                )
            yield length, made[task, length]


def tasks_in(data_dir: Path) -> list[str]:
    """Return the tasks of which a folder of RULER's files has some, in RULER's order.

    Raises:
        ConfigError: it has none.
    """
    found = [name for name in TASKS if (data_dir / name / "validation.jsonl").is_file()]
    if not found:
        raise ConfigError(f"{data_dir} holds no <task>/validation.jsonl of {', '.join(TASKS)}")
    return found
