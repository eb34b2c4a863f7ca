"""Search over decision rules: thresholds of one score, class offsets, gain matrices, one threshold per label."""
