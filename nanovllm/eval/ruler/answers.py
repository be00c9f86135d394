"""What a model answers to samples: one record a sample, kept in a file that runs can resume."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh64_hexdigest

from nanovllm.eval.batch import answer_batch
from nanovllm.eval.record_file import RecordFile
from nanovllm.eval.ruler.sample import Sample
from nanovllm.eval.ruler.scoring import score
from nanovllm.eval.ruler.tasks import get_task
from nanovllm.llm import LLM

Key = tuple[str, str, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer to a sample under a policy."""

    policy: str
    """Label of the policy."""
    task: str
    length: int
    """The length asked for; of samples from a file, the longest of their task."""
    index: int
    """Of the sample within its task and length."""
    prompt: str
    """Hash of the prompt's ids: equal for equal prompts."""
    outputs: list[str]
    """What a right answer says."""
    answer: str
    """What the model said."""
    score: float
    """In [0, 1]."""
    tile_density: float
    """Share of the causal tiles of attention that the prefill computed, in (0, 1]; the mean of the
    samples that ran together."""
    ttft_ms: float
    """Milliseconds to the first token, without the wait for prompts before; see `Batch`."""
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def key(self) -> Key:
        """What tells the answer from all others."""
        return self.policy, self.task, self.length, self.index


def prompt_hash(sample: Sample) -> str:
    """Return a hash of the sample's prompt."""
    return xxh64_hexdigest(b"".join(token.to_bytes(4, "little") for token in sample.token_ids))


def answer_samples(
    llm: LLM,
    samples: Sequence[Sample],
    *,
    policy: str,
    length: int,
    max_new_tokens: int | None = None,
    use_tqdm: bool = False,
) -> tuple[list[Answer], list[str]]:
    """Let a model answer all samples of one task, greedily and in one call.

    Resets the LLM's statistics.

    Args:
        llm: the model.
        samples: of one task.
        policy: label of the LLM's policy.
        length: what to group the answers by.
        max_new_tokens: most tokens of an answer; None: the task's own number.
        use_tqdm: whether to show a progress bar.

    Returns:
        The answers, and for each prompt that failed the reason.
    """
    if not samples:
        return [], []
    task = get_task(samples[0].task)
    prompts = [sample.token_ids for sample in samples]
    batch = answer_batch(llm, prompts, max_new_tokens or task.num_answer_tokens, use_tqdm)
    answers, errors = [], []
    for sample, output, ttft in zip(samples, batch.outputs, batch.ttft_ms, strict=True):
        if output.error is not None:
            errors.append(f"{sample.task} {length} sample {sample.index}: {output.error}")
            continue
        answers.append(
            Answer(
                policy=policy,
                task=sample.task,
                length=length,
                index=sample.index,
                prompt=prompt_hash(sample),
                outputs=sample.outputs,
                answer=output.text,
                score=score(output.text, sample.outputs, task.metric),
                tile_density=batch.tile_density,
                ttft_ms=ttft,
                num_prompt_tokens=output.num_prompt_tokens,
                num_output_tokens=len(output.token_ids),
            )
        )
    return answers, errors


class AnswerFile(RecordFile[Answer]):
    """The answers of a study, see `RecordFile`.

    Args:
        path: the file.
        settings: what all answers of the file have in common, as JSON would give it back.

    Raises:
        ConfigError: as `RecordFile`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(path, settings, Answer, "answer")

    @property
    def answers(self) -> list[Answer]:
        """Those of the file, in its order."""
        return self.records
