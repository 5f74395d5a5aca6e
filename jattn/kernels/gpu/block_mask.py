"""The tile lists of `kernels.common.block_mask`, where kernels for GPUs look for them."""

from jattn.kernels.common.block_mask import BlockMask, clamped, kinds, of, vary, varying


__all__ = ["BlockMask", "clamped", "kinds", "of", "vary", "varying"]
