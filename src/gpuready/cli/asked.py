"""Reads what the command line asks the planner for: model, card, engine, workload and settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready import catalog
from gpuready.cli.asked_settings import MOST_TOKENS, of_engine, settings
from gpuready.cli.reading import called, mapping_of, object_of
from gpuready.cli.refusing import nearest, refused
from gpuready.cli.verb import number, whole
from gpuready.outcome import Failure, Refusal
from gpuready.planning import support
from gpuready.planning.memory import device, versions
from gpuready.planning.memory.run import Draft, Lora, Run
from gpuready.planning.model import known
from gpuready.planning.model.config import UnknownModel
from gpuready.planning.model.facts import ModelFacts
from gpuready.planning.wish import Lengths, Place, Wish, Workload

ENGINES = ("vllm", "sglang", "tensorrt_llm")
FORMATS = ("awq", "gptq", "fp8", "w8a8", "w4a16", "bnb-4bit", "mxfp4", "nvfp4")
TASKS = ("generate", "embed", "rerank", "classify")
WORKLOAD = "1024/4096:256/1024@64"
"""What is planned for where nothing is said: chats of one to four pages."""
_LONGEST = 200
"""Characters of a name that a sentence repeats."""
MOST_REQUESTS = 100_000
_FORM = "PROMPT:OUTPUT@REQUESTS, lengths in tokens as P50 or P50/P99, e.g. 1024:512@64 or 800/16000:300/1500@64"


# ---------------------------------------------------------------------------------------------- workload


def _lengths(text: str) -> Lengths:
    half, _, most = text.partition("/")
    read = whole(1, MOST_TOKENS)
    try:
        found = Lengths(read(half), read(most or half))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; the form is {_FORM}") from error
    if found.p99 < found.p50:
        raise ValueError(f"{text!r}: p99 is below p50")
    return found


_KEYS = ("prompt_tokens", "output_tokens", "concurrency", "preemption")


def workload_text(text: str) -> Workload:
    """Read a workload from its short form."""
    parts = re.fullmatch(r"([^:@]+):([^:@]+)@([^:@]+)", text)
    if parts is None:
        raise ValueError(f"the form is {_FORM}, or a YAML or JSON file")
    try:
        requests = whole(1, MOST_REQUESTS)(parts[3])
    except ValueError as error:
        raise ValueError(f"{parts[3]!r}: {error}; the form is {_FORM}") from error
    return Workload(_lengths(parts[1]), _lengths(parts[2]), requests)


def workload(text: str) -> Workload:
    """Return a workload from its short form, or from a file of the form that an inventory has."""
    if Path(text).suffix not in (".json", ".yaml", ".yml"):
        try:
            return workload_text(text)
        except ValueError as error:
            raise refused("plan.workload", f"--workload = {text!r} is refused", str(error)) from error
    given = mapping_of(text)
    # A file may hold a whole deployment, or the workload alone.
    found = given.get("workload", given)
    unknown = sorted(map(str, set(found) - set(_KEYS))) if isinstance(found, Mapping) else []
    if unknown:
        raise refused(
            "plan.workload", f"{text}, {unknown[0]}: no such key of a workload", "", nearest(unknown[0], _KEYS)
        )
    try:
        return _workload_of(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        fix = "e.g. {prompt_tokens: {p50: 800, p99: 16000}, output_tokens: {p50: 300, p99: 1500}, concurrency: 64}"
        raise refused("plan.workload", f"{text} holds no workload", why, fix) from error


def _workload_of(given: Mapping[str, Any]) -> Workload:
    def tokens(key: str) -> Lengths:
        one = given[key]
        return _lengths(f"{one['p50']}/{one['p99']}" if isinstance(one, Mapping) else f"{one}")

    preemption = number(0.0001, 0.5)(str(given.get("preemption", 0.01)))
    return Workload(
        tokens("prompt_tokens"), tokens("output_tokens"), whole(1, MOST_REQUESTS)(str(given["concurrency"])), preemption
    )


# ------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Model:
    """A model that is asked for, with its sizes."""

    id: str
    facts: ModelFacts
    source: str


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.suffix == ".json" or name.startswith((".", "/", "~")) or _is_folder(path)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False  # too long a name, or one that no file can have


def _short(name: str | None) -> str:
    text = str(name)
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}..."


def model(name: str | None, config: str | None, quantization: str | None, option: str = "--model") -> Model:
    """Return a model by its id in the catalog, by its folder, or by its config.json alone; `option` names it."""
    if name is None and config is None:
        raise refused("plan.model", "no model is named", "", "name one with --model or --config")
    path = config or (name if name and _is_path(name) else None)
    try:
        if path is not None:
            return _model_of_path(name if config and name else "", Path(path).expanduser(), quantization)
        found = known.find(str(name))
        if found is None:
            near = nearest(str(name), model_ids(), most=4)
            fix = (
                f"{near} Else give its config.json with --config" if near.endswith("?") else f"{near}; or use --config"
            )
            raise refused("plan.unknown_model", f"{option} = {_short(name)} is not in the catalog", "", fix)
        return Model(found.id, _sizes(found, quantization), found.source)
    except ModuleNotFoundError as error:
        what = f"{option} = {_short(name)}: the catalog of models is on the controller only"
        raise refused("plan.no_catalog", what, "", "give the model's config.json with --config") from error
    except UnknownModel as error:
        what = f"{called(path or str(name))} cannot be planned"
        raise refused("plan.unknown_model", what, str(error).rstrip(".")) from error


def _sizes(found: known.Known, quantization: str | None, weights: bool = False) -> ModelFacts:
    """Return the sizes of a model, in another format than its own where one is asked for; not against its weights."""
    if quantization is None:
        return known.sizes(found)
    try:
        wanted = known.in_format(found, quantization)
    except UnknownModel as error:
        raise refused("plan.format", f"--quantization = {quantization!r} is refused", str(error)) from error
    if wanted is not found and weights:
        what = f"--quantization = {quantization!r} contradicts the weights beside {found.source}"
        raise refused("plan.format", what, "they are in another format", "leave it out, or give --config alone")
    return known.sizes(wanted)


def _model_of_path(name: str, path: Path, quantization: str | None) -> Model:
    file = path / "config.json" if _is_folder(path) else path
    read = object_of(str(file))
    weights = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    size = _header_bytes(weights) if weights else None
    said = read.get("_name_or_path")
    own = path.resolve().name if path.is_dir() else (path.resolve().parent.name if file.name == "config.json" else "")
    shown = name or (str(said) if isinstance(said, str) and said else own or file.stem)
    found = known.Known(shown, read, size, str(file))
    return Model(shown, _sizes(found, quantization, bool(weights)), str(file))


def _header_bytes(weights: Sequence[Path]) -> int:
    from gpuready.serving.models import BadModel, read_shard

    try:
        return sum(total["bytes"] for path in weights for total in read_shard(path).totals().values())
    except BadModel as bad:
        raise Refusal(bad.failure) from bad


# ---------------------------------------------------------------------------------------------- features


def draft(text: str) -> Draft:
    """Read `TOKENS`, or `TOKENS:MODEL` with a draft model of its own."""
    count, _, name = text.partition(":")
    try:
        tokens = whole(1, 64)(count)
    except ValueError as error:
        why = f"{error}; the form is TOKENS or TOKENS:MODEL, e.g. 3 or 5:Qwen/Qwen2.5-0.5B-Instruct"
        raise refused("plan.draft", f"--draft = {_short(text)} is refused", why) from error
    if not name:
        return Draft(tokens)
    found = model(name, None, None, "--draft").facts
    return Draft(tokens, found.weight_bytes, math.ceil(found.kv_bytes_per_token()))


_CARD = re.compile(r"(?:(\d{1,2})x)?(.+?)(?::([1-9]g\.\d{1,3}gb\S*))?")


def counted_card(text: str) -> tuple[int | None, str, str | None]:
    """Read `[COUNTx]CARD[:PROFILE]`: how many, of which card, and slices of which profile; None where it is not said.

    Raises:
        ValueError: when it is not of that form.
    """
    parts = _CARD.fullmatch(text)
    if parts is None or parts[1] == "0":
        raise ValueError("the form is CARD, 8xCARD or CARD:PROFILE")
    return int(parts[1]) if parts[1] else None, parts[2], parts[3]


@dataclass(frozen=True)
class Rate:
    """Output tokens per second of so many cards or slices together; without a card, of every place."""

    tokens: float
    card: str | None = None
    count: int | None = None


def rate(text: str) -> Rate:
    """Read `TOKENS` or `[COUNTx]CARD[:PROFILE]=TOKENS`."""
    place, sign, tokens = text.rpartition("=")
    amount = number(0.001, 1e9)(tokens)
    if not sign:
        return Rate(amount)
    count, card, profile = counted_card(place)
    found = device.device(card, profile)
    if found is None:
        raise ValueError(device.refusal(card, profile))
    return Rate(amount, found.name, count)


# ------------------------------------------------------------------------------------------- the options


def cards() -> list[str]:
    """Return the keys of the catalog's cards, also of those that are known for planning alone."""
    return list(device.cards())


