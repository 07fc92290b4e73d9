"""The store of releases: whole or not at all, never changed, links switched in one step."""

from __future__ import annotations

import errno
import grp
import os
import re
from pathlib import Path

import pytest

from gpuready.serving.files import link, make_folder, read_json, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import KEPT, Store, loose, replicas_on_disk


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Layout(tmp_path, engine_group="no-such-group"), "chat")


def test_a_release_is_found_again_by_its_content(store: Store) -> None:
    first = store.add({"serve.yaml": "a"})
    second = store.add({"serve.yaml": "b"})
    assert (first, second) == (1, 2)
    assert store.find({"serve.yaml": "a"}) == 1
    assert store.find({"serve.yaml": "c"}) is None


def test_a_half_written_release_is_never_taken_for_whole(store: Store) -> None:
    building = store.layout.releases("chat") / ".1.new"
    building.mkdir(parents=True)
    (building / "serve.yaml").write_text("half")
    assert store.numbers() == []
    assert store.add({"serve.yaml": "whole", "plan.json": "{}"}) == 1
    assert store.files(1) == {"plan.json": "{}", "serve.yaml": "whole"}


def test_what_a_killed_run_left_half_written_goes(store: Store, tmp_path: Path) -> None:
    number = store.add({"serve.yaml": "a"})
    half = store.layout.releases("chat") / ".2.new"
    half.mkdir()
    (half / "serve.yaml").write_text("half")
    store.point(0, number)
    halves = [
        store.layout.current("chat", 0).with_name(".current.new"),
        store.layout.releases("chat") / f"{number}/.verified.json.new",
    ]
    halves[0].symlink_to(f"../../../releases/chat/{number}")
    halves[1].write_text("half")
    store.prune()
    assert not any(os.path.lexists(one) for one in (half, *halves))
    assert store.current(0) == number
    assert store.numbers() == [number]
    (tmp_path / ".plan.json.new").write_text("half")
    write_text(tmp_path / "plan.json", "whole")
    assert (tmp_path / "plan.json").read_text() == "whole"
    assert not (tmp_path / ".plan.json.new").exists()


def test_a_full_disk_is_said_with_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/plan.json'"):
        write_text(tmp_path / "plan.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_proof_is_not_part_of_the_content(store: Store) -> None:
    number = store.add({"serve.yaml": "a"})
    assert not store.verified(number)
    store.mark_verified(number, 0, {"gpu_uuids": ["GPU-a"]})
    store.mark_verified(number, 1, {"gpu_uuids": ["GPU-b"]})
    assert store.verified(number)
    assert (store.gpu_uuids(number, 0), store.gpu_uuids(number, 1)) == (["GPU-a"], ["GPU-b"])
    assert store.gpu_uuids(number, 2) is None
    assert store.find({"serve.yaml": "a"}) == number


def test_replica_points_to_its_release(store: Store) -> None:
    store.add({"serve.yaml": "a"})
    store.point(0, 1)
    assert store.current(0) == 1
    assert (store.layout.current("chat", 0) / "serve.yaml").read_text() == "a"
    assert replicas_on_disk(store.layout) == {"chat.0"}
    store.unpoint(0)
    assert store.current(0) is None
    assert store.numbers() == [1]


def test_link_to_a_release_that_is_gone_counts_as_none(store: Store) -> None:
    store.add({"serve.yaml": "a"})
    store.point(0, 1)
    store.point(0, 7)
    assert store.current(0) is None


def test_proof_of_an_earlier_version_counts_but_names_no_gpus(store: Store) -> None:
    number = store.add({"serve.yaml": "a"})
    (store.folder(number) / "verified.json").write_text('{"seconds_to_first_token": 1.0}')
    assert store.verified(number)
    assert store.proof(number, 0) is None


def test_old_releases_go_but_not_one_in_use_nor_the_newest_proved_one(store: Store) -> None:
    for number in range(KEPT + 4):
        store.add({"serve.yaml": str(number)})
    store.point(0, 1)
    store.mark_verified(1, 0, {})
    store.mark_verified(3, 0, {})
    store.prune()
    assert store.numbers() == [1, 3, *range(5, KEPT + 5)]


def test_the_engines_group_may_read_a_release(tmp_path: Path) -> None:
    # Any group of the test's own does; a server's is gpuready-engine.
    own = grp.getgrgid(os.getgid()).gr_name
    layout = Layout(tmp_path, engine_group=own)
    store = Store(layout, "chat")
    number = store.add({"serve.yaml": "a"})
    assert layout.engine_gid == os.getgid()
    assert not [path for path, _, _ in loose(layout) if "releases" in path.parts]
    path = store.folder(number) / "serve.yaml"
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (os.getgid(), 0o640)


def test_damaged_json_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert read_json(path) is None
    path.write_text('{"a": ')
    assert read_json(path) is None
    path.write_text("[1]")
    assert read_json(path) is None


def test_write_replaces_in_one_step_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_text(path, "a", 0o600)
    write_text(path, "b", 0o600)
    assert path.read_text() == "b"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


def test_nothing_is_written_through_a_link_that_waits(tmp_path: Path) -> None:
    # The folder of a running replica belongs to the engine's user, who knows the name that root writes next.
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / f".ready.json.{os.getpid()}.new").symlink_to(victim)
    write_text(tmp_path / "ready.json", "x")
    assert (victim.read_text(), (tmp_path / "ready.json").read_text()) == ("whole", "x")


def test_modes_hold_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        make_folder(tmp_path / "a/b", 0o750)
        write_text(tmp_path / "a/b/c", "x")
    finally:
        os.umask(former)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c")]
    assert modes == [0o755, 0o750, 0o644]


def test_link_is_replaced(tmp_path: Path) -> None:
    link(tmp_path / "current", "1")
    link(tmp_path / "current", "2")
    assert (tmp_path / "current").readlink() == Path("2")


def test_replica_names() -> None:
    assert split_replica("chat-long.12") == ("chat-long", 12)
    for name in ("chat", "chat.", ".0", "../chat.0", "/chat.0", "a b.0", "chat.\u00b2", "chat.-1", "chat.0\n"):
        with pytest.raises(ValueError, match=re.escape(name)):
            split_replica(name)
