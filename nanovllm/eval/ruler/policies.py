"""Policies to compare, each written as a short text such as `XATTN_BSA:threshold=0.9,stride=16`."""

from dataclasses import dataclass, fields
from typing import Any

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.kvcache.sparse.registry import SparsePolicyType
from nanovllm.kvcache.sparse.registry import parse_policy as parse_name

_PREFIX = "sparse_"


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A sparse policy and its options, those of decode among them."""

    label: str
    """The text that means it, with the options in alphabetical order."""
    options: dict[str, Any]
    """Options of `LLM`."""


def parse_policy(text: str) -> PolicySpec:
    """Return the policy that a text means.

    Args:
        text: the policy's name, and after a colon its options with commas between them: fields of
            `Config` without `sparse_`, such as `threshold=0.9`, and those of decode with their
            names, such as `decode_policy=QUEST`.

    Raises:
        ConfigError: there is no such policy or option, or an option has no value.
    """
    name, _, rest = text.partition(":")
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(f"policy {text!r}: {part!r} is not of the form name=value")
        given[key.strip()] = _value(value.strip())
    return make_policy(name.strip(), given)


def make_policy(name: str, options: dict[str, Any]) -> PolicySpec:
    """Return a policy by its name and its options, named as for `parse_policy`.

    Raises:
        ConfigError: there is no such policy or option.
    """
    kind = parse_name(name)
    assert isinstance(kind, SparsePolicyType)
    names = [field.name for field in fields(Config) if field.name != "sparse_policy"]
    fields_of = {name.removeprefix(_PREFIX): name for name in names if name.startswith(_PREFIX)}
    fields_of |= {name: name for name in names if name.startswith("decode_")}
    for option in options:
        if option not in fields_of:
            raise ConfigError(
                f"policy {name}: unknown option {option!r}; options: {', '.join(fields_of)}"
            )
    listed = ",".join(f"{option}={_text(options[option])}" for option in sorted(options))
    return PolicySpec(
        label=kind.name + (f":{listed}" if listed else ""),
        options={"sparse_policy": kind}
        | {fields_of[option]: value for option, value in options.items()},
    )


def _text(value: object) -> object:
    return value.name if isinstance(value, SparsePolicyType) else value


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
