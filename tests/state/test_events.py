"""Progress at rest is bounded, private, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

from plait.state.files.storage import LocalFiles
from plait.state.log.events import BEFORE, CURRENT, add_event, events


def test_events_come_back_in_order_and_at_most_twice_the_limit_is_kept(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), sync=False)
    for number in range(200):
        add_event(files, {"epoch": number, "text": "żółć\n" * 5}, limit=2000)
    found = [event["epoch"] for event in events(files)]
    assert found == list(range(found[0], 200))
    assert 10 < len(found) < 100
    assert sum((tmp_path / name).stat().st_size for name in (CURRENT, BEFORE) if (tmp_path / name).exists()) < 4400
    assert {os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)} == {0o600}


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), sync=False)
    add_event(files, {"epoch": 1})
    with open(tmp_path / CURRENT, "ab") as file:
        file.write(b'{"epoch": 2, "ro')
    assert [event["epoch"] for event in events(files)] == [1]


def test_what_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / CURRENT).symlink_to(tmp_path / "elsewhere")
    add_event(LocalFiles(str(tmp_path), sync=False), {"epoch": 1})
    assert not (tmp_path / "elsewhere").exists()
    add_event(LocalFiles(str(tmp_path / "gone"), sync=False), {"epoch": 1})
