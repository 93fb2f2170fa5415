"""The hint STATE_TTL, as far as it needs no Spark: names, lengths, and the spelling of others."""

from __future__ import annotations

import pytest

from plait.errors import QueryError
from plait.sql.catalyst.hints import spelling, ttl_by_alias

STREAMS = {"o": "orders", "x": "lines", "y": "lines", "lines": "orders"}
HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {}),
        ([("o", "1h"), ("x", "30min")], {"o": HOUR, "x": HOUR // 2}),
        # Names are as insensitive to case as they are in Spark.
        ([("O", "1 hour")], {"o": HOUR}),
        # An alias comes before a stream of that name; a stream's name is all its aliases.
        ([("lines", "1h")], {"lines": HOUR}),
        ([("orders", "1h")], {"o": HOUR, "lines": HOUR}),
        # Twice the same is no contradiction.
        ([("o", "1h"), ("orders", "60 minutes")], {"o": HOUR, "lines": HOUR}),
    ],
)
def test_a_hint_names_aliases_or_streams(pairs: list[tuple[str, str]], expected: dict[str, int]) -> None:
    assert ttl_by_alias(pairs, STREAMS) == expected


@pytest.mark.parametrize(
    ("pairs", "code", "words"),
    [
        ([("nobody", "1h")], "TTL_HINT", "nobody"),
        ([("o", "1h"), ("o", "2h")], "TTL_CONFLICT", "3600 s and 7200 s"),
        ([("o", "1h"), ("orders", "2h")], "TTL_CONFLICT", "gives o two TTLs"),
        ([("o", "soon")], "TTL", "'soon' is not a length of time"),
        ([("o", "0d")], "TTL", "not longer than zero"),
        ([("o", "-1d")], "TTL", "'-1d'"),
        ([("o", "1 month")], "TTL", "no fixed length"),
        ([("o", "")], "TTL", "''"),
    ],
)
def test_a_hint_that_makes_no_sense_is_refused(pairs: list[tuple[str, str]], code: str, words: str) -> None:
    with pytest.raises(QueryError) as caught:
        ttl_by_alias(pairs, STREAMS)
    assert caught.value.code == code
    assert words in caught.value.cause
    assert caught.value.remedy


def test_the_spelling_of_flink_is_answered_with_ours() -> None:
    assert "STATE_TTL('alias', '1 day')" in (spelling("SELECT /*+ STATE_TTL('o'='1d', 'l'='12h') */ 1") or "")
    assert spelling("SELECT /*+ BROADCAST(l), state_ttl ( 'o' => '1d') */ 1") is not None
    assert spelling("SELECT /*+ STATE_TTL('o', '1d') */ a.x FROM a WHERE a.y =") is None
    assert spelling("SELECT a.x = 'STATE_TTL(o=1)'") is None
