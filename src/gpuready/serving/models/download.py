"""Downloads one commit into the store: resumed where it was left, compared by hash, whole or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuready.outcome import Failed, Failure, MachineCannot
from gpuready.serving.files import beside
from gpuready.serving.models import store
from gpuready.serving.models.hubs import RemoteFile
from gpuready.serving.models.remote import Remote, expected, hasher
from gpuready.serving.models.shards import BadModel
from gpuready.serving.models.transport import HubError, patiently

GIB = 1 << 30
_CHUNK = 1 << 20
_SPARE_BYTES = 16 << 20
"""Beside one hundredth of what comes: for directories and the manifest. A full store would stop other servers too."""
AT_ONCE = 8
"""Files at once: one stream of a hub's storage seldom fills a fast line."""


class Interrupted(Exception):
    """The time of this call is over; the next one goes on."""


@dataclass
class Progress:
    """What a download has reached; counted by several threads."""

    total: int
    present: int = 0
    fetched: int = 0
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Count bytes that came from the hub."""
        with self._lock:
            self.fetched += count

    def found(self, count: int) -> None:
        """Count bytes that lay there, or take back those that were thrown away."""
        with self._lock:
            self.present += count

    def rate(self) -> float:
        """Return bytes per second of this call."""
        return self.fetched / max(time.monotonic() - self.began, 0.001)

    def sentence(self, title: str) -> str:
        """Return how far it is."""
        have, rate = self.present + self.fetched, self.rate()
        left = f", about {_duration((self.total - have) / rate)} left" if rate > 0 and have < self.total else ""
        return f"{title}: {_size(have)} of {_size(self.total)}, {rate / 1e6:.0f} MB/s{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Download:
    """One commit on its way into the store."""

    def __init__(self, remote: Remote, files: Sequence[RemoteFile], folder: Path, *, code: bool) -> None:
        self.remote = remote
        self.files = list(files)
        self.folder = folder
        self.beside = beside(folder)
        self._code = code
        self.progress = Progress(sum(one.size for one in files))
        self._stop = threading.Event()
        self._end: float | None = None
        self._least = 0.0

    @property
    def manifest(self) -> dict[str, Any]:
        """Return what the folder's manifest will say."""
        files = {one.path: one.as_dict() for one in self.files}
        return {"source": dict(self.remote.source), "code": self._code, "files": files}

    def missing_bytes(self) -> int:
        """Return the bytes that have yet to come: neither in the folder, nor half fetched beside it."""
        have = _sizes(self.folder) | _sizes(self.beside)
        return sum(one.size - min(one.size, self._begun_size(one, have)) for one in self.files)

    @staticmethod
    def _begun_size(file: RemoteFile, have: Mapping[str, int]) -> int:
        return max(have.get(file.path, 0), have.get(file.path + store.PART, 0))

    def run(self, seconds: float | None = None) -> None:
        """Fetch what is missing and publish the folder.

        Raises:
            Interrupted: after about so many seconds; every stream has had half of them for itself, so that no call
                only reads again what former ones brought.
            BadModel: when the hub gives something else, or nothing.
            MachineCannot: when the disk is too small.
        """
        self._open()
        self._take_over()
        rest = [one for one in self.files if not self._is_there(one)]
        self._demand_room(rest)
        # The largest first, so that no single one is left for the end.
        rest.sort(key=lambda one: -one.size)
        self._end = time.monotonic() + seconds if seconds else None
        self._least = (seconds or 0) / 2
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [pool.submit(self._guarded, one) for one in rest]
            concurrent.futures.wait(jobs)
        # A cause comes before its consequence, that the others stopped.
        for kind in (BadModel, Failed, OSError, Interrupted):
            for job in jobs:
                if isinstance(job.exception(), kind):
                    job.result()
        for job in jobs:
            job.result()
        self._drop_others()
        store.publish(self.beside, self.folder)

    def _open(self) -> None:
        """Make the folder beside, or go on with what was begun there."""
        for place, _, _ in os.walk(self.beside):
            Path(place).chmod(0o755)
        if self.beside.exists() and store.manifest(self.beside) is None:
            # Only what a manifest was written for was compared by hash.
            store.remove(self.beside)
        self.beside.mkdir(exist_ok=True)
        begun = store.manifest(self.beside) or store.manifest(self.folder)
        if begun is not None:
            self._refuse_moved(begun)
        store.write_manifest(self.beside, self.manifest)

    def _refuse_moved(self, begun: Mapping[str, Any]) -> None:
        """Refuse a commit that has other content than when it was first listed: a commit cannot change by itself."""
        for one in self.files:
            before = begun["files"].get(one.path)
            if before is not None and before != one.as_dict():
                what = f"{one.path} of {self.remote.title} is another file than when the download began"
                why = f"{self.remote.hub.title} now lists {one.size} bytes with hash {expected(one)[:12]}"
                fix = f"use another mirror; where this one is right, remove {self.beside} and {self.folder}"
                raise BadModel("model.revision_moved", what, why, fix)

    def _take_over(self) -> None:
        """Take what is good of a damaged folder, without its bytes a second time."""
        said = store.manifest(self.folder)
        if said is None:
            return
        wanted = {one.path for one in self.files}
        here = {
            name: one for name, one in said["files"].items() if name in wanted and not (self.beside / name).exists()
        }
        # Something is wrong there, so sizes are no longer proof.
        wrong = store.damage(self.folder, here, full=True)
        for name in here:
            target = self.beside / name
            if name not in wrong:
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(self.folder / name, target)

    def _is_there(self, file: RemoteFile) -> bool:
        path = self.beside / file.path
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == file.size:
                self.progress.found(file.size)
                return True
            path.unlink()
        return False

    def _demand_room(self, rest: Sequence[RemoteFile]) -> None:
        have = _sizes(self.beside)
        missing = sum(max(0, one.size - have.get(one.path + store.PART, 0)) for one in rest)
        need = missing + missing // 100 + _SPARE_BYTES if missing else 0
        free = shutil.disk_usage(self.folder.parent).free
        if free < need:
            raise self._too_small(need, free)

    def _too_small(self, need: int, free: int) -> MachineCannot:
        what = (
            f"{self.remote.title} needs {_size(need)} more under {self.folder.parent}, and {_size(free)} are free there"
        )
        fix = "free space there, or mount a larger disk (models_mount); what is fetched already is kept and counted"
        return MachineCannot(Failure("model.disk", what, "", fix))

    def _guarded(self, file: RemoteFile) -> None:
        """Fetch one file; a failure stops the others at their next piece."""
        if self._stop.is_set():
            raise Interrupted
        try:
            self._fetch(file)
        except BaseException:
            self._stop.set()
            raise

    def _fetch(self, file: RemoteFile) -> None:
        path = self.beside / file.path
        part = path.with_name(path.name + store.PART)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = _Begun(part, file, self.progress)
        try:
            patiently(lambda: self._receive(file, part, state), lambda: state.size)
        except HubError as error:
            bad = self.remote.refused(error, file.path)
            one = bad.failure
            why = f"{one.why}, {state.size} of {file.size} bytes came"
            raise BadModel(one.code, one.what, why, f"{one.fix}; what came is kept") from error
        if state.digest.hexdigest() != expected(file):
            part.unlink()
            self.progress.found(-file.size)
            what = f"{self.remote.where(file.path)} came damaged"
            why = f"its hash is {state.digest.hexdigest()[:12]} instead of {expected(file)[:12]}"
            fix = "run again: it is fetched anew, and the rest is kept; if it stays so, use another mirror"
            raise BadModel("model.hash", what, why, fix)
        part.replace(path)

    def _receive(self, file: RemoteFile, part: Path, state: _Begun) -> None:
        """Append what is missing of a file; one that a hub cannot give from the middle begins anew."""
        if state.size < file.size or not file.size:
            with part.open("ab") as out:
                if file.size:
                    self._append(file, out, state)
                out.flush()
                os.fsync(out.fileno())
        if state.size < file.size:
            raise HubError("the connection ended early")

    def _append(self, file: RemoteFile, out: Any, state: _Begun) -> None:
        address, began = self.remote.address(file.path), time.monotonic()
        with self.remote.hub.transport.opened(address, state.size, file.size - 1) as response:
            if state.size and response.status != 206:
                out.truncate(0)
                state.forget()
            elif state.size and not response.headers.get("Content-Range", "").startswith(f"bytes {state.size}-"):
                raise HubError("it gives another part of the file than it was asked for", 416)
            while chunk := response.read(min(_CHUNK, file.size - state.size)):
                try:
                    out.write(chunk)
                    out.flush()
                except OSError as error:
                    raise self._unwritten(error, file) from error
                state.add(chunk)
                if self._is_over(began):
                    raise Interrupted
            if state.size == file.size and response.status == 200 and response.read(1):
                what = f"{self.remote.where(file.path)} is longer than the {file.size} bytes that the hub lists"
                raise BadModel("model.hash", what, "", "run again, or use another mirror")

    def _is_over(self, began: float) -> bool:
        now = time.monotonic()
        is_late = self._end is not None and now > self._end and now - began > self._least
        return is_late or self._stop.is_set()

    def _unwritten(self, error: OSError, file: RemoteFile) -> Failed:
        free = shutil.disk_usage(self.folder.parent).free
        what = f"{file.path} of {self.remote.title} cannot be written under {self.folder.parent}"
        why = f"{error.strerror}, {_size(free)} are free there"
        return Failed(Failure("model.disk", what, why, "free space there and run again; what came is kept"))

    def _drop_others(self) -> None:
        """Remove what the manifest does not name, such as a half of a file that is no longer needed."""
        wanted = {self.beside / one.path for one in self.files} | {self.beside / store.MANIFEST}
        for place, _, names in os.walk(self.beside):
            for name in names:
                if Path(place, name) not in wanted:
                    Path(place, name).unlink()


class _Begun:
    """A file that is being fetched: its size and hash so far."""

    def __init__(self, part: Path, file: RemoteFile, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self.size = 0
        self.digest = hasher(file)
        with contextlib.suppress(FileNotFoundError), part.open("r+b") as begun:
            if part.stat().st_size > file.size:
                begun.truncate(0)
            while chunk := begun.read(_CHUNK):
                self.digest.update(chunk)
                self.size += len(chunk)
            progress.found(self.size)

    def add(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.size += len(chunk)
        self._progress.add(len(chunk))

    def forget(self) -> None:
        self._progress.found(-self.size)
        self.size = 0
        self.digest = hasher(self._file)


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(Path(place, name).relative_to(folder)): Path(place, name).stat().st_size
        for place, _, names in os.walk(folder)
        for name in names
    }


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copyfile(source, target)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
