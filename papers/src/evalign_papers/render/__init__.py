"""What is shown of the papers' tables: on a terminal, as a page, in the documents; from reports alone."""
