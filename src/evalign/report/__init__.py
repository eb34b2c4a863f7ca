"""Results of a comparison as JSON and as a self-contained HTML page."""
