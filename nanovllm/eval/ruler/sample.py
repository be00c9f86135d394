"""A sample: a prompt, ready for the model, and what a right answer says. RULER's file layout."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.errors import ConfigError

_MARK = "\N{SNOWMAN}"
_FILE_NAME = "validation.jsonl"
# Prompts that are tokenised in one call: enough to keep all cores busy, without holding all texts.
_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One question of a task. The fields but the last two are those of RULER's files."""

    index: int
    """Number within the task; unique there."""
    input: str
    """The prompt without chat template, or with it if a file had it so."""
    outputs: list[str]
    """What a right answer says."""
    length: int
    """Tokens of the prompt and of the answer's budget together."""
    answer_prefix: str
    """How the answer begins: it ends the prompt, after the template's assistant header."""
    task: str
    """Name of the task; a key of `TASKS`."""
    token_ids: list[int]
    """The whole prompt, for `LLM.generate`."""


class PromptText(NamedTuple):
    """The text of a whole prompt."""

    text: str
    special: bool
    """Whether the tokenizer is to add its special tokens. A template writes its own."""


class PromptWriter:
    """Puts prompts under the chat template, if the tokenizer has one, and tokenises them once.

    Args:
        tokenizer: transformers tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError("the model directory has no tokenizer to write prompts with")
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._begin: str = getattr(tokenizer, "bos_token", None) or ""
        # What tells that a text is under the template already.
        self._signs = [token for token in tokenizer.all_special_tokens if len(token) >= 3]
        if self._has_template:
            tail = self._render(_MARK).partition(_MARK)[2].strip()
            self._signs += [tail] if tail else []

    def text(self, user_text: str, answer_prefix: str, *, may_be_ready: bool = False) -> PromptText:
        """Return a prompt that ends with the beginning of its answer.

        Args:
            user_text: becomes the user's message.
            answer_prefix: follows the assistant's header, without leading space.
            may_be_ready: leave a `user_text` alone that is under a template already.
        """
        ready = may_be_ready and any(sign in user_text for sign in self._signs)
        if self._has_template and not ready:
            return PromptText(self._render(user_text) + answer_prefix.lstrip(), False)
        text = user_text + answer_prefix
        return PromptText(text, not (self._begin and text.startswith(self._begin)))

    def encode(self, texts: Sequence[PromptText]) -> list[list[int]]:
        """Return each text's ids, with one begin token if the model wants one."""
        ids: list[list[int]] = [[] for _ in texts]
        for special in (False, True):
            chosen = [i for i, text in enumerate(texts) if text.special == special]
            for start in range(0, len(chosen), _BATCH):
                batch = chosen[start : start + _BATCH]
                encoded = self._call([texts[i].text for i in batch], special)
                for i, token_ids in zip(batch, encoded, strict=True):
                    ids[i] = token_ids
        return ids

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text takes within a longer one, after a full stop."""
        whole = self._call([".", *("." + text for text in texts)], special=False)
        return [len(ids) - len(whole[0]) for ids in whole[1:]]

    def _call(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _render(self, user_text: str) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": user_text}], tokenize=False, add_generation_prompt=True
        )
        return text


def write_samples(directory: Path, samples: Iterable[Sample]) -> None:
    """Write samples as RULER does: `<directory>/<task>/validation.jsonl`, replacing files there."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    for task, of_task in by_task.items():
        path = directory / task / _FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = ("index", "input", "outputs", "length", "answer_prefix")
        lines = (
            json.dumps({name: getattr(sample, name) for name in fields}, ensure_ascii=False)
            for sample in of_task
        )
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_samples(
    directory: Path, task: str, tokenizer: Any, num_answer_tokens: int
) -> list[Sample]:
    """Read `<directory>/<task>/validation.jsonl`, as `write_samples` or RULER's scripts wrote it.

    Lines without `answer_prefix` hold it in `input`. An `input` that is under the model's chat
    template stays as it is; another one becomes the user's message, if the model has a template.

    Args:
        directory: with a folder for each task.
        task: name of the task.
        tokenizer: transformers tokenizer of the model.
        num_answer_tokens: what is added to the prompts' tokens to give `Sample.length`.

    Raises:
        ConfigError: there is no such file, or a line lacks a field.
    """
    path = directory / task / _FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: expected RULER's <data-dir>/<task>/{_FILE_NAME}")
    writer = PromptWriter(tokenizer)
    with path.open(encoding="utf-8") as file:
        rows = [
            _parse(f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip()
        ]
    texts = [writer.text(row["input"], row["answer_prefix"], may_be_ready=True) for row in rows]
    return [
        Sample(**row, task=task, length=len(ids) + num_answer_tokens, token_ids=ids)
        for row, ids in zip(rows, writer.encode(texts), strict=True)
    ]


def _parse(where: str, line: str) -> dict[str, Any]:
    """Return the fields of a line that a sample takes over."""
    try:
        row = json.loads(line)
        outputs = row["outputs"]
        outputs = [outputs] if isinstance(outputs, (str, int, float)) else outputs
        prefix = row.get("answer_prefix") or ""
        return {
            "index": int(row["index"]),
            "input": str(row["input"]),
            "outputs": [str(output) for output in outputs],
            "answer_prefix": str(prefix),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no sample of RULER: {error!r}") from error
