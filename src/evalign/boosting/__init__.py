"""What boosted trees need of the objective: its gradient by raw score, a table for trees, and the two libraries."""
