"""6 ROWS: an epoch on Spark, from sources to sinks."""
