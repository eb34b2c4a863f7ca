"""Fused losses: the values and gradients of the eager form, by compiled loops on a CPU and Triton kernels on a GPU."""
