"""The hubs of models: which files a commit has, with sizes and hashes, and where they are fetched.

Hugging Face: huggingface_hub, hf_api.py (list_repo_tree, model_info) and utils/_http.py (errors); files come from
/REPOSITORY/resolve/REVISION/PATH. ModelScope: modelscope-hub, _legacy_api.py (list_files, list_revisions, download
addresses) and constants.py: a list is cut at 3000 entries without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus, urljoin

from gpuready.outcome import mask
from gpuready.serving.models.shards import BadModel
from gpuready.serving.models.transport import HubError, Transport

ENDPOINTS = {"huggingface": "https://huggingface.co", "modelscope": "https://www.modelscope.cn"}
NAMES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_MOST_PAGES = 100
_CUT = 3000
_REACH = "see the server's network, gpuready_proxy and models_endpoint"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None
    """Of a small file that the hub keeps in Git itself: of `blob SIZE`, a zero byte and the content."""

    def as_dict(self) -> dict[str, Any]:
        """Return what a manifest holds of it."""
        return {"size": self.size, **({"sha256": self.sha256} if self.sha256 else {"git_sha1": self.git_sha1})}


class Hub:
    """One hub, and how it is asked."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.transport = transport

    def files(self, repository: str, revision: str) -> list[RemoteFile]:
        """Return the files of a commit.

        Raises:
            BadModel: when the hub does not give them, with what to do.
        """
        if not _COMMIT.fullmatch(revision):
            raise self._no_commit(repository, revision)
        try:
            found = list(self._files(repository, revision))
        except HubError as error:
            raise self.refused(error, repository, revision) from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{self.title} answers in an unknown form about {repository}"
            raise BadModel("model.hub", what, f"{type(error).__name__}: {error}", _REACH) from error
        for one in found:
            _refuse_path(self.title, repository, one.path)
        return found

    @property
    def title(self) -> str:
        """Return the hub as sentences call it."""
        shown = mask(self.transport.endpoint)
        return NAMES[self.name] if self.transport.endpoint == ENDPOINTS[self.name] else f"{NAMES[self.name]} ({shown})"

    def address(self, repository: str, revision: str, path: str) -> str:
        """Return where a file is fetched."""
        raise NotImplementedError

    def commit_of(self, repository: str, name: str) -> str | None:
        """Return the commit that a branch or tag has now; None where it cannot be known."""
        raise NotImplementedError

    def _files(self, repository: str, revision: str) -> Iterator[RemoteFile]:
        raise NotImplementedError

    def _no_commit(self, repository: str, revision: str) -> BadModel:
        what = f"revision {revision!r} of {repository} is no full commit hash"
        why = "a branch or tag may move, and a short hash may come to mean another commit"
        try:
            commit = self.commit_of(repository, revision)
        except HubError as error:
            if error.status != 404:
                return self.refused(error, repository, revision)
            commit = None
        except (KeyError, TypeError, ValueError, AttributeError):
            commit = None
        fix = (
            f"set revision: {commit}, which it is now" if commit else "set all 40 digits of a commit of the repository"
        )
        return BadModel("model.revision_not_pinned", what, why, fix)

    def refused(self, error: HubError, repository: str, revision: str, path: str = "") -> BadModel:
        """Return what a hub's refusal means for a model, and what to do."""
        of = f"{path} of {repository}" if path else repository
        what = f"{self.title} does not give {of} at {revision[:12]}"
        said = error.headers.get("X-Error-Code", "")
        if error.status in (401, 403) or said == "GatedRepo":
            return self._denied(what, repository, error)
        if error.status == 404 and said == "RevisionNotFound":
            fix = "set a commit that the repository has: one may have been removed by a forced push"
            return BadModel("model.no_revision", what, "it has no such commit", fix)
        if error.status == 404:
            fix = "see source.repository and source.revision; a private repository is hidden from who has no token"
            return BadModel("model.no_repository", what, error.why, fix)
        if error.status == 429:
            return BadModel("model.rate_limit", what, error.why, "run again later, or set a token of your own")
        return BadModel("model.hub", what, error.why, f"run again; {_REACH}")

    def _denied(self, what: str, repository: str, error: HubError) -> BadModel:
        page = f"{ENDPOINTS[self.name]}/{repository}"
        if self.transport.withholds_token:
            why = "the token was not sent, because the endpoint is reached without TLS"
            return BadModel("model.gated", what, why, "set models_endpoint to an https:// address")
        if self.transport.has_token:
            why = f"{error.why} with the token that was sent"
            return BadModel("model.gated", what, why, f"accept the terms on {page} as the token's owner, or renew it")
        fix = f"accept the terms on {page}, and set models_token_file, or models_token in a vault"
        return BadModel("model.gated", what, f"{error.why}: it is gated, private or not there", fix)


