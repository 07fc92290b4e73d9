"""One file of weights, by its safetensors header and its size; never loaded.

The format: 8 bytes with the header's length, the header as JSON, the tensors' bytes without gap or overlap
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuready.outcome import Failure
from gpuready.serving.models.places import Folder, Place

# A header is JSON of names and numbers; the format itself allows no more.
_HEADER_LIMIT = 100_000_000
LFS = b"version https://git-lfs"
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
COPY = "copy the model again, with a tool that compares checksums"


class BadModel(Exception):
    """One thing that is wrong with a model; callers collect them."""

    def __init__(self, code: str, what: str, why: str = "", fix: str = COPY) -> None:
        self.failure = Failure(code, what, why, fix)
        super().__init__(self.failure.sentence())


def json_object(where: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object that a file (`where`) holds."""
    refuse_pointer(where, content)
    try:
        value = json.loads(content)
    except ValueError as error:
        raise BadModel("model.not_json", f"{where} is not JSON", str(error)) from error
    except RecursionError:
        raise BadModel("model.not_json", f"{where} is nested too deep to be a model's configuration") from None
    if not isinstance(value, dict):
        raise BadModel("model.not_json", f"{where} is not a JSON object")
    return value


def unreadable(where: str, error: OSError) -> BadModel:
    """Return what is wrong with a file that the disk does not give."""
    why = str(error.strerror or error)
    return BadModel(
        "model.unreadable", f"{where} cannot be read", why, "make it readable, or look at the disk under it"
    )


def refuse_pointer(where: str, start: bytes) -> None:
    """Refuse what Git keeps in place of a large file."""
    if start.startswith(LFS):
        what = f"{where} is a Git LFS pointer, not the file itself"
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
    """Read and judge one safetensors file on a disk."""
    folder = Folder(path.parent)
    return shard_of(folder, path.name)


def shard_of(place: Place, name: str) -> Shard:
    """Read and judge one safetensors file by its header and its size."""
    where, size = place.where(name), 0
    try:
        size = place.size(name)
        start = place.start(name, max(8, len(LFS)))
        refuse_pointer(where, start)
        length = header_length(where, start, size)
        return judged(where, size, place.start(name, 8 + length)[8:])
    except FileNotFoundError:
        raise BadModel("model.missing_shard", f"{where} is missing") from None
    except OSError as error:
        raise unreadable(where, error) from error


def header_length(where: str, start: bytes, size: int) -> int:
    """Return the bytes of the header that follow the first 8 bytes of a safetensors file."""
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else -1
    if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
        cut = "the file is empty" if not size else f"its first 8 bytes name a header of {length} bytes"
        raise BadModel("model.header", f"{where} is not a whole safetensors file", cut)
    return int(length)


def judged(where: str, size: int, content: bytes) -> Shard:
    """Judge a safetensors file by its header (`content`) and its size in bytes."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadModel("model.header", f"{where} has a broken safetensors header", str(error)) from error
    if not isinstance(header, dict):
        raise BadModel("model.header", f"{where} has a broken safetensors header", "it is not a JSON object")
    header.pop("__metadata__", None)
    end = _end_of_data(where, header)
    whole = 8 + len(content) + end
    if size != whole:
        state = "truncated" if size < whole else "too long"
        raise BadModel("model.size", f"{where} is {state}", f"it has {size} bytes, its header speaks of {whole}")
    return Shard(header)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r}, which is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r}, which is no dtype")
    return value


def _end_of_data(where: str, header: Mapping[str, Any]) -> int:
    """Return where the data ends; tensors follow each other without gap or overlap."""
    spans = []
    for name, entry in header.items():
        try:
            begin, end = (_count(one) for one in entry["data_offsets"])
            shape = [_count(one) for one in entry["shape"]]
            bits = _BITS.get(_text(entry["dtype"]))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{where} has a broken safetensors header"
            raise BadModel("model.header", what, f"tensor {name} lacks or garbles {error}") from error
        # A dtype that is newer than this table is left to the engine; its bytes are counted all the same.
        if end < begin or (bits is not None and (end - begin) * 8 != math.prod(shape) * bits):
            why = f"tensor {name} of {entry['dtype']} {shape} cannot have {end - begin} bytes"
            raise BadModel("model.header", f"{where} has a broken safetensors header", why)
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            why = f"tensor {name} begins at byte {begin}, the one before it ends at {reached}"
            raise BadModel("model.header", f"{where} has a broken safetensors header", why)
        reached = end
    return reached
