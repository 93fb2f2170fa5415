"""Answers of whole queries, and committed rows as DataFrames."""
