"""A comparison as one JSON-ready result, and that result as one self-contained page."""

from evalign.report.page import build_result, render

__all__ = ["build_result", "render"]
