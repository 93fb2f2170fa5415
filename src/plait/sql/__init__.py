"""1 TEXT → GRAPH: Catalyst's optimised plan becomes a JoinGraph.

    SQL text → catalyst/read_query.py  parse, analyse and optimise over empty stubs of the streams
             → catalyst/allow_list.py  what is not a query over registered streams is refused, before it is analysed
             → catalyst/refusals.py    what is not an inner join of streams is refused, on the analysed plan
             → join/multiway.py        TSC: the tree of binary joins becomes one multi-way join
             → join/graph_rules.py     RULES below: conjuncts become filters, keys, windows, conditions
             → JoinGraph

`catalyst/plan_reader.py` (with `PlanReader.java`) reads a plan in one call of the JVM, `tree_json.py` the JSON of a
parsed one.  In `join/`, `expressions.py` resolves and prints Catalyst's expressions, `task_expressions.py` says which
of them a join task evaluates itself, `windows.py` recognises bounds on event time, and `hints.py` reads TTLs.
`answer/` is what stands around the joins: `residual.py` is what Spark still has to do to the joined rows.
"""

from plait.sql.join.graph_rules import RULES

__all__ = ["RULES"]
