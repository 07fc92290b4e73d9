"""Cures of an out-of-memory that a server recorded: taken as bounds of the next plan, where a deployment declares it.

A record counts for the declaration under which the engine failed, and for no other: who changes the deployment has
answered it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuready.planning.search.candidates import length
from gpuready.planning.wish import Wish

FIELD = "apply_cures"
BOUNDS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""Settings that a cure may lower."""


def declaration(declared: Mapping[str, Any]) -> str:
    """Return a digest of what an operator declared of a deployment; that cures are to be taken does not change it."""
    kept = {key: value for key, value in declared.items() if key != FIELD}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def recorded(declared: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record that counts for a deployment and is to be taken; None where there is none."""
    record = (facts.get("cures") or {}).get(declared["name"])
    if not declared.get(FIELD) or not record or record.get("declaration") != declaration(declared):
        return None
    return dict(record)


def changes(wish: Wish) -> bool:
    """Say whether a wish has something of a cure."""
    return bool(wish.more_headroom_gib) or any(name in BOUNDS for name in wish.cured)


def taken(wish: Wish, record: Mapping[str, Any] | None) -> Wish:
    """Return the wish with the bounds of a record; what the operator set himself stays as he set it."""
    if record is None:
        return wish
    told = f"after an out-of-memory of release {record['release']} ({record['kind']})"
    settings, cured = dict(wish.settings), dict(wish.cured)
    for name in BOUNDS:
        bound = record.get("settings", {}).get(name)
        if bound is None or (name == "max_model_len" and name not in settings and length(wish) <= bound):
            continue
        if name in settings:
            cured[f"{name} is set"] = f"cure not taken {told}: {name} at most {bound:,}, because flags set it"
        else:
            settings[name] = int(bound)
            cured[name] = f"cure taken {told}"
    room = float(record.get("headroom_gib") or 0.0)
    if room and ("memory_fraction" in settings or "kv_bytes" in settings):
        cured["headroom"] = f"cure not taken {told}: {room:.2f} GiB more of headroom, because flags set the memory"
    elif room:
        cured["headroom"] = f"cure taken {told}: {room:.2f} GiB more of headroom"
    more = room if cured.get("headroom", "").startswith("cure taken") else 0.0
    return replace(wish, settings=settings, cured=cured, more_headroom_gib=more)
