"""Matrix products with a weight, by the number of rows."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`: `[n, in_features]` to `[n, out_features]`.

    One row in half precision on a GPU takes a kernel that streams the weight, where that beats
    cuBLAS.
    """
    if x.is_cuda and x.shape[0] == 1 and x.dtype.itemsize == 2:
        from nanovllm.ops.kernels.gemv import gemv, gemv_pays

        if gemv_pays(*weight.shape):
            return gemv(x, weight, bias)
    return F.linear(x, weight, bias)
