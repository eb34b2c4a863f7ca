"""Files on disk: atomic writes and the model container, neither of which executes code on loading."""
