"""Where the files of models lie on a server: an operator's own folder, or the store that gpuready fills.

Pure: what is declared → folders, and what is asked of the server about each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuready.outcome import Failure

STORE = "/srv/models"
SIMULATED_MODELS = "gpuready-sim/"
_DIGITS = 12
"""Of a revision, in the name of a folder."""


@dataclass(frozen=True)
class Asked:
    """One folder with a model or an adapter that a deployment needs."""

    key: str
    """The key of the deployment that names it, e.g. source or draft.model_path."""
    model: str
    path: str
    kind: str
    """model, draft or adapter."""
    source: dict[str, str] | None = None
    """`{hub, repository, revision}` where gpuready downloads it; None where the operator put it there."""
    trust_remote_code: bool | None = None
    allow_pickle: bool = False

    @property
    def title(self) -> str:
        """Return the key with its value, as a sentence names it."""
        if self.source is None:
            return f"{self.key} = {self.path}"
        return f"{self.key} = {title(self.source)}"

    def request(self) -> dict[str, Any]:
        """Return what is asked of the server."""
        return {name: value for name, value in asdict(self).items() if name != "key"}


def title(source: Mapping[str, str]) -> str:
    """Return a source as a sentence names it."""
    return f"{source['repository']}@{source['revision'][:_DIGITS]} on {source['hub']}"


def folder(name: str, revision: str) -> str:
    """Return the folder of the store for one revision of a model."""
    return f"{STORE}/{name.replace('/', '--')}@{revision[:_DIGITS].replace('/', '--')}"


def of_source(declared: Mapping[str, Any] | None, name: str) -> dict[str, str] | None:
    """Return a declared source with its repository."""
    return {**declared, "repository": declared.get("repository") or name} if declared else None


def _asked(key: str, name: str, path: str | None, declared: Mapping[str, Any] | None, kind: str) -> Iterator[Asked]:
    prefix = key.rpartition(".")[0]
    source = of_source(declared, name)
    if source is not None:
        place = folder(source["repository"], source["revision"])
        yield Asked(f"{prefix}.source".lstrip("."), name, place, kind, source)
    elif path:
        yield Asked(key, name, path, kind)


def _draft(draft: Mapping[str, Any]) -> list[Asked]:
    if not draft.get("model"):
        return []
    return list(_asked("draft.model_path", draft["model"], draft.get("model_path"), draft.get("source"), "draft"))


def asked(deployment: Mapping[str, Any]) -> list[Asked]:
    """Return the folders that a deployment needs, but those of models that gpuready makes itself."""
    found = list(
        _asked("model_path", deployment["model"], deployment.get("model_path"), deployment.get("source"), "model")
    )
    found += _draft(deployment.get("draft") or {})
    for index, one in enumerate((deployment.get("lora") or {}).get("adapters") or ()):
        found += _asked(f"lora.adapters[{index}].path", one["name"], one.get("path"), one.get("source"), "adapter")
    trust, pickle = deployment.get("trust_remote_code"), bool(deployment.get("allow_pickle"))
    return [Asked(one.key, one.model, one.path, one.kind, one.source, trust, pickle) for one in found]


def path_of(deployment: Mapping[str, Any], kind: str = "model") -> str | None:
    """Return the folder of a deployment's model or of its draft; None where none is named."""
    return next((one.path for one in asked(deployment) if one.kind == kind), None)


def _adapters(lora: Mapping[str, Any]) -> list[Asked]:
    found: list[Asked] = []
    for index, one in enumerate(lora.get("adapters") or ()):
        found += _asked(f"lora.adapters[{index}].path", one["name"], one.get("path"), one.get("source"), "adapter")
    return found


def draft_path(draft: Mapping[str, Any]) -> str | None:
    """Return the folder of a model that drafts; None where the checkpoint's own layers do."""
    return next((one.path for one in _draft(draft)), None)


def adapters(deployment: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the adapters that an engine loads: `[{name, path}]`."""
    return [{"name": one.model, "path": one.path} for one in _adapters(deployment.get("lora") or {})]


def together(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every folder once: what one deployment may have, all that share the folder find there."""
    found: dict[str, dict[str, Any]] = {}
    for one in requests:
        entry = found.setdefault(one["path"], dict(one))
        for key in ("trust_remote_code", "allow_pickle"):
            entry[key] = entry[key] or one[key]
    return list(found.values())


def in_plan(deployments: Iterable[Mapping[str, Any]], planned: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the models of a plan: `{model, path, kind, generated, source, trust_remote_code, allow_pickle}`.

    `planned` are the deployments' parts of the plan, which know where generated models lie.
    """
    made = [
        Asked("", one["model"], one["model_path"], "model").request()
        for one in planned
        if one["model"].startswith(SIMULATED_MODELS)
    ]
    found = together([*made, *(one.request() for deployment in deployments for one in asked(deployment))])
    return [{**one, "generated": one["model"].startswith(SIMULATED_MODELS)} for one in found]


def failures(where: str, deployment: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> list[Failure]:
    """Return what is refused about the code, and the adapters, that a deployment's models bring.

    `models` is what the server said, by folder.
    """
    found = []
    for one in asked(deployment):
        read = models.get(one.path) or {}
        code = read.get("remote_code")
        if code and one.trust_remote_code is None:
            fix = (
                "set trust_remote_code: true to have it fetched and run, after reading it, or false where the engine "
                "knows the model without it"
            )
            what = f"{where}, {one.title}: the model brings Python code of its own"
            found.append(Failure("plan.remote_code", what, str(code), fix))
        if one.kind == "adapter" and read and not read.get("failures"):
            found += _adapter_failures(f"{where}, {one.title}", deployment, read)
    return found


def _adapter_failures(where: str, deployment: Mapping[str, Any], read: Mapping[str, Any]) -> list[Failure]:
    found = []
    most, rank = deployment["lora"]["rank"], read.get("rank")
    if rank is not None and rank > most:
        what = f"{where}: the adapter has rank {rank}, and lora.rank is {most}"
        found.append(Failure("plan.adapter_rank", what, "", f"set lora.rank to at least {rank}"))
    base = str(read.get("base_model") or "")
    names = [deployment["model"], (of_source(deployment.get("source"), deployment["model"]) or {}).get("repository")]
    # The same model is known under several owners and as a folder; its own name is what they share.
    if base and base.rstrip("/").rpartition("/")[2].lower() not in [_last(name) for name in names if name]:
        what = f"{where}: the adapter was made for {base}, and the deployment serves {deployment['model']}"
        fix = "choose an adapter of this model, or correct base_model_name_or_path in a copy of the adapter"
        found.append(Failure("plan.adapter_base", what, "", fix))
    return found


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
