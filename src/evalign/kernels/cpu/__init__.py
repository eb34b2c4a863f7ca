"""Fused loss on a CPU: loops compiled by numba."""
