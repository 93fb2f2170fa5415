"""1 TEXT → GRAPH: Catalyst's optimised plan becomes a JoinGraph.

    SQL text → catalyst.py     parse, analyse and optimise over empty stubs of the streams
             → parsed.py       what is not a query over registered streams is refused, before anything is analysed
             → refusals.py     what is not an inner join of streams is refused, on the analysed plan
             → multiway.py     TSC: the tree of binary joins becomes one multi-way join
             → graph_rules.py  RULES below: conjuncts become filters, keys, windows, conditions
             → JoinGraph

`plan_reader.py` (with `PlanReader.java`) reads a plan in one call of the JVM, `tree_json.py` the JSON of a parsed one.
`expressions.py` resolves and prints Catalyst's expressions, `native.py` says which of them a join task evaluates
itself, `windows.py` recognises bounds on event time, `hints.py` and `durations.py` read TTLs, and `residual.py` is
what Spark still has to do to the joined rows.
"""

from plait.sql.graph_rules import RULES

__all__ = ["RULES"]
