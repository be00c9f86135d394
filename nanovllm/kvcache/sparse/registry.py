"""Names of the sparse policies and where each lives. A policy's module is imported when chosen."""

from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.kvcache.sparse.policy import SparsePolicy


class SparsePolicyType(Enum):
    """The policies that exist. The value is where the policy's class is defined."""

    FULL = "nanovllm.kvcache.sparse.full:FullAttentionPolicy"
    XATTN_BSA = "nanovllm.kvcache.sparse.xattn_bsa:XAttentionBSAPolicy"
    QUEST = "nanovllm.kvcache.sparse.quest:QuestPolicy"
    STREAMING = "nanovllm.kvcache.sparse.streaming:StreamingPolicy"


def parse_policy(value: object, option: str = "sparse_policy") -> "SparsePolicyType | SparsePolicy":
    """Return what `value` means: a member, a member's name in any case, or a policy of one's own.

    Raises:
        ConfigError: there is no such policy; the message lists those that exist.
    """
    if isinstance(value, SparsePolicyType):
        return value
    if isinstance(value, str):
        if value.upper() in SparsePolicyType.__members__:
            return SparsePolicyType[value.upper()]
    else:
        from nanovllm.kvcache.sparse.policy import SparsePolicy

        if isinstance(value, SparsePolicy):
            return value
    names = ", ".join(SparsePolicyType.__members__)
    raise ConfigError(f"{option}={value!r} is none of {names}, and no SparsePolicy object")


def create_policies(config: Any) -> tuple["SparsePolicy", "SparsePolicy"]:
    """Import and make the policies of prefill and of decode.

    One that serves both phases is made once. Without a `decode_policy`, decode is dense where
    `sparse_policy` does not serve it.

    Args:
        config: a `nanovllm.config.Config`.

    Raises:
        ConfigError: a policy lacks the phase that it is chosen for.
    """
    prefill = _create(config.sparse_policy, config)
    if not prefill.supports_prefill:
        raise ConfigError(
            f"sparse_policy: {type(prefill).__name__} has no prefill phase; it may be the "
            "decode_policy"
        )
    chosen = config.decode_policy
    if chosen is None:
        chosen = config.sparse_policy if prefill.supports_decode else SparsePolicyType.FULL
    decode = prefill if chosen is config.sparse_policy else _create(chosen, config)
    if not decode.supports_decode:
        raise ConfigError(f"decode_policy: {type(decode).__name__} has no decode phase")
    return prefill, decode


def _create(chosen: "SparsePolicyType | SparsePolicy", config: Any) -> "SparsePolicy":
    if not isinstance(chosen, SparsePolicyType):
        return chosen
    module, _, class_name = chosen.value.partition(":")
    policy_class: type[SparsePolicy] = getattr(import_module(module), class_name)
    return policy_class.from_config(config)
