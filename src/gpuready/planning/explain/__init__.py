"""Explains one way to run a deployment: where every GiB goes, what limits it, and what one more step would cost or win.

Plain data and sentences; terminal, SVG, HTML and the stored plan of a host show the same `Explanation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuready.planning.explain import rules, spelling, steps
from gpuready.planning.explain.rules import Rule
from gpuready.planning.explain.steps import Step
from gpuready.planning.memory import device
from gpuready.planning.memory.run import Estimate, Range
from gpuready.planning.wish import Option

PARTS = {
    "weights": "weights",
    "activation": "activations",
    "non_torch": "outside PyTorch",
    "graphs": "CUDA graphs",
    "kv": "KV cache",
    "outside": "context",
    "others": "other deployments",
    "headroom": "headroom",
}
"""What the memory of a GPU is divided into, in the order of a bar, with what people call it."""

_MEANING = {
    "weights": "the model itself",
    "activation": "the most that a forward pass and the sampler need at once",
    "non_torch": "buffers of NCCL, cuBLAS and attention that PyTorch does not count",
    "graphs": "recorded decode steps",
    "kv": "what is kept of requests in flight, and of prefixes that may come again",
    "outside": "CUDA context and what else the engine does not count",
    "others": "what other deployments of this GPU may take",
    "headroom": "nobody's: room for what grows",
}


@dataclass(frozen=True)
class Part:
    """One part of a GPU's memory, in GiB with two decimals; `low` and `high` are the band of the estimate."""

    name: str
    """A key of `PARTS`."""
    gib: float
    low: float
    high: float
    what: str
    owner: str = ""
    """The deployment whose it is, where several share the GPU."""

    @property
    def title(self) -> str:
        """Return what people call it."""
        return PARTS[self.name]


@dataclass(frozen=True)
class Bar:
    """The memory of one GPU of a kind; the parts add up to it. A negative headroom is what is missing."""

    title: str
    total_gib: float
    parts: tuple[Part, ...]

    def gib(self, name: str) -> float:
        """Return a part's GiB over all deployments; 0 where there is none."""
        return round(sum(part.gib for part in self.parts if part.name == name), 2)


@dataclass(frozen=True)
class Figure:
    """One figure of the plan, with its band where it has one."""

    name: str
    title: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    def text(self) -> str:
        """Return it with its unit and its band."""

        def shown(value: float) -> str:
            return f"{value:.2f}" if self.unit == "GiB" else count(value)

        band = ""
        if self.low is not None and self.high is not None and shown(self.low) != shown(self.high):
            band = f" ({shown(self.low)} to {shown(self.high)})"
        unit = self.unit.removesuffix("s") if self.value == 1 else self.unit
        return f"{shown(self.value)} {unit}".rstrip() + band


@dataclass(frozen=True)
class Explanation:
    """Everything that can be said of one option."""

    name: str
    """The deployment's."""
    title: str
    bars: tuple[Bar, ...]
    figures: tuple[Figure, ...]
    settings: Mapping[str, Any]
    """The engine's settings by the names of `Run`; None: the engine's own default."""
    flags: tuple[str, ...]
    """The same as the engine's release spells them, e.g. --max-model-len 17664; not what is its default."""
    limit: str
    """What limits it, in one sentence."""
    reasons: tuple[str, ...]
    steps: tuple[Step, ...]
    rules: tuple[Rule, ...]
    basis: tuple[str, ...]
    """Where the figures come from and how sure they are."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, which `read` takes."""
        return asdict(self)

    def figure(self, name: str) -> Figure:
        """Return a figure by its name."""
        return next(figure for figure in self.figures if figure.name == name)

    def decided(self) -> dict[str, Any]:
        """Return the settings without those that are the engine's own default, and without splits over one GPU."""
        return spelling.decided(self.settings)

    def sentences(self) -> list[str]:
        """Return what an operator should know of the plan, in a few lines."""
        sums = [
            f"{bar.title}: " + " + ".join(f"{part.title} {part.gib:.2f}" for part in bar.parts if part.gib)
            for bar in self.bars
        ]
        held = self.figure("kv_tokens")
        return [
            self.title,
            *(f"{line} = {bar.total_gib:.2f} GiB" for line, bar in zip(sums, self.bars)),  # noqa: B905 - same length
            f"KV cache: {count(held.value)} tokens ({count(held.low or 0)} to {count(held.high or 0)}), "
            f"{count(self.figure('bytes_per_token').value)} bytes for one token on each GPU",
            self.limit,
            *self.reasons,
        ]


