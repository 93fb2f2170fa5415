r"""What can be typed at the prompt of `plait sql`: text becomes statements, statements become what they ask for.

SQL itself is left to Spark; here only its outside is known: quotes, comments, and where a statement ends.

>>> split("SELECT ';' -- not here;\nFROM t; SHOW QUERIES; SEL")
(["SELECT ';' -- not here;\nFROM t", 'SHOW QUERIES'], ' SEL')
>>> parse("explain stages SELECT 1")
Statement(kind='explain', text='SELECT 1', stages=True, name='', since=None, replaces=False)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plait.errors import QueryError

HELP = """\
SELECT … ;                 runs over what the streams hold now (or, \\follow, after every epoch until Ctrl-C);
                           a SELECT over the pipeline's queries reads what they have committed so far
EXPLAIN [STAGES] SELECT …; the plan; with STAGES, how it was converted to multi-way joins and what is maintained
EXPLAIN [STAGES] [name];   the same of a query of the pipeline, or of all
SHOW QUERIES               the pipeline's queries: mode, state, epochs, rows
SHOW STREAMS, SHOW TABLES  what can be read
SHOW PROGRESS              the last epochs of the pipeline
DESCRIBE name              columns of a stream, table or query
CREATE QUERY name AS …     adds a query to the pipeline that runs; DROP QUERY name ends one
START [EVERY '1 second']   runs the pipeline's queries in the background, on the pipeline's checkpoint
WAIT                       waits until that run has read its sources (or Ctrl-C)
STOP                       stops it; START continues
\\follow, \\once             whether a SELECT over streams goes on until Ctrl-C
\\format table|json|csv     how rows are printed
\\rows N                    how many rows a table shows
HELP, \\h                   this
QUIT, \\q, Ctrl-D           leaves
"""
HELP_ATTACHED = """\
SELECT … ;                 reads what queries have committed so far
CREATE [OR REPLACE] QUERY name [SINCE 'now' | 'state' | 'new'] AS SELECT … ;
                           adds a query to the engine, and waits until it is part of it
