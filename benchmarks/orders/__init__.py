"""The orderers of paper 000 against each other.

The claim: dp_pick does the least work from every initial order, and recovers from a drift within two periods.
"""
