"""Models on disk: read and judged from config.json and the headers of the weights; never loaded.

A model that is half copied, truncated or not a model is refused here, before a running service is touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pwd
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure, Refusal
from gpuready.planning.model import headers

STORE = Path("/srv/models")
ENGINE_USER = "gpuready-engine"
_NOBODY = 65534
INDEX = "model.safetensors.index.json"
# A header is JSON of names and numbers; the format itself allows no more.
_HEADER_LIMIT = 100_000_000
_LFS = b"version https://git-lfs"
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
    ("tiktoken.model",),
)
_COPY = "copy the model again, with a tool that compares checksums"


class BadModel(Exception):
    """One thing that is wrong with a model; callers collect them."""

    def __init__(self, code: str, what: str, why: str = "", fix: str = _COPY) -> None:
        self.failure = Failure(code, what, why, fix)
        super().__init__(self.failure.sentence())


def _json_object(path: Path, fix: str = _COPY) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BadModel("model.missing_file", f"{path} is missing", "", fix) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    _refuse_pointer(path, content)
    try:
        value = json.loads(content)
    except ValueError as error:
        raise BadModel("model.not_json", f"{path} is not JSON", str(error)) from error
    except RecursionError:
        raise BadModel("model.not_json", f"{path} is nested too deep to be a model's configuration") from None
    if not isinstance(value, dict):
        raise BadModel("model.not_json", f"{path} is not a JSON object")
    return value


def _unreadable(path: Path, error: OSError) -> BadModel:
    why = str(error.strerror or error)
    return BadModel("model.unreadable", f"{path} cannot be read", why, "make it readable, or look at the disk under it")


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_LFS):
        what = f"{path} is a Git LFS pointer, not the file itself"
        raise BadModel("model.lfs_pointer", what, "the clone was made without LFS", "run git lfs pull in the clone")


@dataclass(frozen=True)
class Shard:
    """What a safetensors header says."""

    tensors: dict[str, dict[str, Any]]

    def totals(self) -> dict[str, dict[str, int]]:
        """Return by dtype how many elements and bytes the file holds."""
        sums: dict[str, dict[str, int]] = {}
        for entry in self.tensors.values():
            one = sums.setdefault(entry["dtype"], {"count": 0, "bytes": 0})
            one["count"] += math.prod(entry["shape"])
            one["bytes"] += entry["data_offsets"][1] - entry["data_offsets"][0]
        return sums


def read_shard(path: Path) -> Shard:
    """Read and judge one safetensors file by its header and its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(max(8, len(_LFS)))
            _refuse_pointer(path, start)
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else -1
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                cut = "the file is empty" if not size else f"its first 8 bytes name a header of {length} bytes"
                raise BadModel("model.header", f"{path} is not a whole safetensors file", cut)
            file.seek(8)
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise BadModel("model.missing_shard", f"{path} is missing") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise BadModel("model.header", f"{path} has a broken safetensors header", str(error)) from error
    if not isinstance(header, dict):
        raise BadModel("model.header", f"{path} has a broken safetensors header", "it is not a JSON object")
    header.pop("__metadata__", None)
    end = _end_of_data(path, header)
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "too long"
        raise BadModel(
            "model.size", f"{path} is {state}", f"it has {size} bytes, its header speaks of {8 + length + end}"
        )
    return Shard(header)


