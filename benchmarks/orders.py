"""Probe orders: the orderers of paper 000 against each other: the same as `plait bench orders`.

The claim: dp_pick does the least work from every initial order, and recovers from a drift within two periods.
"""

import sys

from plait.serve.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "orders"]
    main()
