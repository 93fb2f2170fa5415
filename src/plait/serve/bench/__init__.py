"""The benchmark harness behind `plait bench`.

data        generated input: one Parquet file per table and epoch, kept between runs
workloads   the queries
checksum    one order-independent checksum, in Spark's SQL and in DuckDB's
contestants what is measured; each run is a process of its own (`python -m plait.serve.bench.contestants JOB`)
race        starts these processes and watches the memory of their whole tree
wishes      what the command line asked for
benchmarks  the benchmarks by name
tpcds       Plait against Spark and DuckDB; tpcds_report is its JSON, table and plot
orders      the orderers of paper 000 against each other; drift is one part of it
drivers     the driver policies of paper 003 against each other; arrivals is their data, drivers_report table and plot
one_key     runs contestants of a join on one key side by side, each epoch checked against a plain count
"""
