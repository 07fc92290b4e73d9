"""In which order replicas start that share a GPU: in a run, and at boot by what their units wait for.

Ready is one token, and a unit is active only then. So `After=` has the next one start when the memory of the one before
is taken. It asks for an end of that start, not for its success: one that fails keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuready.outcome import Change, Failure, Refusal
from gpuready.serving import units
from gpuready.serving.files import make_folder, write_text
from gpuready.serving.layout import Layout

_HEAD = "# Written by gpuready: on a GPU that they share, these replicas start first.\n[Unit]\n"


def in_order(deployments: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the deployments of a plan so that each comes after those in its `start_after`, else as they are.

    Raises:
        Refusal: where they wait for one another in a circle, or for one that there is not.
    """
    names = {one["name"] for one in deployments}
    left = list(deployments)
    ordered: list[Mapping[str, Any]] = []
    while left:
        placed = {one["name"] for one in ordered}
        following = next((one for one in left if set(one.get("start_after", ())) <= placed), None)
        if following is None:
            raise Refusal(Failure("release.order", *_unplaced(left, names)))
        left.remove(following)
        ordered.append(following)
    return ordered


def _unplaced(left: Sequence[Mapping[str, Any]], names: set[str]) -> tuple[str, str, str]:
    for one in left:
        for other in one["start_after"]:
            if other not in names:
                return f"{one['name']} starts after {other}", "there is no such deployment", "plan again"
    listed = ", ".join(str(one["name"]) for one in left)
    return f"{listed} start after one another", "none of them could be the first", "plan again"


def drop_ins(layout: Layout, deployments: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the drop-in of every replica that starts after others on its GPUs."""
    parts_of = {one["name"]: one["replicas"] for one in deployments}
    texts = {}
    for one in deployments:
        for part in one["replicas"]:
            before = [
                units.unit_of(f"{name}.{other['index']}")
                for name in one.get("start_after", ())
                for other in parts_of[name]
                if set(other["gpus"]) & set(part["gpus"])
            ]
            if before:
                text = f"{_HEAD}After={' '.join(before)}\n"
                texts[layout.order(f"{one['name']}.{part['index']}")] = text
    return texts


def bring(layout: Layout, deployments: Sequence[Mapping[str, Any]], check: bool) -> list[Change]:
    """Have the units wait for one another as planned; return the differences."""
    wanted = drop_ins(layout, deployments)
    there = {path: path.read_text(encoding="utf-8", errors="replace") for path in layout.orders()}
    changes = [
        Change(str(path), there.get(path, ""), wanted.get(path, ""))
        for path in sorted(wanted.keys() | there.keys())
        if there.get(path) != wanted.get(path)
    ]
    if changes and not check:
        for path in there.keys() - wanted.keys():
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # an operator's own drop-ins stay
        for path, text in wanted.items():
            make_folder(path.parent)
            write_text(path, text)
        units.systemctl("daemon-reload")
    return changes
