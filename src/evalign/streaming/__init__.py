"""Training on tables larger than memory: Parquet files are read in passes, and a bounded part of them is held."""
