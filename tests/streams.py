"""A small data set of Parquet files with missing values, text, flags, categories and a rare class."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet


def people(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    frame = pd.DataFrame(
        {
            "age": 40 + 10 * x[:, 0],
            "income": np.where(rng.random(n) < 0.1, np.nan, np.exp(x[:, 1])),
            "job": rng.choice(["cook", "smith", None], n, p=[0.6, 0.3, 0.1]),
            "owner": rng.random(n) < 0.3,
            "rooms": pd.Categorical(rng.integers(1, 4, n)),
            "always": 7.0,
        }
    )
    frame["sick"] = np.where(x.sum(1) + 0.3 * rng.normal(size=n) > 1.5, "yes", "no")
    return frame


def write(folder, frame, files=3, row_group=100):
    """Write the frame as files of consecutive rows, named in order."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.array_split(np.arange(len(frame)), files)):
        table = pa.Table.from_pandas(frame.iloc[part], preserve_index=False)
        pa.parquet.write_table(table, folder / f"part-{i}.parquet", row_group_size=row_group)
    return folder
