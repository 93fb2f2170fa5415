"""State larger than memory: the same as `plait bench state`.

The claim: Plait gives complete results under limits at which a join in memory dies (paper 002, Figures 5 and 6), at a
time that hardly depends on the limit; and it keeps its pace while the state grows to many times the memory.
"""

import sys

from plait.serve.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "state"]
    main()
