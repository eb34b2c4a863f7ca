"""Tables: read a file into a data frame, profile it, encode it as a float32 matrix, split its rows."""
