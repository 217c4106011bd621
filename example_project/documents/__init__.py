"""A small library of documents: what is uploaded is read by jobs."""
