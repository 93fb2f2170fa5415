"""The joint optimisation of many queries on random workloads (paper 001, Figure 9).

The claim: over few relations about half of the probe cost is saved, and plans are found in the paper's time or less.
"""
