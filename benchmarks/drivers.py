"""Driver policies of paper 003 against each other: the same as `plait bench drivers`.

The claim: results are the same under every policy, and the default policy does the least work.
"""

import sys

from plait.serve.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "drivers"]
    main()
