"""Five and ten multi-way joins over TPC-H's tables, apart and together (paper 001, Figure 7).

The claim: planned together they have 2.6 times the throughput and less than a third of the state.
"""
