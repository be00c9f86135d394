"""What a model answers to samples: one record a sample, kept in a file that runs can resume."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from xxhash import xxh64_hexdigest

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.sample import Sample
from nanovllm.eval.ruler.scoring import score
from nanovllm.eval.ruler.tasks import get_task
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

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
    """Milliseconds to the first token, without the wait for prompts before; see
    `answer_samples`."""
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

    `ttft_ms` leaves the wait for other prompts out: where requests run one at a time, it counts
    from the end of the one before, else from the first token of the one before. Resets the LLM's
    statistics.

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
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens or task.num_answer_tokens)
    llm.reset_stats()
    results = llm.generate([sample.token_ids for sample in samples], params, use_tqdm)
    attention = llm.stats()["attention"]
    density = attention["tile_density"] if attention else 1.0
    ttft_ms = _own_ttft_ms(results, one_at_a_time=llm.engine.config.enable_offload)
    answers, errors = [], []
    for sample, result, ttft in zip(samples, results, ttft_ms, strict=True):
        if result.error is not None:
            errors.append(f"{sample.task} {length} sample {sample.index}: {result.error}")
            continue
        answers.append(
            Answer(
                policy=policy,
                task=sample.task,
                length=length,
                index=sample.index,
                prompt=prompt_hash(sample),
                outputs=sample.outputs,
                answer=result.text,
                score=score(result.text, sample.outputs, task.metric),
                tile_density=density,
                ttft_ms=ttft,
                num_prompt_tokens=result.num_prompt_tokens,
                num_output_tokens=len(result.token_ids),
            )
        )
    return answers, errors


def _own_ttft_ms(results: Sequence[RequestOutput], one_at_a_time: bool) -> list[float]:
    """Return each result's time to the first token without the time when others had their turn.

    All requests arrived together; those that failed have none.
    """
    ttft_ms = [float("nan")] * len(results)
    done = [i for i, result in enumerate(results) if result.error is None]
    before = 0.0
    for i in sorted(done, key=lambda i: results[i].ttft_ms):
        ttft_ms[i] = results[i].ttft_ms - before
        before = results[i].ttft_ms + (results[i].decode_ms if one_at_a_time else 0)
    return ttft_ms


class AnswerFile:
    """Answers as JSON lines, under a first line with the settings that they were made with.

    Args:
        path: the file; made if it is missing. A last line that was cut off is dropped.
        settings: what all answers of the file have in common, as JSON would give it back.

    Raises:
        ConfigError: the file holds something else, or was made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.answers: list[Answer] = []
        """Those of the file, in its order."""
        if not path.is_file() or not path.stat().st_size:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append([{"settings": dict(settings)}])
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", errors="replace").splitlines()
        self._check_settings(lines[0] if lines else "", settings)
        for number, line in enumerate(lines[1:], 2):
            self.answers.append(self._parse(number, line))
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, answers: Iterable[Answer]) -> None:
        """Append answers, at once on disk."""
        answers = list(answers)
        self.answers += answers
        self._append(map(asdict, answers))

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _check_settings(self, line: str, settings: Mapping[str, Any]) -> None:
        try:
            old = dict(json.loads(line)["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} is no file of answers: name another one") from error
        differing = [
            f"{name}: {old.get(name)!r} there, {settings.get(name)!r} now"
            for name in dict.fromkeys([*old, *settings])
            if old.get(name) != settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self._path} holds answers of other settings ({'; '.join(differing)}): name "
                "another file, or run with those settings"
            )

    def _parse(self, number: int, line: str) -> Answer:
        try:
            row = json.loads(line)
            return Answer(**{field.name: row[field.name] for field in fields(Answer)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path}:{number} is no answer: {error!r}") from error
