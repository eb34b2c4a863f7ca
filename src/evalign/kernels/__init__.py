"""Fused forms of the soft counts: same values and gradients as the eager form, which stays the reference."""
