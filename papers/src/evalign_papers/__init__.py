"""The papers behind evalign: data sets, rivals, experiments and their reports."""

__version__ = "0.1.0"
