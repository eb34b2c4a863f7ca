"""The papers' tables: printed numbers, one config for each cell, and the reports beside them."""
