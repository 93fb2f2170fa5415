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
state       state larger than memory (paper 002's Figures 5 to 7, and a soak); state_cgroup limits a process tree,
            state_run is one run, state_trial watches it, state_limits and state_soak are the parts, state_data the
            soak's input, state_report and state_plot table and plot
"""
