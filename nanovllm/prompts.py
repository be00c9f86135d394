"""The forms in which prompts may be given."""

import operator
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import ConfigError


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return a list of prompts, each text or a list of ids.

    Args:
        prompts: one text; one flat sequence, array or tensor of integers of any kind; or an
            iterable of such prompts.

    Raises:
        ConfigError: something is neither text nor integers; nothing is computed then.
    """
    if isinstance(prompts, str):
        return [prompts]
    prompts = _as_list(prompts)
    if prompts and not any(isinstance(p, str) or _is_iterable(p) for p in prompts):
        return [_as_ids(prompts)]
    return [p if isinstance(p, str) else _as_ids(p) for p in prompts]


def _as_ids(prompt: Any) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in _as_list(prompt)]
    except TypeError:
        raise ConfigError(
            f"a prompt is text or a sequence of integer token ids, not {str(prompt)[:80]}"
        ) from None


def _as_list(values: Any) -> list[Any]:
    if hasattr(values, "tolist"):  # numpy arrays and tensors, whose items would be slow to convert
        values = values.tolist()
    if not _is_iterable(values):
        raise ConfigError(f"prompts are text or token ids, not {type(values).__name__}")
    return list(values)


def _is_iterable(value: Any) -> bool:
    # Tensors without axes claim to be iterable; bytes and mappings are, but of no token ids.
    return (
        hasattr(value, "__iter__")
        and getattr(value, "ndim", 1) > 0
        and not isinstance(value, (bytes, Mapping))
    )
