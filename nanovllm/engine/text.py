"""Text in, token ids out: the one path on which prompts are tokenised."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from nanovllm.errors import ConfigError

Message = dict[str, Any]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> Any | None:
    """Return the directory's tokenizer, or None if it holds none.

    Raises:
        ConfigError: there is one, but it cannot be loaded.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ConfigError(f"the tokenizer in {directory} cannot be loaded: {error}") from error


def end_token_ids(directory: Path, config: PretrainedConfig, tokenizer: Any | None) -> set[int]:
    """Return every id that ends a sequence: of config.json, generation_config.json, tokenizer."""
    sources = [config.eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    path = directory / "generation_config.json"
    if path.is_file():
        try:
            sources.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return ids


class PromptEncoder:
    """Turns prompts and chats into token ids."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def encode(self, prompt: str | Seq[int]) -> list[int]:
        """Return the ids of a prompt. Text gets the tokenizer's special tokens.

        A text that already begins with the begin-of-text token, as templates write it, does not
        get a second one.

        Raises:
            ConfigError: the prompt is empty, holds what is no token id, or is text although the
                model has no tokenizer.
        """
        if not isinstance(prompt, str):
            return self._checked(list(prompt))
        if not prompt:
            raise _empty_prompt()
        begin = getattr(self._tokenizer, "bos_token", None)
        return self._encode_text(prompt, special=not (begin and prompt.startswith(begin)))

    def encode_chat(
        self, messages: Seq[Message], chat_template: str | None, add_generation_prompt: bool
    ) -> list[int]:
        """Return the ids of a conversation under the model's chat template, or the one given.

        Raises:
            ConfigError: there is no template, or it refuses the conversation; with its reason.
        """
        if self._tokenizer is None:
            raise _no_tokenizer()
        if chat_template is None and not self._tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template: pass chat_template=..., or write the "
                "prompt yourself and call generate"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise ConfigError(
                f"the chat template refuses this conversation: {error}. Change the messages, pass "
                "chat_template=..., or write the prompt yourself and call generate"
            ) from error
        return self._encode_text(text, special=False)

    def _encode_text(self, text: str, special: bool) -> list[int]:
        if self._tokenizer is None:
            raise _no_tokenizer()
        try:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # text that is no valid Unicode, for one
            raise ConfigError(f"the tokenizer refuses the prompt's text: {error}") from error
        return self._checked(token_ids)

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise _empty_prompt()
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ConfigError(
                f"the prompt holds ids outside the vocabulary of {self._vocab_size}: "
                f"{min(token_ids)} to {max(token_ids)}"
            )
        return token_ids


def _empty_prompt() -> ConfigError:
    return ConfigError("the prompt is empty: there is nothing to continue")


def _no_tokenizer() -> ConfigError:
    return ConfigError("the model directory has no tokenizer: give prompts as token ids")
