"""What the tests of ops share: where kernels run, random inputs, attention in fp64."""

import torch

from nanovllm.ops import reference

CPU = torch.device("cpu")
# Kernels run interpreted without a GPU; there tl.dot is silently wrong in bf16.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNEL_DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [(1, 1), (1, 77), (7, 7), (130, 130), (3, 200), (65, 129)]
NAN, INF = float("nan"), float("inf")


def randn(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def make_qkv(q_len, k_len, heads, kv_heads, dim, dtype=torch.float32, batch=1, device=CPU):
    shapes = (
        (batch, q_len, heads, dim),
        (batch, k_len, kv_heads, dim),
        (batch, k_len, kv_heads, dim),
    )
    return [randn(*shape, dtype=dtype, seed=i, device=device) for i, shape in enumerate(shapes)]


def truth_of(query, key, value, causal, scale=None):
    """Return fp64 attention and LSE of inputs as they are rounded to their dtype."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention_with_lse(query.double(), key.double(), value.double(), scale, causal)
