"""Rotary position embedding with the scalings that Llama-family checkpoints use."""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.errors import ConfigError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryEmbedding:
    """Angles of positions, computed for a step's tokens rather than looked up.

    So no table bounds the length. Scalings that depend on the length of a sequence (`dynamic`,
    `longrope`) are refused: keys already cached would keep the angles of a shorter one.

    Raises:
        ConfigError: the checkpoint's `rope_type` is not supported.
    """

    def __init__(self, config: PretrainedConfig, head_dim: int, device: torch.device) -> None:
        parameters = config.rope_parameters
        rope_type = parameters["rope_type"]
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ConfigError(
                f"config.json: rope_type {rope_type!r} is none of {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            # Written as transformers writes it: the last bit is 0.004 rad at position 65,536.
            self.inv_freq, self.scale = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        else:
            self.inv_freq, self.scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        # [head_dim / 2]
        self.inv_freq = self.inv_freq.to(device=device, dtype=torch.float32)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, fp32 `[n, head_dim / 2]`, of integer `positions` `[n]`."""
        angle = positions[:, None].float() * self.inv_freq
        return angle.cos() * self.scale, angle.sin() * self.scale
