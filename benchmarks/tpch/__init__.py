"""Whole SQL queries (TPC-H) over streams, with an answer after every epoch, against Spark.

The claim: all answers are right, and Plait is faster than Spark on every query of paper 002's Table 3.
"""
