"""What a plan's models are on this server, and how those with a source come to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuready.outcome import Change, Exit, Failed, Failure, Refusal, Result
from gpuready.planning.sources import title
from gpuready.serving.files import beside
from gpuready.serving.models import store
from gpuready.serving.models.download import GIB, Download, Interrupted
from gpuready.serving.models.files import read_adapter, read_model
from gpuready.serving.models.hubs import hub_of
from gpuready.serving.models.remote import Remote, needed, read
from gpuready.serving.models.shards import BadModel


class Hubs:
    """How the hubs of models are reached: endpoints, and a token that is told to nobody else."""

    def __init__(self, said: Mapping[str, Any], token: str | None = None) -> None:
        self._said = said
        self._token = token

    def remote(self, source: Mapping[str, str]) -> Remote:
        """Return a commit on its hub, with the list of its files."""
        return Remote(hub_of(source, self._said, self._token), source)


def facts(entry: Mapping[str, Any], hubs: Hubs) -> dict[str, Any]:
    """Return what a model or adapter with a source is, from the store where it is whole, else from its hub.

    `entry` has the form of the plan's models. `missing_bytes` is what has yet to be downloaded.

    Raises:
        Refusal: with everything that is wrong with it.
    """
    folder, kind, pickle = Path(entry["path"]), str(entry["kind"]), bool(entry["allow_pickle"])
    code = bool(entry["trust_remote_code"])
    if store.why_not_whole(folder, entry["source"], code=code) is None:
        said = read_adapter(folder, pickle=pickle) if kind == "adapter" else read_model(folder, pickle=pickle)
        return {**said, "missing_bytes": 0}
    try:
        remote = hubs.remote(entry["source"])
        said = read(remote, kind, pickle=pickle)
        files = needed(remote, kind, pickle=pickle, code=code)
    except BadModel as bad:
        raise Refusal(bad.failure) from bad
    download = Download(remote, files, folder, code=code)
    return {**said, "missing_bytes": download.missing_bytes(), "download_bytes": download.progress.total}


def bring(
    entry: Mapping[str, Any], hubs: Hubs, *, seconds: float | None = None, full: bool = False, check: bool = False
) -> Result:
    """Bring one model with a source into the store; nothing is touched, and no hub asked, when it is whole already.

    With `full` every byte of it is compared by hash. After about `seconds` the answer is how far it is, as `progress`
    in the data: call it again.

    Raises:
        Failed: when the hub or the disk fails; what came is kept beside the model's place.
        Busy: when another server is at work on this model in a shared store.
    """
    folder, source, code = Path(entry["path"]), entry["source"], bool(entry["trust_remote_code"])
    reason = _reason(folder, source, code, full)
    if reason is None:
        return Result(summary=f"{folder} is whole.")
    try:
        if check:
            return _would(_prepared(entry, hubs), reason)
        os.umask(0o022)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        with store.alone(folder, title(source)):
            # Another server may have brought it meanwhile.
            reason = _reason(folder, source, code, full)
            if reason is None:
                return Result(summary=f"{folder} is whole.")
            return _fetched(_prepared(entry, hubs), reason, seconds)
    except BadModel as bad:
        if check:
            raise Refusal(bad.failure) from bad
        raise Failed([bad.failure, *_state(folder)]) from bad


def _reason(folder: Path, source: Mapping[str, str], code: bool, full: bool) -> str | None:
    reason = store.why_not_whole(folder, source, code=code)
    if reason is None and full:
        reason = "; ".join(f"{one.what}: {one.why}" for one in store.verify(folder)[:3])
    return reason or None


def _prepared(entry: Mapping[str, Any], hubs: Hubs) -> Download:
    remote = hubs.remote(entry["source"])
    code = bool(entry["trust_remote_code"])
    files = needed(remote, str(entry["kind"]), pickle=bool(entry["allow_pickle"]), code=code)
    return Download(remote, files, Path(entry["path"]), code=code)


def _change(download: Download, reason: str) -> Change:
    total = sum(one.size for one in download.files)
    after = f"{len(download.files)} files, {total / GIB:.2f} GiB, {download.remote.title}\n"
    return Change(str(download.folder), f"{reason}\n", after)


def _would(download: Download, reason: str) -> Result:
    gib = download.missing_bytes() / GIB
    summary = f"{download.remote.title} would be downloaded to {download.folder}, {gib:.1f} GiB."
    return Result(changed=True, diff=[_change(download, reason)], summary=summary)


def _fetched(download: Download, reason: str, seconds: float | None) -> Result:
    progress = download.progress
    try:
        download.run(seconds)
    except Interrupted:
        told = progress.sentence(download.remote.title)
        failure = Failure("model.unfinished", told, "", "run the command again: it goes on from there")
        return Result(failures=[failure], exit=Exit.FAILED, data={"progress": told})
    rate = f", {progress.rate() / 1e6:.0f} MB/s" if progress.fetched else ""
    summary = f"{download.folder} was downloaded ({progress.total / GIB:.2f} GiB{rate})."
    return Result(changed=True, diff=[_change(download, reason)], summary=summary)


def _state(folder: Path) -> list[Failure]:
    kept = store.bytes_below(beside(folder))
    if not kept:
        return []
    return [Failure("model.state", f"{kept / GIB:.1f} GiB of it are kept in {beside(folder)}", "", "run again")]
