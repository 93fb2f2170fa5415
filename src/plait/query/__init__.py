"""The vocabulary that planning and execution share: relations, expressions, join graphs, plans.  Frozen data."""
