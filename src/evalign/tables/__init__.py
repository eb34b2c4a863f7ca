"""Tables: a file -> a data frame -> a float32 matrix.

`reading` reads CSV, TSV (`delimited`) and Parquet; `columns` tells what a column is; `encoders` turn one column into
numbers and `encoder` a whole table; `distinct` splits rows so that copies of one row stay together.
"""

from evalign.tables.encode import TableEncoder

__all__ = ["TableEncoder"]
