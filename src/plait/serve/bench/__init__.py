"""The benchmark harness behind `plait bench`.

data        generated input: one Parquet file per table and epoch, kept between runs
workloads   the queries
checksum    one order-independent checksum, in Spark's SQL and in DuckDB's
contestants what is measured; each run is a process of its own (`python -m plait.serve.bench.contestants JOB`)
race        starts these processes and watches the memory of their whole tree
benchmarks  what `plait bench NAME` runs, in which order, and what it compares
report      JSON, table, plot
"""
