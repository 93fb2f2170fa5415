"""Intermediate results that are kept (MIRs): with them every query has the rows that it has without."""

from __future__ import annotations

from hypothesis import given, settings

from tests.random_joins import Case, cases
from tests.random_mirs import check_mirs

SOME = settings(deadline=None, derandomize=True, database=None, max_examples=60)


@SOME
@given(cases(most_aliases=5, shapes=("chain", "tree", "star", "one key", "cycle")))
def test_mirs_come_and_go_and_every_query_equals_the_oracle(case: Case) -> None:
    check_mirs(case)
