"""Plait against Spark's own stream-stream joins and DuckDB, on the papers' TPC-DS query and on a chain over three keys.

The claim: several times faster than Spark's faster variant, with equal results, at a cost per epoch that grows no
faster than the logarithm of the state.
"""
