"""`gpuready plan compare` and `recommend`: several ways to serve one workload, side by side or ranked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from gpuready import catalog
from gpuready.cli import asked, plan_table
from gpuready.cli.refusing import nearest, refused
from gpuready.cli.verb import Call
from gpuready.outcome import Refusal, Result
from gpuready.planning import search
from gpuready.planning.compare import Answer, Candidate, Prices, Rates, Row, compare, impossible, row
from gpuready.planning.compare.prices import price
from gpuready.planning.compare.recommend import Ranking, rank
from gpuready.planning.memory import device
from gpuready.planning.memory.run import GIB
from gpuready.planning.wish import Place, Wish

COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that servers have, and over which models can be split."""
SHARES = (3, 2)
"""A shared GPU is looked at as a third and as a half of one."""
SHOWN = 15
"""Ways that are shown unless all are asked for."""


def ask(wish: Wish, place: Place, alternatives: bool = True) -> Answer:
    """Return the search's best option, or its reasons in one text."""
    found = search.search(wish, place, alternatives)
    return (found.options[0] if found.options else None), " ".join(one.sentence() for one in found.failures)


def ask_quickly(wish: Wish, place: Place) -> Answer:
    """Return the same, without a search where the weights alone are too much, nor for what would do instead.

    Slices cannot be joined.
    """
    weights = wish.model.weight_bytes / GIB
    room = (place.shared_gib or place.device.total_gib) * (1 if ":" in place.device.name else place.count)
    # A format that the engine makes while it loads leaves a quarter of the bits at least.
    if weights / (4 if wish.allow_lossy else 1) > room:
        return None, f"the weights are {weights:.2f} GiB, and {room:.2f} are there."
    return ask(wish, place, alternatives=False)


def place(text: str, count: int) -> Place:
    """Read `[COUNTx]CARD[:PROFILE]`."""
    try:
        own, card, profile = asked.counted_card(text)
    except ValueError as error:
        raise refused("plan.card", f"--gpu = {text!r} is refused", str(error)) from error
    return asked.place(card, own or count, profile)


def _rates(call: Call) -> Rates:
    """Return rates by place; one of a card without a number is of as many as a card of --gpu without one."""
    usual = call.options.get("gpus", 1)
    said: list[asked.Rate] = call.options["rate"] or []
    return {(one.card, one.count or usual) if one.card else None: one.tokens for one in said}


def _priced(call: Call) -> Prices:
    return partial(price, term=call.options["term"])


def _versions(said: Sequence[str]) -> dict[str, str]:
    """Return versions by engine; `*` is for every engine."""
    found: dict[str, str] = {}
    for text in said:
        name, sign, version = text.partition("=")
        if sign and name not in asked.ENGINES:
            fix = nearest(name, asked.ENGINES)
            raise refused("plan.engine", f"--version = {text!r}: no such engine", "", fix)
        found[name if sign else "*"] = version if sign else name
    return found


def _candidates(call: Call) -> Iterator[Candidate | Row]:
    """Yield every combination of what the options name; one that an engine or a card has not, as its row.

    Raises:
        Refusal: when none of them can be asked for.
    """
    said, first = call.options, None
    some = False
    if not said["gpu"]:
        raise refused("plan.card", "no card is named", "", "name several with --gpu, e.g. --gpu t4 --gpu 8xh100")
    versions = _versions(said["version"] or [])
    places = [place(text, said["gpus"]) for text in said["gpu"]]
    plain = asked.asked(said)
    for name, quantization in itertools.product(said["model"] or [None], said["quantization"] or [None]):
        chosen = asked.model(name, said["config"], quantization)
        for where, engine in itertools.product(places, said["engine"] or [None]):
            version = versions.get(engine or "vllm", versions.get("*"))
            try:
                runs = asked.engine(engine, version, where, chosen.facts)
                candidate = Candidate(asked.wish("chat", chosen, runs, plain), where, quantization or "")
            except Refusal as refusal:
                first = first or refusal
                why = " ".join(one.sentence() for one in refusal.failures)
                yield impossible(chosen.id, where, engine or "vllm", version or "", quantization or "", why)
                continue
            some = True
            yield candidate
    if first is not None and not some:
        raise first


def run_compare(call: Call) -> Result:
    """Return a row for everything that the options name."""
    rows = compare(_candidates(call), ask, _priced(call), _rates(call))
    running = [one for one in rows if one.requests is not None]
    wanted = asked.asked(call.options).workload.concurrency
    lines: list[str] = []
    if running:
        lines += [*plan_table.table(running, wanted, call.screen), "", *plan_table.notes(running, call.screen)]
    if refused := plan_table.refusals(rows, call.screen):
        lines += ["", *call.screen.heading("Does not run"), *refused]
    summary = f"{len(running)} of {len(rows)} ways run"
    return Result(summary=summary, page="\n".join(lines).strip("\n"), data={"rows": [one.as_dict() for one in rows]})


