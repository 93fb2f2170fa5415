"""State larger than memory.

The claim: Plait gives complete results under limits at which a join in memory dies (paper 002, Figures 5 and 6), at a
time that hardly depends on the limit; and it keeps its pace while the state grows to many times the memory.
"""
