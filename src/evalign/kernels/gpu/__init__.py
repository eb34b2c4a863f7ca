"""Fused loss on a GPU: Triton kernels and their launches."""
