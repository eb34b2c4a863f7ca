"""A comparison as one JSON-ready result, and that result as one self-contained page."""

from evalign.report.page import render
from evalign.report.result import build_result

__all__ = ["build_result", "render"]
