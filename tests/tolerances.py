"""How far a result may lie from the truth, by the dtype that it was computed in, and why."""

from __future__ import annotations

import torch

RELATIVE_RMS = {
    torch.float32: 2e-6,
    torch.float16: 8e-4,
    torch.bfloat16: 6e-3,
}
"""`rms(ours - truth) / rms(truth)` of an op's output. Rounding the output alone gives 2.5e-8,
2.1e-4 and 1.7e-3 (a fifth of the last place); rounding attention's weights before they meet the
values brings the half types to 3.3e-4 and 2.6e-3, and the order of a few hundred fp32 sums gives up
to 5e-7. Twice to four times that is allowed; one wrong row in a thousand would give 3e-2."""

LSE_ABSOLUTE = {
    torch.float32: 5e-6,
    torch.float16: 1e-4,
    torch.bfloat16: 1e-4,
}
"""Log-sum-exp is computed in fp32 from exact products whatever the inputs' dtype, and is about 5,
where the last place is 4.8e-7. For half types PyTorch's CPU kernel takes an exponential that is
good to 3e-5, since more would not show in the output. One key in 200 moves it by 5e-3."""


def assert_close(ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that `ours`, which was computed in `dtype` or its own, is `truth` to rounding."""
    tolerance = RELATIVE_RMS[dtype or ours.dtype]
    assert ours.shape == truth.shape
    error = relative_rms(ours, truth)
    assert error <= tolerance, f"relative RMS error {error:.2e}, allowed {tolerance:.0e}"


def relative_rms(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Return `rms(ours - truth) / rms(truth)`; NaN if `ours` holds NaN or infinity."""
    ours, truth = ours.double(), truth.double()
    return float((ours - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def assert_lse_close(ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that `ours`, fp32, is `truth` to rounding; `-inf` only where the truth is."""
    assert ours.dtype == torch.float32
    assert ours.shape == truth.shape
    empty = truth == float("-inf")
    assert torch.equal(ours == float("-inf"), empty)
    error = (ours.double() - truth.double())[~empty].abs().max()
    assert error <= LSE_ABSOLUTE[dtype], f"LSE is off by {error:.2e}"
