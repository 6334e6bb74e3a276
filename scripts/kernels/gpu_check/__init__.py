"""The check of the fused kernels on a GPU, `scripts/gpu_check`."""
