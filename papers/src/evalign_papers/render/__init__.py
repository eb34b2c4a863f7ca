"""Show the papers' tables from their reports: on a terminal, as an HTML page, in the documents."""
