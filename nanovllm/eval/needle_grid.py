"""Needles at every depth of prompts of every length, some times over, resumable."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Any

from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.eval.batch import answer_batch
from nanovllm.eval.needle import NeedleTask, build_task
from nanovllm.eval.record_file import RecordFile
from nanovllm.eval.ruler.policies import PolicySpec
from nanovllm.llm import LLM

# Prompts in one call: enough to be decoded together, few enough to be lost by an interruption.
_BATCH_SIZE = 8

Place = tuple[int, float, int]
"""Length, depth and repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleAnswer:
    """What a model said about one needle of a grid under a policy."""

    policy: str
    """Label of the policy."""
    length: int
    """Tokens of the prompt."""
    depth: float
    """Share of the text before the needle, in [0, 1]."""
    repeat: int
    """Which of the prompts of this length and depth, from 0."""
    value: str
    """What the needle says."""
    answer: str
    """What the model said."""
    passed: bool
    """Whether the value stands in the answer."""
    ttft_ms: float
    """Milliseconds to the first token, without the wait for prompts before; the mean of the prompts
    that ran together."""
    tile_density: float
    """Share of the causal tiles of attention that the prefill computed, in (0, 1]; the mean of the
    prompts that ran together."""

    @property
    def place(self) -> Place:
        """What tells the answer from all others of its policy."""
        return self.length, self.depth, self.repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleGrid:
    """Which needles are looked for.

    A prompt depends on the seed and its own place only, so that a larger grid holds a smaller one.
    """

    lengths: Sequence[int]
    """Tokens of a prompt; each length once."""
    depths: Sequence[float]
    """Shares of the text before the needle, in [0, 1]; each depth once."""
    num_repeats: int = 1
    """Prompts of each length and depth, each with a text and a value of its own; >= 1."""
    seed: int = 0
    """Chooses texts and values."""
    max_new_tokens: int = 32
    """Most tokens of an answer."""

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} {list(values)}: give at least one, and each once")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"depth {depth} is not in [0, 1]")
        if self.num_repeats < 1:
            raise ConfigError(f"num_repeats {self.num_repeats} is not an integer >= 1")

    @property
    def places(self) -> list[Place]:
        """Those of all prompts, in the order in which they run."""
        return [
            (length, float(depth), repeat)
            for length in self.lengths
            for depth in self.depths
            for repeat in range(self.num_repeats)
        ]

    def task(self, tokenizer: Any, place: Place) -> NeedleTask:
        """Return the prompt of a place, which hides a number of seven digits.

        Raises:
            ConfigError: as `build_task`.
        """
        length, depth, repeat = place
        random = Random(f"{self.seed}/{length}/{depth}/{repeat}")
        value = str(random.randrange(10**6, 10**7))
        return build_task(tokenizer, length, depth, value, seed=random.getrandbits(32))


def spread_depths(count: int) -> list[float]:
    """Return `count` depths evenly over [0, 1], both ends among them; of one, the middle.

    Raises:
        ConfigError: `count` is less than 1.
    """
    if count < 1:
        raise ConfigError(f"{count} depths: at least 1")
    return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]


def depth_text(depth: float) -> str:
    """Return a depth in percent, such as `12.5%`."""
    return f"{100 * depth:.3g}%"


def run_grid(
    model: str,
    policy: PolicySpec,
    grid: NeedleGrid,
    options: Mapping[str, Any],
    file: RecordFile[NeedleAnswer] | None = None,
    use_tqdm: bool = False,
) -> tuple[list[NeedleAnswer], list[str]]:
    """Look for all needles of a grid under a policy.

    The model is opened once, and only if the file leaves something to do. Prefix caching is off, so
    that each prompt is computed whole.

    Args:
        model: as `LLM` takes it.
        policy: the policy.
        grid: which needles.
        options: further options of `LLM`.
        file: of answers under any policies, made with the grid's seed and `max_new_tokens`; those
            of this policy are taken over, and new ones are added. None: nothing is kept.
        use_tqdm: whether to show a progress bar.

    Returns:
        The answers, old ones included, in the grid's order; and for each prompt that failed the
        reason. Such a prompt has no answer, and another run tries it again.

    Raises:
        ConfigError, CapacityError, BackendUnavailableError: as `LLM` and `build_task`.
    """
    old = file.records if file else []
    done = {answer.place: answer for answer in old if answer.policy == policy.label}
    missing = [place for place in grid.places if place not in done]
    errors: list[str] = []
    if missing:
        num_places = len(grid.places)
        with (
            LLM(model, **dict(options) | {"enable_prefix_caching": False} | policy.options) as llm,
            tqdm(
                desc=policy.label,
                total=num_places,
                initial=num_places - len(missing),
                unit="prompt",
                disable=not use_tqdm,
            ) as bar,
        ):
            for places in _batches(missing):
                answers, reasons = _answer(llm, policy.label, grid, places)
                if file:
                    file.add(answers)
                done |= {answer.place: answer for answer in answers}
                errors += reasons
                bar.update(len(places))
    return [done[place] for place in grid.places if place in done], errors


def _batches(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield the places in their order, as many of one length as go into one call."""
    for _, group in groupby(places, key=lambda place: place[0]):
        alike = list(group)
        for start in range(0, len(alike), _BATCH_SIZE):
            yield alike[start : start + _BATCH_SIZE]


def _answer(
    llm: LLM, policy: str, grid: NeedleGrid, places: Sequence[Place]
) -> tuple[list[NeedleAnswer], list[str]]:
    """Return the answers of one call, and for each prompt that failed the reason."""
    tasks = [grid.task(llm.tokenizer, place) for place in places]
    batch = answer_batch(llm, [task.token_ids for task in tasks], grid.max_new_tokens)
    answers, errors = [], []
    for place, task, output in zip(places, tasks, batch.outputs, strict=True):
        length, depth, repeat = place
        if output.error is not None:
            where = f"length {length}, depth {depth_text(depth)}, repeat {repeat}"
            errors.append(f"{where}: {output.error}")
            continue
        answers.append(
            NeedleAnswer(
                policy=policy,
                length=length,
                depth=depth,
                repeat=repeat,
                value=task.value,
                answer=output.text,
                passed=task.is_answered_by(output.text),
                ttft_ms=batch.mean_ttft_ms,
                tile_density=batch.tile_density,
            )
        )
    return answers, errors
