"""Names of the sparse policies and where each lives. A policy's module is imported when chosen."""

from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.kvcache.sparse.policy import SparsePolicy


class SparsePolicyType(Enum):
    """The policies that exist. The value is where the policy's class is defined."""

    FULL = "nanovllm.kvcache.sparse.full:FullAttentionPolicy"


def parse_policy_type(value: object) -> SparsePolicyType:
    """Return the policy type that `value` means: a member, or a member's name in any case.

    Raises:
        ConfigError: there is no such policy; the message lists those that exist.
    """
    if isinstance(value, SparsePolicyType):
        return value
    if isinstance(value, str) and value.upper() in SparsePolicyType.__members__:
        return SparsePolicyType[value.upper()]
    names = ", ".join(SparsePolicyType.__members__)
    raise ConfigError(f"sparse_policy={value!r} is none of {names}")


def create_policy(policy_type: SparsePolicyType) -> "SparsePolicy":
    """Import and make the policy that `policy_type` names.

    Raises:
        ConfigError: the policy lacks a phase; the message says which.
    """
    module, _, class_name = policy_type.value.partition(":")
    policy: SparsePolicy = getattr(import_module(module), class_name)()
    for phase in ("prefill", "decode"):
        if not getattr(policy, f"supports_{phase}"):
            raise ConfigError(f"sparse_policy={policy_type.name} has no {phase} phase")
    return policy
