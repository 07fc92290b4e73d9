"""A plan on a terminal: stacked bars, what limits it, and its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuready.cli.screen import Screen
from gpuready.planning.explain import PARTS, Bar, Explanation, of_host, read

_LOOK = {
    # name: ASCII, character of a terminal without colour, colour
    "weights": ("W", "\u2588", "blue"),
    "activation": ("A", "\u2593", "yellow"),
    "non_torch": ("N", "\u259e", "red"),
    "graphs": ("G", "\u2592", "magenta"),
    "kv": ("K", "\u2591", "green"),
    "outside": ("C", "\u259a", "cyan"),
    "others": ("O", "\u2571", "grey"),
    "headroom": (".", "\u00b7", "grey"),
}
_MARK = {True: "kept", False: "not kept", None: "does not apply"}


def page(found: Explanation, screen: Screen, whole: bool) -> str:
    """Return an explanation laid out for a terminal; `whole` also shows steps, rules of thumb and their basis."""
    lines = screen.heading(found.title)
    for bar in found.bars:
        lines += ["", *memory(bar, screen)]
    return "\n".join([*lines, "", *_told(found, screen, whole)])


def host_page(bars: Sequence[Bar], explanations: Sequence[Explanation], screen: Screen, whole: bool) -> str:
    """Return all deployments of a host: the memory of its GPUs, then each deployment."""
    lines: list[str] = []
    for bar in bars:
        lines += [*memory(bar, screen), ""]
    for found in explanations:
        lines += [*screen.heading(f"{found.name}: {found.title}"), "", *_told(found, screen, whole), ""]
    return "\n".join(lines).rstrip("\n")


def of_plan(plan: Mapping[str, Any], screen: Screen) -> str:
    """Return the plan of a host: the memory of its GPUs, then each deployment with its reasons."""
    told = [(read(one["explanation"]), one) for one in plan["deployments"]]
    bars = of_host([(found, [gpu for part in one["replicas"][:1] for gpu in part["gpus"]]) for found, one in told])
    lines: list[str] = []
    for bar in bars:
        lines += [*memory(bar, screen), ""]
    for found, one in told:
        places = "; ".join(_where(part, len(one["replicas"])) for part in one["replicas"])
        lines += [*screen.heading(f"{found.name}: {found.title}"), *bullets([places, *one["explain"][2:]], screen), ""]
    return "\n".join(lines).rstrip("\n")


def _where(part: Mapping[str, Any], replicas: int) -> str:
    gpus = f"slice {part['mig']}" if part.get("mig") else f"GPU {', '.join(map(str, part['gpus']))}"
    node = part.get("numa_node")
    near = f" (NUMA node {node})" if node is not None else ""
    shares = " with others" if part.get("shares") else ""
    which = f"replica {part['index']} " if replicas > 1 else ""
    return f"{which}on {gpus}{shares}{near}"


def _told(found: Explanation, screen: Screen, whole: bool) -> list[str]:
    lines = _capacity(found, screen)
    lines += ["", *screen.heading(f"Settings of {found.settings['engine']} {found.settings['version']}")]
    lines += [f"  {line}" for one in found.flags for line in screen.paragraph(one)] or ["  its own defaults"]
    lines += _list(screen, "Why", found.reasons)
    if whole:
        lines += _list(screen, "One step more", (step.says for step in found.steps))
        told = (f"{rule.rule} ({_MARK[rule.holds]}): {rule.says}." for rule in found.rules)
        lines += _list(screen, "Rules of thumb", told)
        lines += _list(screen, "Where the figures come from", found.basis)
    return lines


def bullets(sentences: Iterable[str], screen: Screen) -> list[str]:
    """Return sentences as a list."""
    return [line for one in sentences for line in screen.paragraph(one, "  - ", "    ")]


def _list(screen: Screen, heading: str, sentences: Iterable[str]) -> list[str]:
    lines = bullets(sentences, screen)
    return ["", *screen.heading(heading), *lines] if lines else []


def memory(bar: Bar, screen: Screen) -> list[str]:
    """Return a bar with its title above it and its parts below."""
    columns = cells([max(0.0, part.gib) for part in bar.parts], screen.width)
    drawn = "".join(
        screen.paint(_character(part.name, screen) * wide, _LOOK[part.name][2])
        for part, wide in zip(bar.parts, columns)  # noqa: B905 - same length
    )
    lines = [screen.plain(bar.title), drawn]
    shared = list(dict.fromkeys(part.owner for part in bar.parts if part.owner))
    for owner in shared:
        own = ", ".join(f"{part.title} {part.gib:.2f}" for part in bar.parts if part.owner == owner and part.gib)
        gib = sum(part.gib for part in bar.parts if part.owner == owner)
        lines += screen.paragraph(f"{owner} {gib:.2f} GiB: {own}", "  ", "    ")
    for name in PARTS:
        gib = bar.gib(name)
        if not gib and name != "headroom":
            continue
        mark = screen.paint(_character(name, screen), _LOOK[name][2])
        title = "missing" if name == "headroom" and gib < 0 else PARTS[name]
        low, high = (sum(getattr(part, end) for part in bar.parts if part.name == name) for end in ("low", "high"))
        band = f"   {low:.2f} to {high:.2f}" if name != "headroom" and round(high - low, 2) > 0 else ""
        lines.append(f"  {mark} {title:18}{abs(gib):9.2f} GiB {abs(gib) / bar.total_gib:6.1%}{band}")
    return lines


def _character(name: str, screen: Screen) -> str:
    plain, drawn, _ = _LOOK[name]
    if not screen.unicode:
        return plain
    return _LOOK["weights"][1] if screen.colour and name != "headroom" else drawn


def cells(amounts: Sequence[float], columns: int) -> list[int]:
    """Divide columns by amounts: what is there at all has one, and together they are all columns."""
    whole = sum(amounts)
    if whole <= 0:
        return [0] * len(amounts)
    exact = [columns * amount / whole for amount in amounts]
    found = [max(1, int(one)) if one > 0 else 0 for one in exact]
    while (spare := columns - sum(found)) != 0:
        # The one that is furthest from its share gives or takes a column.
        order = sorted(range(len(found)), key=lambda at: exact[at] - found[at], reverse=spare > 0)
        at = next(at for at in order if spare > 0 or found[at] > 1)
        found[at] += 1 if spare > 0 else -1
    return found


def _capacity(found: Explanation, screen: Screen) -> list[str]:
    lines = [*screen.heading("Capacity"), *screen.paragraph(found.limit, "  ", "  ")]
    width = max(len(one.title) for one in found.figures)
    for one in found.figures:
        lines += screen.paragraph(f"{one.title:{width}}  {one.text()}", "  ", " " * 4)
    return lines