class HuggingFace(Hub):
    """huggingface.co, or a mirror with the same interface."""

    def address(self, repository: str, revision: str, path: str) -> str:
        """Return where a file is fetched."""
        return f"{self.transport.endpoint}/{quote(repository)}/resolve/{quote(revision, safe='')}/{quote(path)}"

    def commit_of(self, repository: str, name: str) -> str | None:
        """Return the commit that a branch, a tag or a short hash is now."""
        answer, _ = self.transport.json(
            f"{self.transport.endpoint}/api/models/{quote(repository)}/revision/{quote(name, safe='')}"
        )
        commit = str(answer["sha"])
        return commit if _COMMIT.fullmatch(commit) else None

    def _files(self, repository: str, revision: str) -> Iterator[RemoteFile]:
        commit = self.commit_of(repository, revision)
        if commit != revision:
            # What answers for a commit with another one is no hub to take weights from.
            what = f"{self.title} names commit {commit} where {repository} was asked for at {revision}"
            raise BadModel("model.revision_moved", what, "", "use another mirror, or see why it moved")
        address = f"{self.transport.endpoint}/api/models/{quote(repository)}/tree/{revision}?recursive=true"
        for _ in range(_MOST_PAGES):
            page, headers = self.transport.json(address)
            for one in page:
                if one["type"] == "file":
                    large = one.get("lfs")
                    yield _listed(one["path"], (large or one)["size"], (large or one)["oid"], in_git=not large)
            following = _NEXT.search({key.lower(): value for key, value in headers.items()}.get("link", ""))
            if following is None:
                return
            address = urljoin(address, following[1])
        raise ValueError(f"its list of files has more than {_MOST_PAGES} pages")


class ModelScope(Hub):
    """modelscope.cn, or a mirror with the same interface."""

    def address(self, repository: str, revision: str, path: str) -> str:
        """Return where a file is fetched."""
        query = f"Revision={quote_plus(revision)}&FilePath={quote_plus(path)}"
        return f"{self.transport.endpoint}/api/v1/models/{quote(repository)}/repo?{query}"

    def commit_of(self, repository: str, name: str) -> str | None:
        """Return the newest commit of the files that a branch or tag has now."""
        entries = self._entries(repository, name)
        newest = max(entries, key=lambda one: int(one.get("CommittedDate") or 0), default={})
        commit = str(newest.get("Revision") or "")
        return commit if _COMMIT.fullmatch(commit) else None

    def _entries(self, repository: str, revision: str) -> list[Mapping[str, Any]]:
        query = f"Revision={quote_plus(revision)}&Recursive=True"
        answer, _ = self.transport.json(
            f"{self.transport.endpoint}/api/v1/models/{quote(repository)}/repo/files?{query}"
        )
        if answer.get("Success") is False:
            raise HubError(str(answer.get("Message") or "it refuses"), int(answer.get("Code") or 400))
        data = answer["Data"]
        entries: list[Mapping[str, Any]] = data["Files"] if isinstance(data, Mapping) else data
        return entries

    def _files(self, repository: str, revision: str) -> Iterator[RemoteFile]:
        entries = self._entries(repository, revision)
        if len(entries) >= _CUT:
            raise ValueError(f"it lists {len(entries)} files, and cuts its lists at {_CUT}")
        for one in entries:
            if one["Type"] != "tree":
                yield _listed(one["Path"], one["Size"], one.get("Sha256"), in_git=False)


def _listed(path: Any, size: Any, digest: Any, *, in_git: bool) -> RemoteFile:
    """Return a file of a list. Without a whole hash nothing of it could be judged once it is here."""
    name, count, told = str(path), int(size), str(digest).lower()
    if count < 0:
        raise ValueError(f"it says that {name[:100]!a} has {count} bytes")
    if not (_COMMIT if in_git else _SHA256).fullmatch(told):
        raise ValueError(f"it names no {'hash' if in_git else 'Sha256'} of {name[:100]!a}")
    return RemoteFile(name, count, None if in_git else told, told if in_git else None)


def _refuse_path(title: str, repository: str, path: str) -> None:
    parts = path.split("/")
    # What is not printable is judged first: half of a surrogate pair has no bytes.
    bad = "\\" in path or not path.isprintable()
    if bad or any(part in ("", ".", "..") or len(part.encode()) > 240 for part in parts):
        what = f"{title} lists a file of {repository} that would leave the model's folder: {path[:100]!r}"
        raise BadModel("model.path", what, "", "do not use this repository, or this mirror")


def hub_of(source: Mapping[str, str], hubs: Mapping[str, Any], token: str | None) -> Hub:
    """Return the hub of a source; `hubs` is `{endpoints: {hub: address}, token_hub}`."""
    name = source["hub"]
    endpoint = (hubs.get("endpoints") or {}).get(name) or ENDPOINTS[name]
    sent = token if token and (hubs.get("token_hub") or "huggingface") == name else None
    if name == "modelscope":
        return ModelScope(name, Transport(endpoint, {"Cookie": f"m_session_id={sent}"} if sent else None))
    return HuggingFace(name, Transport(endpoint, {"Authorization": f"Bearer {sent}"} if sent else None))