def explain(option: Option) -> Explanation:
    """Explain one option of the search."""
    drawn = bar(option)
    return Explanation(
        name=option.wish.name,
        title=title(option),
        bars=(drawn,),
        figures=_figures(option),
        settings=spelling.settings(option.run),
        flags=spelling.flags(option.run),
        limit=_limit(option),
        reasons=(*option.reasons, *(f"may change answers: {one}" for one in option.lossy)),
        steps=steps.steps(option),
        rules=rules.compare(option, drawn.gib("headroom")),
        basis=_basis(option),
    )


def count(value: float) -> str:
    """Return a whole number with its thousands apart."""
    return f"{int(value):,}"


def title(option: Option) -> str:
    """Return the option in one line: model, card, engine."""
    run, place = option.run, option.place
    split = [f"{label}{size}" for label, size in (("TP", run.tp), ("PP", run.pp), ("DP", run.dp)) if size > 1]
    copies = f", {option.replicas} replicas" if option.replicas > 1 else ""
    layout = f" ({' '.join(split)}{copies})" if split else copies
    card = device.shown(place.device.name)
    return f"{option.wish.model_id}{_format(option)} on {place.count} x {card}{layout}, {run.engine} {run.version}"


def _format(option: Option) -> str:
    """Return what the weights are in, where it is not 16 bits."""
    known = option.wish.model.quantization
    if option.run.quantization:
        return f" in {option.run.quantization}, made while loading,"
    return f" in {known.weight_bits} bits ({known.method})" if known else ""


def bar(option: Option) -> Bar:
    """Return where the memory of the fullest GPU goes; the parts add up to the card, to the hundredth of a GiB."""
    found, place = option.estimate, option.place
    known = {
        "weights": found.weights,
        "activation": found.activation,
        "non_torch": found.non_torch,
        "graphs": found.graphs,
        "kv": Range(max(0.0, found.kv.value), max(0.0, found.kv.low), max(0.0, found.kv.high)),
        "outside": _context(found),
    }
    if place.shared_gib is not None:
        known["others"] = Range.exact(max(0.0, place.device.total_gib - place.shared_gib))
    parts = [
        Part(name, round(one.value, 2), round(one.low, 2), round(one.high, 2), _MEANING[name])
        for name, one in known.items()
    ]
    total = round(place.device.total_gib, 2)
    rest = round(total - sum(part.gib for part in parts), 2)
    parts.append(Part("headroom", rest, rest, rest, _MEANING["headroom"]))
    return Bar(_bar_title(option, total), total, tuple(parts))


def _context(found: Estimate) -> Range:
    """Return what is used outside the engine's count, without graphs, which have a part of their own."""
    if found.graphs_counted:
        return found.outside
    return Range(
        max(0.0, found.outside.value - found.graphs.value),
        max(0.0, found.outside.low - found.graphs.low),
        max(0.0, found.outside.high - found.graphs.high),
    )


def _bar_title(option: Option, total: float) -> str:
    gpus = option.place.count
    noun = "slice" if ":" in option.place.device.name else "GPU"
    if option.run.pp > 1:
        which = f"the fullest of {gpus} {noun}s"
    else:
        which = f"each of {gpus} {noun}s" if gpus > 1 else f"the {noun}"
    return f"{which}, {total:.2f} GiB"


def _figures(option: Option) -> tuple[Figure, ...]:
    found = option.estimate
    workload = option.wish.workload
    return (
        Figure("requests", "requests at once", option.concurrency, ""),
        Figure("possible", "requests that the cache holds", option.possible, ""),
        Figure("wanted", "requests wanted", workload.concurrency, ""),
        Figure(
            "kv_tokens",
            "KV cache of a replica",
            int(found.kv_tokens.value),
            "tokens",
            int(found.kv_tokens.low),
            int(found.kv_tokens.high),
        ),
        Figure("kv_gib", "KV cache of a GPU", found.kv.value, "GiB", found.kv.low, found.kv.high),
        Figure("bytes_per_token", "a token, on a GPU", found.bytes_per_token, "bytes"),
        Figure("block_tokens", "a block", found.block_tokens, "tokens"),
        Figure("request_gib", "the longest request, on a GPU", found.request_gib, "GiB"),
        Figure("budget_gib", "the engine's budget of a GPU", found.budget_gib, "GiB"),
    )


