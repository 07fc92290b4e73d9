"""All generated inventories: the wrong ones by kind, and the right ones. The same seed gives the same."""

from __future__ import annotations

import random

from tests.inventories import wrong_declared, wrong_files, wrong_knobs
from tests.inventories.case import Case

SEED = 20261130


def of_one_host(seed: int = SEED) -> list[Case]:
    """Return the cases that are one host's variables; many go as hosts of one inventory."""
    dice = random.Random(seed)  # noqa: S311 - to choose examples
    parts = (
        wrong_declared.types,
        wrong_declared.ranges,
        wrong_declared.keys,
        wrong_declared.contradictions,
        wrong_declared.flags,
        wrong_declared.hostile,
        wrong_declared.templates,
        wrong_knobs.types_and_ranges,
        wrong_knobs.forms,
        wrong_knobs.nested,
        wrong_knobs.names_and_contradictions,
        wrong_files.anchors,
    )
    return [case for part in parts for case in part(dice)]


def of_files(seed: int = SEED) -> list[Case]:
    """Return the cases that break a file or an inventory; each is a run of its own."""
    dice = random.Random(seed)  # noqa: S311 - to choose examples
    parts = (wrong_files.broken, wrong_files.misread, wrong_files.unread, wrong_files.connections)
    return [case for part in parts for case in part(dice)]