def _end_of_data(path: Path, header: Mapping[str, Any]) -> int:
    """Return where the data ends; tensors follow each other without gap or overlap."""
    spans = []
    for name, entry in header.items():
        try:
            begin, end = (int(one) for one in entry["data_offsets"])
            shape = [int(one) for one in entry["shape"]]
            bits = _BITS.get(entry["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"{path} has a broken safetensors header"
            raise BadModel("model.header", what, f"tensor {name} lacks or garbles {error}") from error
        # A dtype that is newer than this table is left to the engine; its bytes are counted all the same.
        if end < begin or (bits is not None and (end - begin) * 8 != math.prod(shape) * bits):
            why = f"tensor {name} of {entry['dtype']} {shape} cannot have {end - begin} bytes"
            raise BadModel("model.header", f"{path} has a broken safetensors header", why)
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            why = f"tensor {name} begins at byte {begin}, the one before it ends at {reached}"
            raise BadModel("model.header", f"{path} has a broken safetensors header", why)
        reached = end
    return reached


def _shard_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the weight files and, where there is an index, which tensor lies in which."""
    if (folder / INDEX).exists():
        wanted = _json_object(folder / INDEX).get("weight_map")
        if not isinstance(wanted, dict) or not all(isinstance(one, str) for one in wanted.values()) or not wanted:
            raise BadModel("model.index", f"{folder / INDEX} has no weight_map")
        return sorted(set(wanted.values())), wanted
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        names = ["model.safetensors"]
    if not names:
        other = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        why = f"there is {other[0]} instead" if other else ""
        raise BadModel(
            "model.no_weights", f"{folder} holds no safetensors weights", why, "give the model as safetensors"
        )
    return names, {}


def read_model(path: Path) -> dict[str, Any]:
    """Return what a model's files say: config, weight bytes, elements and bytes by dtype and by kind, weight files.

    Reads config.json and the headers only.

    Raises:
        Refusal: with every problem at once.
    """
    failures: list[Failure] = []
    if not path.is_dir():
        what = f"{path} is not a folder" if path.exists() else f"{path} does not exist"
        raise Refusal(Failure("model.no_folder", what, "", "set model_path to a folder with a model on this server"))
    config: dict[str, Any] = {}
    names: list[str] = []
    placed: dict[str, str] = {}
    shards: dict[str, Shard] = {}
    try:
        config = _json_object(path / "config.json", "set model_path to the folder that holds config.json")
    except BadModel as bad:
        failures.append(bad.failure)
    try:
        names, placed = _shard_names(path)
    except BadModel as bad:
        failures.append(bad.failure)
    except OSError as error:
        failures.append(_unreadable(path, error).failure)
    for name in names:
        try:
            shards[name] = read_shard(path / name)
        except BadModel as bad:
            failures.append(bad.failure)
    lost = [
        f"{tensor} in {name}"
        for tensor, name in placed.items()
        if name in shards and tensor not in shards[name].tensors
    ]
    if lost:
        what = f"{path / INDEX} names {len(lost)} tensors that are not in their files"
        failures.append(Failure("model.index", what, f"the first is {lost[0]}", _COPY))
    if not any(all((path / one).is_file() for one in group) for group in _TOKENIZERS):
        known = ", ".join(" with ".join(group) for group in _TOKENIZERS)
        failures.append(Failure("model.no_tokenizer", f"{path} holds no tokenizer", "", f"add one of {known}"))
    if failures:
        raise Refusal(failures)
    return _summary(config, shards)


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
    return {
        "config": config,
        "weight_bytes": weight_bytes,
        "tensors": tensors,
        "kinds": kinds,
        "files": sorted(shards),
    }


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


def check(path: Path) -> list[Failure]:
    """Return everything that keeps the engines from serving this model."""
    try:
        read_model(path)
    except Refusal as refusal:
        return refusal.failures
    closed = unreadable_for(path)
    if not closed:
        return []
    what = f"{closed[0]} cannot be read by user {ENGINE_USER}"
    if len(closed) > 1:
        what = f"{len(closed)} files of {path} cannot be read by user {ENGINE_USER}, the first is {closed[0]}"
    return [Failure("model.unreadable", what, "", f"chmod -R a+rX {path}, and a+x on every folder above it")]


def revision(content: Mapping[str, bytes]) -> str:
    """Return the revision of a model that is given as content by file name."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def revision_of(folder: Path) -> str:
    """Return the revision of a small model that lies in a folder."""
    return revision({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})


def is_whole(folder: Path) -> bool:
    """Say whether a model that gpuready placed is what its name says, `<name>@<revision>`, and read-only."""
    if not folder.is_dir() or any(path.stat().st_mode & 0o222 for path in (folder, *folder.iterdir())):
        return False
    return revision_of(folder) == folder.name.rpartition("@")[2]


def place(content: Mapping[str, bytes], folder: Path) -> None:
    """Write a model beside its place and rename it there: whole or not at all; read-only for everyone."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    for name, data in content.items():
        path = beside / name
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    if folder.exists():
        folder.chmod(0o755)
        shutil.rmtree(folder)
    beside.rename(folder)
    folder.chmod(0o555)
