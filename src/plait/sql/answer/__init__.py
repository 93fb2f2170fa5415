"""What stands around the joins of a query."""
