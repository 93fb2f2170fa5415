"""Rows at rest: segments, runs, tiers, and what is read of them."""