DROP QUERY name ;          ends a query
EXPLAIN SELECT … ;         what adding it would do: floors, stores to be built, probes, expected cost
EXPLAIN [STAGES] [name];   the plan of a query that lives there, or of all
SHOW QUERIES               status, rows, state, errors
SHOW STREAMS, SHOW TABLES  what queries can read
SHOW PROGRESS              the last epochs
DESCRIBE name              columns of a stream, table or query
\\format table|json|csv     how rows are printed
\\rows N                    how many rows a table shows
HELP, \\h                   this
QUIT, \\q, Ctrl-D           leaves
"""
KEYWORDS = (
    *("SELECT", "FROM", "WHERE", "GROUP", "BY", "HAVING", "ORDER", "LIMIT", "JOIN", "LEFT", "SEMI", "ANTI", "ON"),
    *("USING", "AS", "AND", "OR", "NOT", "NULL", "IN", "EXISTS", "BETWEEN", "LIKE", "CASE", "WHEN", "THEN", "ELSE"),
    *("END", "DISTINCT", "UNION", "ALL", "WITH", "COUNT", "SUM", "AVG", "MIN", "MAX", "INTERVAL", "EXPLAIN", "STAGES"),
    *("CREATE", "REPLACE", "DROP", "QUERY", "SINCE"),
    *("SHOW", "QUERIES", "STREAMS", "TABLES", "PROGRESS", "DESCRIBE", "START", "EVERY", "STOP", "WAIT", "HELP", "QUIT"),
)
FORMATS = ("table", "json", "csv")
SHOWN = ("QUERIES", "STREAMS", "TABLES", "PROGRESS")
_BARE = {"WAIT": "wait", "STOP": "stop", "HELP": "help", "QUIT": "quit", "EXIT": "quit"}
_SLASH = {"q": "quit", "quit": "quit", "h": "help", "?": "help", "help": "help", "follow": "follow", "once": "once"}
_SELECTS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "(")
_ENDS_ITSELF = re.compile(
    r"\\.*|wait|stop|help|quit|exit|start(\s+every\s+('[^']*'|\"[^\"]*\"))?|show\s+\w+|desc(ribe)?\s+(\w+|`[^`]+`)",
    re.IGNORECASE,
)
_NAME = re.compile(r"\w+|`[^`]+`")
_CREATE = re.compile(
    r"\s*CREATE\s+(OR\s+REPLACE\s+)?QUERY\s+(\w+)(?:\s+SINCE\s+'(\w+)')?\s+AS\b(.*)", re.IGNORECASE | re.DOTALL
)
_DROP = re.compile(r"QUERY\s+(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Statement:
    """What is asked for: `kind` is select, explain, show, describe, create, drop, start, stop, help, quit, follow, …"""

    kind: str
    text: str = ""
    stages: bool = False
    name: str = ""
    """Of the query that is created or dropped."""
    since: str | None = None
    replaces: bool = False


def statements(lines: Iterable[str]) -> Iterator[str]:
    """Cuts lines into statements, each as soon as it is complete; at the end, what is left is one too.

    >>> list(statements(["SHOW QUERIES", "SELECT 1; SELECT", "2 -- two", "; STOP"]))
    ['SHOW QUERIES', 'SELECT 1', 'SELECT\\n2 -- two', 'STOP']
    """
    text = ""
    for line in lines:
        found, text = split(f"{text}{line}\n")
        yield from found
        if "\n" not in text.strip() and ends_itself(text):
            yield text.strip()
            text = ""
    if significant(text):
        yield text.strip()


def split(text: str) -> tuple[list[str], str]:
    """The statements that a `;` ends, and what follows the last one, unless that is comments only."""
    found: list[str] = []
    begin = at = 0
    while at < len(text):
        if text[at] == ";":
            if significant(text[begin:at]):
                found.append(text[begin:at].strip())
            begin = at = at + 1
            continue
        end = _token_end(text, at)
        if end is None:
            return found, text[begin:]
        at = end
    return found, text[begin:] if significant(text[begin:]) else ""


def significant(text: str) -> str:
    """A statement without comments around and inside it; empty if there is nothing else.

    >>> significant("-- a comment\\n/* and one more */ SHOW QUERIES")
    'SHOW QUERIES'
    """
    kept: list[str] = []
    at = 0
    while at < len(text):
        end = _token_end(text, at) or len(text)
        kept.append(" " if text.startswith(("--", "/*"), at) else text[at:end])
        at = end
    return "".join(kept).strip()


def ends_itself(line: str) -> bool:
    """Whether a line is a statement of the prompt's own, which needs no `;`.

    >>> [ends_itself(line) for line in ("show queries", "SELECT 1", r"\\q", "START EVERY '2 seconds'")]
    [True, False, True, True]
    """
    return _ENDS_ITSELF.fullmatch(significant(line).rstrip("; \t")) is not None


def parse(text: str) -> Statement:
    """What a statement asks for, or a QueryError that says what can be asked for."""
    plain = significant(text).rstrip("; \t\n")
    if plain.startswith("\\"):
        return _slash(plain[1:])
    first = re.match(r"\w+|\S", plain)
    word, rest = (first.group().upper(), plain[first.end() :].strip()) if first else ("", "")
    if word in _SELECTS:
        return Statement("select", text.strip())
    if word == "EXPLAIN":
        return _explain(text, rest)
    if word in _BARE and not rest:
        return Statement(_BARE[word])
    if word == "SHOW":
        return _show(rest)
    if word in ("DESCRIBE", "DESC") and _NAME.fullmatch(rest):
        return Statement("describe", rest.strip("`"))
    if word == "CREATE":
        return _create(text)
    if word == "DROP" and (dropped := _DROP.fullmatch(rest)) is not None:
        return Statement("drop", name=dropped[1])
    if word == "START":
        return _start(rest)
    near = difflib.get_close_matches(word, ("SELECT", "EXPLAIN", "SHOW", "DESCRIBE", "CREATE", "START", *_BARE), n=1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != word else ""
    raise QueryError(
        "STATEMENT",
        f"{_shortened(plain)!r} is not a statement of the prompt{hint}",
        "write a SELECT, or see HELP; streams and tables are declared in the pipeline file",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _explain(text: str, rest: str) -> Statement:
    stages = re.match(r"STAGES\b\s*", rest, re.IGNORECASE)
    rest = rest[stages.end() :] if stages else rest
    if not rest or _NAME.fullmatch(rest):
        return Statement("explain", rest.strip("`"), bool(stages))
    if not re.match(r"(SELECT|WITH|FROM|VALUES|TABLE)\b|\(", rest, re.IGNORECASE):
        raise QueryError("STATEMENT", "EXPLAIN needs a SELECT or the name of a query", "write EXPLAIN SELECT …")
    # The text as it was written: hints are comments too.
    written = re.search(r"EXPLAIN(?:\s+STAGES\b)?", text, re.IGNORECASE)
    return Statement("explain", text[written.end() if written else 0 :].strip(), bool(stages))


def _create(text: str) -> Statement:
    """The query's text as it was written: hints are comments too."""
    begin = re.search(r"\bCREATE\b", text, re.IGNORECASE)
    found = _CREATE.fullmatch(text[begin.start() :] if begin else text)
    if found is None or not significant(found[4]):
        raise QueryError(
            "STATEMENT",
            f"{_shortened(significant(text))!r} is not understood",
            "write CREATE [OR REPLACE] QUERY name [SINCE 'state'] AS SELECT …",
        )
    since = found[3].lower() if found[3] else None
    return Statement("create", found[4].strip(), name=found[2], since=since, replaces=found[1] is not None)


