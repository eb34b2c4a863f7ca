"""Results of a comparison as JSON and as a self-contained HTML page."""

from evalign.report.page import build_result, render

__all__ = ["build_result", "render"]
