"""The Triton backend: fused kernels for CUDA, which Triton's interpreter runs on a CPU."""