def model_ids() -> list[str]:
    """Return the ids of the catalog's models; nothing on a server, whose catalog holds none."""
    try:
        return [entry["id"] for entry in catalog.load("models")["models"]]
    except (ModuleNotFoundError, OSError):
        return []


def profiles() -> list[str]:
    """Return the MIG profiles of all cards."""
    return list(dict.fromkeys(profile for card in cards() for profile in device.profiles(card)))


# --------------------------------------------------------------------------------------------- place, wish


def place(card: str | None, count: int, profile: str | None) -> Place:
    """Return the GPUs or MIG slices that are asked for."""
    if card is None:
        raise refused("plan.card", "no card is named", "", "name one with --gpu, e.g. --gpu h100-80gb-sxm")
    found = device.device(card, profile)
    if found is None:
        raise refused("plan.unknown_card", device.refusal(card, profile))
    return Place(found, count)


def engine(asked: str | None, version: str | None, where: Place, facts: ModelFacts) -> tuple[str, str]:
    """Return engine and version: as asked, else of the newest stack that the card runs, else its newest there.

    Raises:
        Refusal: when no release of the engine runs on the card, or nothing is known of the version.
    """
    name = asked or "vllm"
    chosen = version or _stack_version(name, where) or support.newest(name, where.device)
    if chosen is None:
        said = support.objections(facts, where.device, Run(name, "in any release"))
        raise Refusal([Failure(f"plan.{one.code}", one.what, one.why, one.nearest) for one in said])
    try:
        versions.resolve(name, chosen)
    except versions.Unresolved as error:
        raise refused("plan.version", "no constants of this release are known", str(error).rstrip(".")) from error
    return name, chosen


