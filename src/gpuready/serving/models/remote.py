"""A model on a hub: read before it is downloaded, and which of its files an engine needs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuready.outcome import Refusal
from gpuready.planning.sources import title
from gpuready.serving.models.files import INDEX, read_adapter_place, read_place, weight_names
from gpuready.serving.models.hubs import Hub, RemoteFile
from gpuready.serving.models.shards import BadModel
from gpuready.serving.models.store import MANIFEST, PART
from gpuready.serving.models.transport import HubError

_FIRST_BYTES = 128 << 10
"""Most headers are smaller; what a request brings anyway costs nothing."""
_LARGEST_SMALL_FILE = 100 << 20
_AT_ONCE = 8
_SETTINGS = re.compile(r"[^/]+\.(json|txt|model|tiktoken|jinja|jsonl)|LICENSE[^/]*|NOTICE[^/]*|tokenizer[^/]*")
_MODULES = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)|(additional_)?chat_templates/[^/]+\.jinja")
"""Parts of sentence-transformers (pooling, dense layers), and templates beside the usual one."""
_INDEXES = re.compile(r"[^/]+\.(safetensors|bin)\.index\.json")
_TRAINING = ("trainer_state.json", "training_args.json", "all_results.json", "train_results.json", "eval_results.json")


class Remote:
    """The files of one commit, read by ranges."""

    def __init__(self, hub: Hub, source: Mapping[str, str]) -> None:
        self.hub = hub
        self.source = source
        self.title = title(source)
        self.files = {one.path: one for one in hub.files(source["repository"], source["revision"])}
        self.broken: BadModel | None = None
        """What the hub refused first; then nothing more is asked of it."""
        self._read: dict[str, bytes] = {}

    def names(self) -> list[str]:
        """Return the names of the files at the top, sorted."""
        return sorted(name for name in self.files if "/" not in name)

    def where(self, name: str) -> str:
        """Return what sentences call one file."""
        return f"{name} of {self.title}"

    def size(self, name: str) -> int:
        """Return the bytes of a file; FileNotFoundError where there is none."""
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name].size

    def start(self, name: str, length: int) -> bytes:
        """Return the first bytes of a file, fewer where it has fewer; one that is read whole is compared by hash."""
        wanted = min(length, self.size(name))
        if wanted > _LARGEST_SMALL_FILE:
            what = f"{self.where(name)} would have to be read up to byte {wanted}"
            raise BadModel("model.header", what, "no configuration or header is as large", "do not use this repository")
        if name not in self._read or len(self._read[name]) < wanted:
            self._read[name] = self._fetch(self.files[name], min(max(wanted, _FIRST_BYTES), self.size(name)))
        return self._read[name][:wanted]

    def warm(self, names: Sequence[str]) -> None:
        """Read the beginnings of many files side by side; what fails is said when it is asked for."""

        def one(name: str) -> None:
            with contextlib.suppress(BadModel, FileNotFoundError):
                self.start(name, 8)

        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(one, names))

    def address(self, name: str) -> str:
        """Return where a file is fetched."""
        return self.hub.address(self.source["repository"], self.source["revision"], name)

    def refused(self, error: HubError, name: str = "") -> BadModel:
        """Return what a hub's refusal means."""
        return self.hub.refused(error, self.source["repository"], self.source["revision"], name)

    def _fetch(self, file: RemoteFile, length: int) -> bytes:
        if self.broken:
            raise self.broken
        try:
            content = self.hub.transport.start(self.address(file.path), length)
        except HubError as error:
            self.broken = self.refused(error, file.path)
            raise self.broken from error
        if len(content) != length or (length == file.size and digest_of(file, content) != expected(file)):
            what = f"{self.where(file.path)} is not what {self.hub.title} lists"
            raise BadModel("model.hash", what, "its size or hash differs", "run again, or use another mirror")
        return content


def hasher(file: RemoteFile) -> Any:
    """Return a hash object for a file's content, in the hub's kind of hash."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


def expected(file: RemoteFile) -> str:
    """Return the hash that a file must have."""
    return str(file.sha256 or file.git_sha1)


def digest_of(file: RemoteFile, content: bytes) -> str:
    """Return the hash of a file's content."""
    digest = hasher(file)
    digest.update(content)
    return str(digest.hexdigest())


def read(remote: Remote, kind: str, *, pickle: bool) -> dict[str, Any]:
    """Return what the files of a model or adapter say, before they are downloaded; see `files.read_model`.

    Raises:
        Refusal: with every problem at once.
    """
    with contextlib.suppress(BadModel):  # said again below
        remote.warm([one for one in ("config.json", INDEX) if one in remote.files])
        remote.warm([one for one in _weights(remote, kind, pickle) if one.endswith(".safetensors")])
    try:
        return read_adapter_place(remote, pickle=pickle) if kind == "adapter" else read_place(remote, pickle=pickle)
    except Refusal as refusal:
        # A hub that fails is not asked for every file, and one sentence says it.
        raise Refusal(remote.broken.failure) if remote.broken else refusal from refusal


def _weights(remote: Remote, kind: str, pickle: bool) -> list[str]:
    return weight_names(remote, pickle, "adapter_model" if kind == "adapter" else "model")[0]


def needed(remote: Remote, kind: str, *, pickle: bool, code: bool) -> list[RemoteFile]:
    """Return the files that an engine needs: settings, tokenizer, one set of weights, and code where it is wanted."""
    weights = _weights(remote, kind, pickle)
    missing = [name for name in weights if name not in remote.files]
    if missing:
        raise BadModel("model.missing_shard", f"{remote.where(missing[0])} is missing", "", "choose another commit")
    wanted = set(weights)
    kinds = tuple(f"{suffix}.index.json" for suffix in {Path(name).suffix for name in weights})
    for name in remote.files:
        if name == MANIFEST or name.endswith(PART):
            continue  # of somebody's store: they would lie where our own are
        if _INDEXES.fullmatch(name):
            # The index of weights that are not fetched would lead an engine to them.
            takes = name.endswith(kinds)
        else:
            is_setting = _SETTINGS.fullmatch(name) is not None and name not in _TRAINING
            takes = is_setting or _MODULES.fullmatch(name) is not None or (code and name.endswith(".py"))
        if takes:
            wanted.add(name)
    return [remote.files[name] for name in sorted(wanted)]
