"""Models on disk: read and judged from config.json and the headers of the weights; never loaded.

A model that is half copied, truncated or not a model is refused here, before a running service is touched.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure, Refusal
from gpuready.planning.model import headers
from gpuready.serving.models.places import Folder, Place
from gpuready.serving.models.shards import COPY, BadModel, Shard, json_object, shard_of, unreadable

STORE = Path("/srv/models")
ENGINE_USER = "gpuready-engine"
_NOBODY = 65534
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
    ("tiktoken.model",),
)


PICKLES = (".bin", ".pt", ".pth")
_OTHER = (*PICKLES, ".gguf", ".h5", ".msgpack", ".onnx")


def _object(place: Place, name: str, fix: str = COPY) -> dict[str, Any]:
    where = place.where(name)
    try:
        return json_object(where, place.start(name, place.size(name)))
    except FileNotFoundError:
        raise BadModel("model.missing_file", f"{where} is missing", "", fix) from None
    except OSError as error:
        raise unreadable(where, error) from error


def weight_names(place: Place, pickle: bool = False, stem: str = "model") -> tuple[list[str], dict[str, str]]:
    """Return the names of the weight files and, where there is an index, which tensor lies in which.

    With `pickle` files of that form are taken where there are no safetensors. An adapter's `stem` is adapter_model.
    """
    names = place.names()
    for suffix, kept in ((".safetensors", True), (".bin", pickle)):
        index = f"{stem}{suffix}.index.json" if suffix == ".safetensors" else f"pytorch_{stem}{suffix}.index.json"
        if kept and index in names:
            return _of_index(place, index, (suffix,) if suffix == ".safetensors" else PICKLES)
        found = [name for name in names if name.endswith(suffix if suffix != ".bin" else PICKLES)]
        single = [name for name in (f"{stem}{suffix}", f"pytorch_{stem}{suffix}") if name in found]
        if kept and found:
            # The same weights in Mistral's own names lie beside these in some repositories.
            return (single[:1] or [one for one in found if not one.startswith("consolidated")] or found), {}
    other = [name for name in names if name.endswith(_OTHER)]
    why = f"there is {other[0]} instead" if other else ""
    fix = "give the model as safetensors"
    if other and other[0].endswith(PICKLES):
        fix += ", or set allow_pickle: true where you trust it: such a file can run code when it is loaded"
    raise BadModel("model.no_weights", f"{place.title} holds no safetensors weights", why, fix)


def _of_index(place: Place, index: str, suffixes: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    wanted = _object(place, index).get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(one, str) for one in wanted.values()) or not wanted:
        raise BadModel("model.index", f"{place.where(index)} has no weight_map")
    inside = [name for name in wanted.values() if "/" in name or name.startswith(".")]
    if inside:
        raise BadModel("model.index", f"{place.where(index)} names {inside[0]}, a file outside the model's folder")
    # Else a list of safetensors would be a way in for files that can run code.
    other = [name for name in wanted.values() if not name.endswith(suffixes)]
    if other:
        what = f"{place.where(index)} names {other[0][:100]!a}, which is no {' or '.join(suffixes)} file"
        raise BadModel("model.index", what)
    return sorted(set(wanted.values())), wanted


def remote_code(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return which Python code a model brings, in words; empty where it brings none."""
    mapped = config.get("auto_map")
    files = [name for name in names if name.endswith(".py")]
    if mapped:
        return f"auto_map in its config.json names {', '.join(sorted(mapped)) if isinstance(mapped, dict) else mapped}"
    return f"there is {', '.join(files[:3])}{' ...' if len(files) > 3 else ''} beside its weights" if files else ""


def read_model(path: Path, *, pickle: bool = False) -> dict[str, Any]:
    """Return what a model's files say: config, weight bytes, elements and bytes by dtype and by kind, weight files.

    Reads config.json and the headers only.

    Raises:
        Refusal: with every problem at once.
    """
    if not path.is_dir():
        what = f"{path} is not a folder" if path.exists() else f"{path} does not exist"
        raise Refusal(Failure("model.no_folder", what, "", "set model_path to a folder with a model on this server"))
    return read_place(Folder(path), pickle=pickle)


def read_place(place: Place, *, pickle: bool = False) -> dict[str, Any]:
    """Return what the files of a model say, wherever they are; see `read_model`."""
    failures: list[Failure] = []
    config: dict[str, Any] = {}
    names: list[str] = []
    placed: dict[str, str] = {}
    beside: list[str] = []
    try:
        beside = place.names()
        config = _object(place, "config.json", "set model_path to the folder that holds config.json")
    except BadModel as bad:
        failures.append(bad.failure)
    except OSError as error:
        raise Refusal(unreadable(place.title, error).failure) from error
    try:
        names, placed = weight_names(place, pickle)
    except BadModel as bad:
        failures.append(bad.failure)
    shards, refused = _shards(place, [name for name in names if name.endswith(".safetensors")])
    failures += refused
    lost = [
        f"{tensor} in {name}"
        for tensor, name in placed.items()
        if name in shards and tensor not in shards[name].tensors
    ]
    if lost:
        what = f"{place.where(INDEX)} names {len(lost)} tensors that are not in their files"
        failures.append(Failure("model.index", what, f"the first is {lost[0]}", COPY))
    if not any(all(one in beside for one in group) for group in _TOKENIZERS):
        known = ", ".join(" with ".join(group) for group in _TOKENIZERS)
        failures.append(Failure("model.no_tokenizer", f"{place.title} holds no tokenizer", "", f"add one of {known}"))
    pickled = [name for name in names if not name.endswith(".safetensors")]
    failures += [
        Failure("model.missing_shard", f"{place.where(name)} is missing", "", COPY)
        for name in pickled
        if name not in beside
    ]
    if shards and not refused and not any(shard.tensors for shard in shards.values()):
        failures.append(Failure("model.no_weights", f"the weights of {place.title} hold no tensor", "", COPY))
    if failures:
        raise Refusal(failures)
    if pickled:
        # Such a file has no header that could be read without running it: its bytes are all that is known.
        said = {"config": config, "weight_bytes": sum(map(place.size, pickled)), "tensors": {}, "kinds": None}
    else:
        said = _summary(config, shards)
    return {**said, "files": sorted(names), "remote_code": remote_code(config, beside)}


