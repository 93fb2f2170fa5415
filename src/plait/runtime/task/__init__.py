"""What runs inside Spark's tasks: buckets, exchanges, probes, results."""
