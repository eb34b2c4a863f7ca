"""Training on tables larger than memory: Parquet files are read in passes, with bounded memory."""
