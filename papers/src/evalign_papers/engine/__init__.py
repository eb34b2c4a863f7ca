"""The papers' tables as data: a frozen config per cell, `run(config) -> report`, and what is shown of them."""
