"""Files: written atomically, and the container format of saved models."""
