"""A checkpoint seen from outside: sound ones are called so, and every kind of damage is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.config import Config
from plait.errors import CheckpointError, PlaitError
from plait.runtime.task import upkeep
from plait.serve.cli import app
from plait.share.planner import Planner
from plait.state.log.inspect import Inspection
from plait.state.log.manifest import Manifest
from plait.state.segments import block_segment as deep
from plait.testing import LocalEngine
from tests.share.streams import joined, rows, streams
from tests.state.rows import put_old_catalog

STAR = joined("a.k = b.k", "b.k = c.k")
EPOCHS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six epochs; its catalog is what an engine would have recorded."""
    path = tmp_path_factory.mktemp("inspect") / "checkpoint"
    planner = Planner({"q": STAR}, streams("abc"), Config(sync=False))
    with LocalEngine(path, planner.plan, Config(tasks=2, sync=False, fan_in=3), planner=planner) as engine:
        stores = {s.id: {"columns": [[c.name, c.type] for c in s.columns]} for s in planner.plan.stores}
        put_old_catalog(engine.checkpoint, {"queries": {"q": "SELECT"}, "streams": {}, "stores": stores, "filters": {}})
        for epoch in range(EPOCHS):
            engine.run({name: rows(*range(epoch, 60 + epoch)) for name in "abc"})
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


def codes(path: Path) -> set[str]:
    return {finding.code for finding in Inspection(str(path)).findings()}


def segment(path: Path) -> Path:
    info = Inspection(str(path)).live().segments["a[k]"][0]
    return path / "state" / info.path


