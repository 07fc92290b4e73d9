"""What a release says of its replica's unit (its file `unit.conf`) comes into force with the release.

systemd reads units before a separate /var is mounted, so a link into a release would be missed at boot; the text is
copied. On trial it lies under /run, by a name that sorts after the recorded one's and wins, and a reboot takes it away.
The copy follows the link of the record: whoever finds the two apart, a run or the next start, puts it right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from gpuready.outcome import Change
from gpuready.serving import units
from gpuready.serving.files import make_folder, write_text
from gpuready.serving.layout import Layout, split_replica
from gpuready.serving.releases import Store

FILE = "unit.conf"
RECORDED = "gpuready-release.conf"
TRIED = "gpuready-trial.conf"


def differing(layout: Layout, replica: str) -> list[Change]:
    """Return how the drop-in in force differs from that of the recorded release; nothing where it does not."""
    path = _recorded(layout, replica)
    now, wanted = _text(path), _wanted(layout, replica)
    return [] if now == wanted else [Change(str(path), now, wanted)]


def follow(layout: Layout, replica: str) -> bool:
    """Have the unit follow the recorded release; say whether anything changed."""
    tried = _tried(layout, replica).exists()
    _put(_tried(layout, replica), "")
    found = differing(layout, replica)
    if found:
        _put(_recorded(layout, replica), found[0].after)
    if found or tried:
        units.systemctl("daemon-reload")
    return bool(found)


def try_on(layout: Layout, replica: str, files: Mapping[str, str]) -> None:
    """Have the next start use the drop-in of a release that is on trial; systemd has still to read it."""
    _put(_tried(layout, replica), files.get(FILE, ""))


def remove(layout: Layout, replica: str) -> None:
    """Take every drop-in of a replica's releases away."""
    there = [path for path in (_recorded(layout, replica), _tried(layout, replica)) if path.exists()]
    for path in there:
        _put(path, "")
    if there:
        units.systemctl("daemon-reload")


def _recorded(layout: Layout, replica: str) -> Path:
    return layout.order(replica).with_name(RECORDED)


def _tried(layout: Layout, replica: str) -> Path:
    return layout.root / "run/systemd/system" / layout.order(replica).parent.name / TRIED


def _wanted(layout: Layout, replica: str) -> str:
    name, index = split_replica(replica)
    store = Store(layout, name)
    number = store.current(index)
    return _text(store.folder(number) / FILE) if number else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _put(path: Path, text: str) -> None:
    """Write a drop-in, or take it away where there is no text; an operator's own beside it stay."""
    if text:
        make_folder(path.parent)
        write_text(path, text)
    elif path.exists():
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()
