"""Networks for encoded tables."""
