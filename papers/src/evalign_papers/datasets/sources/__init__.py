"""One module for each data set: its card and its loader."""