def _stack_version(name: str, where: Place) -> str | None:
    for stack in catalog.load("stacks")["stacks"].values():
        entry = stack["engines"].get(name)
        if entry and not stack["simulated_only"] and not support.on_card(where.device, Run(name, entry["version"])):
            return str(entry["version"])
    return None


@dataclass(frozen=True)
class Asked:
    """What the options of a verb say of one deployment, beside model, card and engine."""

    workload: Workload
    task: str | None
    """None: what the model is made for."""
    allow_lossy: bool
    headroom_gib: float | None
    settings: dict[str, int | float | str]
    draft: Draft | None
    lora: Lora | None
    kv_offload_gib: float


def asked(options: Mapping[str, Any]) -> Asked:
    """Read the options that all verbs of the planner share."""
    return Asked(
        workload(options["workload"] or WORKLOAD),
        options["task"],
        options["allow_lossy"],
        options["headroom"],
        settings(options["set"] or [], options["context"]),
        draft(options["draft"]) if options["draft"] else None,
        options["lora"],
        options["kv_offload"] or 0.0,
    )


def wish(name: str, chosen: Model, runs: tuple[str, str], said: Asked) -> Wish:
    """Return one deployment that is asked for."""
    of_engine(runs, said.settings)
    if said.draft is not None and not said.draft.weight_bytes and not chosen.facts.draft_layers:
        what = f"--draft: the checkpoint of {chosen.id} brings no layers that draft"
        raise refused("plan.draft", what, "", "name a draft model, TOKENS:MODEL, or leave it out")
    return Wish(
        name=name,
        model_id=chosen.id,
        model=chosen.facts,
        engine=runs[0],
        version=runs[1],
        workload=said.workload,
        task=said.task or chosen.facts.task,
        allow_lossy=said.allow_lossy,
        headroom_gib=said.headroom_gib,
        settings=said.settings,
        draft=said.draft,
        lora=said.lora,
        kv_offload_gib=said.kv_offload_gib,
    )
