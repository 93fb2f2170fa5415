"""Benchmarks of Plait: `python -m benchmarks` lists them, `python -m benchmarks NAME --help` shows the options of one.

One folder per benchmark.  In each, `benchmark` has `run(out, options, console)` and `report` the tables and plots:

    tpcds     Plait against Spark's stream-stream joins and DuckDB
    tpch      whole SQL queries over streams, against Spark
    orders    the orderers of paper 000 against each other, and a drift of the selectivities
    drivers   the driver policies of paper 003 against each other
    sets      hundreds of queries in one engine, by the generator of paper 004
    ilp       the joint optimiser of many queries on paper 001's random workloads; nothing is executed
    state     state larger than memory: paper 002's Figures 5 to 7, a soak, and other ways of keeping state

By themselves, `python -m benchmarks.NAME`:

    reading        how long registering a query takes on a warm engine, and in how many calls of the JVM
    long_lives     what an epoch and a restart cost after very many epochs

What they share:

    options        the options of the command line
    jobs           runs a function of this package in a process of its own, contestants by turns
    process_tree   runs a command, watches its whole process tree and ends it
    memory_group   limits and reads the memory of a process tree
    sessions       the Spark sessions of the contestants
    epoch_files    input as one Parquet file per table and epoch
    without_spark  runs joins on one key by the engine's own tasks, without Spark
    one_key_join   the same on generated keys, checked against a plain count in every epoch
    report         writes NAME.json, NAME.md and NAME.png
"""