def rewrite(path: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    """The newest manifest with its live segments of a[k] changed, and a right checksum."""
    file = sorted((path / "log").glob("*.json"))[-1]
    manifest = Manifest.decode(file.read_bytes())
    live = Inspection(str(path)).live().segments
    infos = [info for of in live.values() for info in of]
    changed = [type(i).from_json(change(i.to_json()) if i.store == "a[k]" else i.to_json()) for i in infos]  # type: ignore[arg-type]
    file.write_bytes(Manifest(**{**vars(manifest), "snapshot": tuple(changed)}).encode())


def test_a_sound_checkpoint_has_nothing_to_find_and_its_figures_are_those_of_the_rows(made: Path) -> None:
    assert codes(made) == set()
    report = Inspection(str(made)).report()
    assert report.epoch == EPOCHS - 1
    by_name = {store.store: store for store in report.stores}
    assert set(by_name) == {"a[k]", "b[k]", "c[k]"}
    assert all(store.rows == 60 * EPOCHS for store in by_name.values())
    assert all(sum(store.tiers.values()) <= store.segments for store in by_name.values())
    assert by_name["a[k]"].epochs == (0, EPOCHS - 1) or by_name["a[k]"].epochs is not None
    assert 1 <= by_name["a[k]"].runs <= by_name["a[k]"].segments
    # Merged rows were written twice.
    assert report.write_amplification > 1.1
    assert report.space_amplification >= 1
    assert json.loads(report.to_json())["amplification"]["write"] == report.write_amplification


def flip_byte(path: Path) -> None:
    file = segment(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(path: Path) -> None:
    file = segment(path)
    file.write_bytes(file.read_bytes()[:-8])


def damage_manifest(path: Path) -> None:
    file = sorted((path / "log").glob("*.json"))[-1]
    file.write_bytes(file.read_bytes().replace(b'"epoch"', b'"hcope"', 1))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip_byte, "SEGMENT_CORRUPT"),
    "a cut segment": (cut, "SEGMENT_TRUNCATED"),
    "a segment that is gone": (lambda p: segment(p).unlink(), "SEGMENT_MISSING"),
    "a damaged manifest": (damage_manifest, "MANIFEST_CORRUPT"),
    "a wrong number of rows": (lambda p: rewrite(p, lambda i: {**i, "rows": 1}), "SEGMENT_CLAIM"),
    "a wrong number of keys": (lambda p: rewrite(p, lambda i: {**i, "keys": 1}), "SEGMENT_CLAIM"),
    "wrong key groups": (lambda p: rewrite(p, lambda i: {**i, "hi_group": 9999}), "SEGMENT_CLAIM"),
    "a store nobody knows": (lambda p: rewrite(p, lambda i: {**i, "store": "x[k]"}), "STORE_UNKNOWN"),
    "a damaged catalog": (lambda p: (p / "catalog.json").write_text("{}"), "CATALOG_CORRUPT"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(copy: Path, name: str) -> None:
    do, code = DAMAGE[name]
    do(copy)
    assert code in codes(copy)
    found = CliRunner().invoke(app, ["state", "verify", str(copy)])
    assert found.exit_code == 1
    assert code in found.output


def test_one_segment_named_twice_would_double_its_rows(copy: Path) -> None:
    file = sorted((copy / "log").glob("*.json"))[-1]
    manifest = Manifest.decode(file.read_bytes())
    infos = [i for of in Inspection(str(copy)).live().segments.values() for i in of]
    file.write_bytes(Manifest(**{**vars(manifest), "snapshot": (*infos, infos[0])}).encode())
    assert "SEGMENT_TWICE" in codes(copy)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose merges are under way: deep and flat segments, some of them trimmed."""
    path = tmp_path_factory.mktemp("halfway") / "checkpoint"
    planner = Planner({"q": STAR}, streams("abc"), Config(sync=False, replan_epochs=0))
    config = Config(tasks=1, sync=False, fan_in=2, merge_share=0.01, compress_above="0")
    with pytest.MonkeyPatch.context() as patch, LocalEngine(path, planner.plan, config) as engine:
        patch.setattr("plait.runtime.driver.prepare.IDLE_MERGE_SECONDS", 0.0)
        patch.setattr(upkeep, "PART_BYTES", 3000)
        patch.setattr(deep, "BLOCK_BYTES", 500)
        stores = {s.id: {"columns": [[c.name, c.type] for c in s.columns]} for s in planner.plan.stores}
        put_old_catalog(engine.checkpoint, {"queries": {"q": "SELECT"}, "streams": {}, "stores": stores, "filters": {}})
        for epoch in range(5):
            engine.run({name: rows(*range(epoch * 300, 300 + epoch * 300)) for name in "abc"})
    return path


def test_a_checkpoint_with_merges_under_way_is_sound_too(halfway: Path) -> None:
    assert codes(halfway) == set()
    infos = [i for of in Inspection(str(halfway)).live().segments.values() for i in of]
    assert any(i.deep for i in infos)
    assert any(i.first for i in infos)
    report = Inspection(str(halfway)).report()
    assert all(store.rows == 300 * 5 for store in report.stores)
    assert sum(store.merging for store in report.stores) > 0
    assert sum(store.deep_bytes for store in report.stores) > 0
    # What was trimmed was not written again.
    on_disk = {p.relative_to(report.state_dir) for p in Path(report.state_dir).rglob("*") if p.is_file()}
    assert on_disk >= {Path(i.path) for i in infos}
    assert 1 < report.write_amplification < 3
    sound = CliRunner().invoke(app, ["state", "verify", str(halfway)])
    assert (sound.exit_code, sound.output[:6]) == (0, "Sound:")
    assert CliRunner().invoke(app, ["state", "ls", str(halfway)]).exit_code == 0


def test_a_bit_that_flips_in_any_block_of_a_deep_segment_is_found(halfway: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(halfway, tmp_path / "checkpoint"))
    infos = [i for of in Inspection(str(path)).live().segments.values() for i in of]
    info = next(i for i in infos if i.deep)
    file = path / "state" / info.path
    good = file.read_bytes()
    for at in (100, info.meta // 2, info.meta - 20, info.meta + 10, len(good) - 4):
        bad = bytearray(good)
        bad[at] ^= 4
        file.write_bytes(bad)
        assert codes(path) == {"SEGMENT_CORRUPT"}
    file.write_bytes(good)
    assert codes(path) == set()


def test_two_segments_of_one_run_that_overlap_are_found(copy: Path) -> None:
    rewrite(copy, lambda i: {**i, "run": "same"})
    assert "RUN_OVERLAP" in codes(copy)


def test_the_command_line_lists_stores_and_segments(made: Path) -> None:
    listed = CliRunner().invoke(app, ["state", "ls", str(made), "--json"])
    assert listed.exit_code == 0
    assert [s["store"] for s in json.loads(listed.output)["stores"]] == ["a[k]", "b[k]", "c[k]"]
    table = CliRunner().invoke(app, ["state", "ls", str(made)])
    assert "space amplification" in table.output
    assert "a[k]" in table.output, "brackets are no markup"
    assert "b[k]" in CliRunner().invoke(app, ["state", "show", str(made), "b[k]"]).output
    shown = CliRunner().invoke(app, ["state", "show", str(made), "b[k]", "--json"])
    assert sum(info["rows"] for info in json.loads(shown.output)) == 60 * EPOCHS
    sound = CliRunner().invoke(app, ["state", "verify", str(made)])
    assert (sound.exit_code, sound.output[:6]) == (0, "Sound:")


def test_what_is_not_there_is_said(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Inspection(str(tmp_path))
    assert caught.value.code == "NOT_A_CHECKPOINT"
    unknown = CliRunner().invoke(app, ["state", "show", str(made), "z[k]"])
    assert isinstance(unknown.exception, PlaitError)
    assert "a[k]" in unknown.exception.remedy


def test_looking_needs_no_lock(tmp_path: Path) -> None:
    planner = Planner({"q": STAR}, streams("abc"), Config(sync=False))
    with LocalEngine(tmp_path, planner.plan, Config(sync=False), planner=planner) as engine:
        engine.run({name: rows(1, 2, 3) for name in "abc"})
        assert Inspection(str(tmp_path)).report().stores[0].rows == 3