def _ladders() -> Iterator[list[Place]]:
    """Yield places of one kind, each list from the smallest on: whole GPUs, MIG slices, parts of a GPU."""
    for card in catalog.load("gpus")["cards"]:
        one = asked.place(card, 1, None)
        yield [replace(one, count=count) for count in COUNTS]
        for profile, slices in device.profiles(card).items():
            yield [replace(asked.place(card, 1, profile), count=count) for count in range(1, slices["count"] + 1)]
        yield [replace(one, shared_gib=one.device.total_gib / parts) for parts in SHARES]


def _climb(
    ladder: Sequence[Place], chosen: asked.Model, quantization: str, call: Call, plain: asked.Asked
) -> list[Row]:
    """Return the rows of a ladder up to the first place that serves everything, for every engine."""
    rows = []
    for engine in call.options["engine"] or asked.ENGINES:
        for where in ladder:
            try:
                runs = asked.engine(engine, None, where, chosen.facts)
            except Refusal:
                break
            candidate = Candidate(asked.wish("chat", chosen, runs, plain), where, quantization)
            rows.append(row(candidate, ask_quickly, _priced(call), _rates(call)))
            if (rows[-1].requests or 0) >= plain.workload.concurrency:
                break
    return rows


def run_recommend(call: Call) -> Result:
    """Return what could serve the workload, best first."""
    said = call.options
    plain = asked.asked(said)
    rows: list[Row] = []
    for quantization in said["quantization"] or [None]:
        chosen = asked.model(said["model"], said["config"], quantization)
        for ladder in _ladders():
            rows += _climb(ladder, chosen, quantization or "", call, plain)
    ranking = rank(rows, plain.workload.concurrency, said["budget"])
    if not ranking.rows:
        raise _nothing(ranking, plain.workload.concurrency, said["budget"])
    first = ranking.rows[0]
    data = {
        "ranked": [one.as_dict() for one in ranking.rows],
        "too_small": [one.as_dict() for one in ranking.too_small],
        "impossible": [one.as_dict() for one in ranking.impossible],
        "too_dear": ranking.too_dear,
        "unpriced": ranking.unpriced,
    }
    return Result(
        summary=f"best of {len(ranking.rows)}: {first.where}, {first.engine} {first.version}, weights {first.weights}",
        page="\n".join(_ranking_page(ranking, plain.workload.concurrency, call)),
        data=data,
    )


def _ranking_page(ranking: Ranking, wanted: int, call: Call) -> list[str]:
    screen, everything = call.screen, call.options["all"]
    shown = ranking.rows if everything else ranking.rows[:SHOWN]
    lines = [*plan_table.table(shown, wanted, screen, numbered=True), "", *plan_table.notes(shown, screen)]
    left = [
        (len(ranking.rows) - len(shown), "more would do; --all shows them"),
        (ranking.too_dear, "would do and cost more than the budget"),
        (ranking.unpriced, "would do and have no known price, so the budget leaves them out"),
    ]
    lines += [line for count, text in left if count for line in screen.paragraph(f"{count} {text}.")]
    if everything and ranking.too_small:
        lines += ["", *screen.heading("Too small"), *plan_table.table(ranking.too_small, wanted, screen)]
    if everything and ranking.impossible:
        lines += ["", *screen.heading("Does not run"), *plan_table.refusals(ranking.impossible, screen)]
    return lines


def _nothing(ranking: Ranking, wanted: int, budget: float | None) -> Refusal:
    if ranking.too_dear or ranking.unpriced:
        what = f"nothing serves {wanted} requests at once for {budget:,.0f} yuan a month"
        why = f"{ranking.too_dear} ways cost more, {ranking.unpriced} have no known price"
        return refused("plan.budget", what, why, "raise the budget, or leave it out to see them")
    what = f"nothing in the catalog serves {wanted} requests at once"
    if not ranking.too_small:
        why = ranking.impossible[0].refusal.rstrip(".") if ranking.impossible else ""
        return refused("plan.nothing", what, why, "choose a smaller model, or --allow-lossy")
    most = ranking.too_small[0]
    why = f"the most is {most.requests}, on {most.where} with {most.engine} {most.version}"
    return refused("plan.nothing", what, why, "ask for fewer requests or shorter ones, or --allow-lossy")
