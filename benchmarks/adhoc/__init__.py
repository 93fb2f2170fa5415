"""Measures queries that come and go on a running engine (paper 004, SC1 and SC2)."""
