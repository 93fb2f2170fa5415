"""Plait against Spark's own stream-stream joins on the papers' TPC-DS query: the same as `plait bench tpcds`.

The claim: several times faster than Spark's faster variant, with equal results, at a cost per epoch that grows no
faster than the logarithm of the state.  The harness is `plait.serve.bench`; `python benchmarks/tpcds.py --help` lists
the options.
"""

import sys

from plait.serve.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "tpcds"]
    main()