def _show(what: str) -> Statement:
    if what.upper() not in SHOWN:
        near = difflib.get_close_matches(what.upper(), SHOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise QueryError("STATEMENT", f"there is no SHOW {what}{hint}", f"use one of: {', '.join(SHOWN)}")
    return Statement("show", what.lower())


def _start(rest: str) -> Statement:
    if not rest:
        return Statement("start")
    every = re.fullmatch(r"EVERY\s+('[^']+'|\"[^\"]+\")", rest, re.IGNORECASE)
    if every is None:
        raise QueryError("STATEMENT", f"START {rest} is not understood", "write START, or START EVERY '1 second'")
    return Statement("start", every.group(1)[1:-1])


def _slash(rest: str) -> Statement:
    word, *arguments = rest.split() or [""]
    argument = " ".join(arguments).lower()
    if word in _SLASH and not argument:
        return Statement(_SLASH[word])
    if word == "format" and argument in FORMATS:
        return Statement("format", argument)
    if word == "rows" and argument.isdecimal() and int(argument) > 0:
        return Statement("rows", argument)
    known = r"\follow, \once, \format table|json|csv, \rows N, \h, \q"
    raise QueryError("STATEMENT", f"\\{rest} is not understood", f"use one of: {known}")


def _token_end(text: str, at: int) -> int | None:
    """Where the token at `at` ends: a quoted text and a comment are one.  None if it does not end."""
    character = text[at]
    if text.startswith("--", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text.startswith("/*", at):
        return _comment_end(text, at)
    if character not in "'\"`":
        return at + 1
    # r'…' has no escapes, nor have names in back-quotes.
    raw = character == "`" or (text[at - 1 : at] in ("r", "R") and not text[at - 2 : at - 1].isalnum())
    end = at + 1
    while end < len(text):
        if text[end] == "\\" and not raw:
            end += 2
        elif text[end] == character:
            return end + 1
        else:
            end += 1
    return None


def _comment_end(text: str, at: int) -> int | None:
    """Spark's comments nest."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", text[at:]):
        depth += 1 if mark.group() == "/*" else -1
        if depth == 0:
            return at + mark.end()
    return None
