"""5 MANY QUERIES: stores and probe trees that several queries use together."""
