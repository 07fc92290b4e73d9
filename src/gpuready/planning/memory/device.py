"""Finds a card, or a MIG slice of one, by the names under which people and programs write it."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any

from gpuready import catalog
from gpuready.planning.memory.run import Device

_NOISE = re.compile(
    r"\b(nvidia|amd|geforce|tesla|quadro|instinct|generation|gpus?|card|graphics|accelerator|tensor|core|edition|server"
    r"|blackwell|hopper|ampere|turing|volta|lovelace|hbm\d?e?|gddr\dx?|oam|vf)\b"
)
_COUNT = re.compile(r"^\s*\d+\s*[x*\u00d7]\s*|[\s-]+[x*\u00d7]\s*\d+\s*$", re.IGNORECASE)
_PARENTHESES = re.compile(r"\([^()]*\)")
_MEMORY = re.compile(r"\b(\d+)[\s_-]*gi?b?\b")
_LONGEST = 100


def cards() -> Mapping[str, Mapping[str, Any]]:
    """Return all cards of the catalog by key: those that gpuready sets up, and those known by their memory only."""
    page = catalog.load("gpus")
    return {**page["cards"], **page["known_by_memory"]}


def key(name: str) -> str | None:
    """Return the catalog's key of a card by its key, an alias, or a name as people and logs write it.

    None where no card has that name, or cards of different memory have it (A100).
    """
    text = _COUNT.sub("", name[:_LONGEST].casefold())
    for variant in (text, _PARENTHESES.sub(" ", text)):
        words = _words(variant)
        for form in (words, frozenset(f"{word}gb" if _is_size(word) else word for word in words)):
            if form in _names():
                return _names()[form]
    return None


def device(name: str, mig: str | None = None) -> Device | None:
    """Return a card, or with `mig` one of its slices (3g.40gb); the profile may also stand behind a colon in the name.

    None where there is no such card or slice; `refusal` then says why.
    """
    name, _, behind = name.partition(":")
    found = key(name)
    if found is None:
        return None
    card = cards()[found]
    whole = Device(
        name=found,
        total_gib=float(card["usable_gib"]),
        compute=float(card["compute"]),
        nvlink="nvlink_gb_s" in card and card.get("nvlink") != "bridge",
        unified=bool(card.get("unified")),
        board_mib=card.get("board_mib"),
        vendor=card.get("vendor", "nvidia"),
    )
    profile = mig or behind
    return _slice(whole, profile) if profile else whole


def shown(name: str) -> str:
    """Return the name of a card, or of a slice of it, for people; a card that the catalog lacks keeps its own."""
    card, _, profile = name.partition(":")
    title = str(cards().get(card, {}).get("title", card)).removeprefix("NVIDIA ")
    return f"{profile} of {title}" if profile else title


def profiles(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the MIG profiles of a card by name, each with memory_mib, slices, sm, size and count; none: no MIG."""
    found = key(name.partition(":")[0])
    table = cards()[found].get("mig") if found else None
    known: Mapping[str, Mapping[str, Any]] = catalog.load("gpus")["mig"][table]["profiles"] if table else {}
    return known


def nearest(name: str) -> tuple[str, ...]:
    """Return the keys of the cards that may be meant: those with all of the words, else the one spelled most alike."""
    words = _words(name[:_LONGEST].casefold())
    meant = {found for form, found in _names().items() if words and words <= form}
    if meant:
        return tuple(sorted(meant))
    spelled = {re.sub(r"[^a-z0-9]", "", one.casefold()): found for found, one in _spelled()}
    close = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name[:_LONGEST].casefold()), spelled, n=1, cutoff=0.5)
    return (spelled[close[0]],) if close else ()


def refusal(name: str, mig: str | None = None) -> str:
    """Return in one sentence why `device` finds nothing; empty where it finds something."""
    if device(name, mig) is not None:
        return ""
    name, _, behind = name.partition(":")
    found = key(name)
    if found is None:
        meant = nearest(name)
        if len(meant) > 1:
            return f"{name[:_LONGEST]!r} is more than one card: {', '.join(meant)}; name one"
        return f"no card is known as {name[:_LONGEST]!r}" + (f"; the nearest is {meant[0]}" if meant else "")
    profile = (mig or behind)[:_LONGEST]
    title = cards()[found]["title"]
    known = profiles(found)
    if not known:
        return f"{title} cannot be divided by MIG, so there is no {profile!r}; give it whole"
    alike = difflib.get_close_matches(profile.casefold(), known, n=1, cutoff=0.0)
    return f"{title} has no MIG profile {profile!r}; it has {', '.join(known)}, and {alike[0]} is the nearest"


def _slice(whole: Device, profile: str) -> Device | None:
    known = profiles(whole.name)
    name = re.sub(r"^mig[\s:-]*|[+-].*$", "", profile.strip().casefold())
    if name not in known:
        return None
    most = max(known.values(), key=lambda one: float(one["size"]))
    return Device(
        name=f"{whole.name}:{name}",
        total_gib=known[name]["memory_mib"] / 1024,
        compute=whole.compute,
        nvlink=False,
        vendor=whole.vendor,
        share=known[name]["sm"] / most["sm"],
    )


def _words(text: str) -> frozenset[str]:
    text = _MEMORY.sub(r" \1gb ", re.sub(r"[^a-z0-9.]+", " ", text))
    text = re.sub(r"\b(rtx|pro|gtx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    return frozenset(_NOISE.sub(" ", text).split())


def _is_size(word: str) -> bool:
    return word.isdecimal() and len(word) <= 3


def _spelled() -> list[tuple[str, str]]:
    return [
        (found, name.casefold())
        for found, card in cards().items()
        for name in (found, card["title"], *card["aliases"], *card.get("nvml_names", ()))
    ]


@functools.cache
def _names() -> Mapping[frozenset[str], str]:
    return {_words(name): found for found, name in reversed(_spelled())}