def _limit(option: Option) -> str:
    served, wanted = option.concurrency, option.wish.workload.concurrency
    told = f"{served} of {wanted} wanted requests at once are served"
    chance = f"{option.wish.workload.preemption:.0%}"
    length = count(option.run.max_model_len or option.wish.model.context_tokens)
    every = f"all {wanted} wanted requests at once are" if wanted > 1 else "the one wanted request at a time is"
    if option.binding == "wanted" and not option.estimate.bytes_per_token:
        return f"Nothing limits it: {every} served, and nothing is kept of a request."
    said = {
        "wanted": f"Nothing limits it: {every} served, and the KV cache would hold {option.possible}.",
        "kv": f"The KV cache limits it: {told}, and in {chance} of the busiest time at most it is too small.",
        "max_num_seqs": f"max_num_seqs limits it: {told}, though the KV cache would hold {option.possible}.",
        "max_num_batched_tokens": f"max_num_batched_tokens limits it: {told}, though the KV cache would hold "
        f"{option.possible}: {option.wish.engine} takes no more requests at once than tokens of a step.",
        "length": f"The longest request limits it: {told}, because one request may take {length} tokens.",
        "weights": f"The weights limit it: {told}, because {option.estimate.weights.value:.2f} of "
        f"{option.estimate.total_gib:.2f} GiB are taken before the first request.",
        "host_ram": f"The host's memory limits it: {told}.",
    }
    return said.get(option.binding, f"{option.binding} limits it: {told}.")


def _basis(option: Option) -> tuple[str, ...]:
    found, model = option.estimate, option.wish.model
    tokens = found.kv_tokens
    spread = max(tokens.high - tokens.value, tokens.value - tokens.low) / tokens.value if tokens.value else 0.0
    sizes = "the safetensors headers" if model.weights_from == "headers" else "config.json, computed"
    sure = f"nine of ten measurements are expected within {spread:.1%} of the tokens"
    if option.run.kv_bytes is not None:
        sure = "the KV cache's bytes are a setting, its tokens follow from them"
    return (
        f"Sizes of the model: {sizes}; kind: {model.family}.",
        f"Constants: {found.constants}; {sure}.",
        *(f"Assumed: {one}." for one in model.assumptions),
        *(f"{note.rstrip('.')}." for note in found.notes),
    )


def together(bars: Sequence[tuple[str, Bar]], heading: str) -> Bar:
    """Return one bar for a GPU that several deployments share, each given with its own bar.

    Each bar counts the others' memory as theirs; here it is broken up, and the headroom is what nobody takes.
    """
    parts: list[Part] = []
    for owner, one in bars:
        own = [part for part in one.parts if part.name not in ("others", "headroom")]
        parts += [Part(part.name, part.gib, part.low, part.high, part.what, owner) for part in own]
    total = bars[0][1].total_gib
    rest = round(total - sum(part.gib for part in parts), 2)
    return Bar(heading, total, (*parts, Part("headroom", rest, rest, rest, _MEANING["headroom"])))


def of_host(found: Sequence[tuple[Explanation, Sequence[Any]]]) -> tuple[Bar, ...]:
    """Return the bars of all deployments of a host, each given with its GPUs or slices.

    Deployments that share a GPU stand in one bar; the others have theirs, with their name.
    """
    groups: dict[Any, list[Explanation]] = {}
    for one, gpus in found:
        shared = any(bar.gib("others") for bar in one.bars) and gpus
        groups.setdefault(("GPU", gpus[0]) if shared else one.name, []).append(one)
    bars: list[Bar] = []
    for key, group in groups.items():
        if len(group) > 1:
            total = group[0].bars[0].total_gib
            bars.append(together([(one.name, one.bars[0]) for one in group], f"GPU {key[1]}, shared, {total:.2f} GiB"))
        else:
            bars += [Bar(f"{group[0].name}: {bar.title}", bar.total_gib, bar.parts) for bar in group[0].bars]
    return tuple(bars)


def read(data: Mapping[str, Any]) -> Explanation:
    """Return an explanation from the plain data of `as_dict`, as a stored plan holds it.

    Raises:
        KeyError, TypeError: when it is not of that form.
    """
    return Explanation(
        name=str(data["name"]),
        title=str(data["title"]),
        bars=tuple(
            Bar(str(one["title"]), float(one["total_gib"]), tuple(Part(**part) for part in one["parts"]))
            for one in data["bars"]
        ),
        figures=tuple(Figure(**one) for one in data["figures"]),
        settings=dict(data["settings"]),
        flags=tuple(map(str, data["flags"])),
        limit=str(data["limit"]),
        reasons=tuple(map(str, data["reasons"])),
        steps=tuple(Step(**one) for one in data["steps"]),
        rules=tuple(Rule(**one) for one in data["rules"]),
        basis=tuple(map(str, data["basis"])),
    )