def _shards(place: Place, names: Sequence[str]) -> tuple[dict[str, Shard], list[Failure]]:
    shards, failures = {}, []
    for name in names:
        try:
            shards[name] = shard_of(place, name)
        except BadModel as bad:
            failures.append(bad.failure)
    return shards, failures


def _summary(config: dict[str, Any], shards: Mapping[str, Shard]) -> dict[str, Any]:
    tensors: dict[str, dict[str, int]] = {}
    for shard in shards.values():
        for dtype, sums in shard.totals().items():
            one = tensors.setdefault(dtype, {"count": 0, "bytes": 0})
            one["count"] += sums["count"]
            one["bytes"] += sums["bytes"]
    weight_bytes = sum(one["bytes"] for one in tensors.values())
    entries = {name: entry for shard in shards.values() for name, entry in shard.tensors.items()}
    kinds = headers.summary(entries, config)
    return {"config": config, "weight_bytes": weight_bytes, "tensors": tensors, "kinds": kinds}


def unreadable_for(path: Path, user: str = ENGINE_USER) -> list[str]:
    """Return the files of a model that the engines' user cannot read."""
    names = sorted(str(one) for one in path.rglob("*") if one.is_file())
    if os.geteuid() != 0:
        return [name for name in names if not os.access(name, os.R_OK)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The kernel alone decides, with the user's own rights, groups and access lists.
        try:
            _become(user)
            closed = [name for name in names if not os.access(name, os.R_OK)]
            with os.fdopen(writing, "wb") as file:
                file.write(os.fsencode("\0".join(closed)))
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = os.fsdecode(file.read())
    if os.waitpid(child, 0)[1] != 0:
        raise OSError(f"a look with the rights of user {user} failed")
    return [name for name in said.split("\0") if name]


def _become(user: str) -> None:
    """Take on a user's identity; where that user is not made yet, one without any rights stands in."""
    try:
        entry = pwd.getpwnam(user)
        uid, gid, groups = entry.pw_uid, entry.pw_gid, os.getgrouplist(user, entry.pw_gid)
    except KeyError:
        uid, gid, groups = _NOBODY, _NOBODY, []
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def check(path: Path, kind: str = "model", *, pickle: bool = False) -> list[Failure]:
    """Return everything that keeps the engines from serving this model, or from loading this adapter."""
    try:
        if kind == "adapter":
            read_adapter(path, pickle=pickle)
        else:
            read_model(path, pickle=pickle)
    except Refusal as refusal:
        return refusal.failures
    closed = unreadable_for(path)
    if not closed:
        return []
    what = f"{closed[0]} cannot be read by user {ENGINE_USER}"
    if len(closed) > 1:
        what = f"{len(closed)} files of {path} cannot be read by user {ENGINE_USER}, the first is {closed[0]}"
    return [Failure("model.unreadable", what, "", f"chmod -R a+rX {path}, and a+x on every folder above it")]


def read_adapter(path: Path, *, pickle: bool = False) -> dict[str, Any]:
    """Return what the files of a LoRA adapter say: rank, base model, bytes; see `read_model`."""
    if not path.is_dir():
        what = f"{path} is not a folder" if path.exists() else f"{path} does not exist"
        raise Refusal(Failure("model.no_folder", what, "", "name the folder that holds adapter_config.json"))
    return read_adapter_place(Folder(path), pickle=pickle)


def read_adapter_place(place: Place, *, pickle: bool = False) -> dict[str, Any]:
    """Return what the files of a LoRA adapter say, wherever they are."""
    try:
        config = _object(place, ADAPTER, "name the folder that holds it")
        names, _ = weight_names(place, pickle, "adapter_model")
        shards = {name: shard_of(place, name) for name in names if name.endswith(".safetensors")}
        bytes_ = sum(map(place.size, names))
    except BadModel as bad:
        raise Refusal(bad.failure) from bad
    except OSError as error:
        raise Refusal(unreadable(place.title, error).failure) from error
    # A rank of its own for some layers is greater than the usual one in some adapters.
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    wrong = [rank for rank in ranks if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1]
    kind = str(config.get("peft_type") or "LORA")
    if kind.upper() != "LORA" or wrong or config.get("use_dora"):
        said = "DoRA" if config.get("use_dora") else f"of type {kind}, rank {(wrong or ranks)[0]!r}"
        what = f"{place.where(ADAPTER)} is not that of a LoRA adapter"
        raise Refusal(Failure("model.adapter", what, f"it is {said}", "engines load LoRA adapters alone"))
    return {
        "adapter": config,
        "rank": max(ranks),
        "base_model": config.get("base_model_name_or_path"),
        "weight_bytes": bytes_,
        "tensors": {name: len(shard.tensors) for name, shard in shards.items()},
        "files": sorted(names),
        "remote_code": "",
    }
