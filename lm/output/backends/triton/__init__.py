"""The CUDA backend: fused Triton kernels."""
