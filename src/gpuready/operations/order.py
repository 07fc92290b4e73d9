"""In which order replicas start that share a GPU: in a run, and at boot by what their units wait for.

Ready is one token, and a unit is active only then. So `After=` has the next one start when the memory of the one before
is taken. It asks for an end of that start, not for its success: one that fails keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuready.outcome import Change, Failure, Refusal
from gpuready.serving import units
from gpuready.serving.files import make_folder, write_text
from gpuready.serving.layout import Layout

_HEAD = "# Written by gpuready: on a GPU that they share, these replicas start first.\n[Unit]\n"


def in_order(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Return replicas so that each comes after those that it starts after, else in the order in which they are given.

    `after` are the replicas before each, e.g. `{"chat.0": [], "code.0": ["chat.0"]}`.

    Raises:
        Refusal: where they wait for one another in a circle, or for one that there is not.
    """
    left = list(after)
    ordered: list[str] = []
    while left:
        following = next((one for one in left if set(after[one]) <= set(ordered)), None)
        if following is None:
            raise Refusal(Failure("release.order", *_unplaced(left, after)))
        left.remove(following)
        ordered.append(following)
    return ordered


def _unplaced(left: Sequence[str], after: Mapping[str, Sequence[str]]) -> tuple[str, str, str]:
    for one in left:
        for other in after[one]:
            if other not in after:
                return f"{one} starts after {other}", "there is no such replica", "plan again"
    return f"{', '.join(left)} start after one another", "none of them could be the first", "plan again"


def drop_ins(layout: Layout, after: Mapping[str, Sequence[str]]) -> dict[Path, str]:
    """Return the drop-in of every replica that starts after others.

    It names all that are before it, also by way of others: one of those may not be started at all.
    """
    before: dict[str, list[str]] = {}
    texts = {}
    for one in in_order(after):
        reached = [name for other in after[one] for name in (*before[other], other)]
        before[one] = list(dict.fromkeys(reached))
        if reached:
            texts[layout.order(one)] = f"{_HEAD}After={' '.join(map(units.unit_of, before[one]))}\n"
    return texts


def bring(layout: Layout, after: Mapping[str, Sequence[str]], check: bool) -> list[Change]:
    """Have the units wait for one another as planned; return the differences."""
    wanted = drop_ins(layout, after)
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
