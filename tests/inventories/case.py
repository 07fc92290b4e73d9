"""What a generated inventory is: the files, what is wrong in it, and what the refusal has to say."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.unit.test_preflight import good_facts

GIB = 1024**3
WORKLOAD = {
    "prompt_tokens": {"p50": 800, "p99": 4000},
    "output_tokens": {"p50": 300, "p99": 1500},
    "concurrency": 64,
}
DEPLOYMENT = {
    "name": "chat",
    "model": "org/llama",
    "model_path": "/data/llama",
    "engine": "vllm",
    "gpus": 1,
    "workload": WORKLOAD,
}
DECLARED = {
    "gpuready_gpu_model": "h100-80gb-sxm",
    "gpuready_gpu_count": 8,
    "gpuready_stack": "cu128",
    "gpuready_deployments": [DEPLOYMENT],
}
SECOND = {**DEPLOYMENT, "name": "code", "model": "org/coder"}
Path_ = tuple[int | str, ...]


@dataclass(frozen=True)
class Case:
    """One generated inventory: a host's variables in one file, or whole files of an inventory."""

    kind: str
    key: str = ""
    """The key that the refusal names, as a sentence writes it."""
    says: tuple[str, ...] = ()
    """What else stands in the refusal: a piece of the value, what is allowed."""
    text: str = ""
    """The host's own file of variables."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the inventory beside or instead of the good ones, for what breaks a whole file."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the server is, where it differs from the recorded one."""
    evaluated: bool = False
    """Needs Ansible's templates: nothing but a real run can judge it."""


def changed(path: Path_, value: Any, base: Mapping[str, Any] = DECLARED) -> dict[str, Any]:
    """Return a good declaration in which one place has another value; an ellipsis takes the key away."""
    declared: Any = copy.deepcopy(dict(base))
    place = declared
    for part in path[:-1]:
        if isinstance(place, dict):
            place.setdefault(part, {})
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return declared  # type: ignore[no-any-return]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return variables as a file of variables."""
    return "---\n" + yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


def with_text(path: Path_, text: str, base: Mapping[str, Any] = DECLARED) -> str:
    """Return the file of a good declaration in which one place has a value spelled in YAML of its own."""
    return as_yaml(changed(path, "THE-PLACE", base)).replace("THE-PLACE", text)


def spelled(path: Path_) -> str:
    """Return a place as a sentence names it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def recorded_facts(**change: Any) -> dict[str, Any]:
    """Return the facts of an 8 x H100 server, as `gpuready facts show` gives them, with changes."""
    return {**good_facts(), **change}


def write_inventory(folder: Path, files: Mapping[str, bytes], variables: Mapping[str, Any]) -> None:
    """Write an inventory of hosts below one group; `files` are theirs, by name and ending: h1.yml, h2/main.yml."""
    hosts = [re.split(r"[./]", name)[0] for name in files]
    tree = {"all": {"children": {"servers": {"hosts": dict.fromkeys(hosts), "vars": dict(variables)}}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.yml").write_text(as_yaml(tree), encoding="utf-8")
    for name, content in files.items():
        path = folder / "host_vars" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


_CLASS_NAMES = r"(Error|Exception|Traceback|pydantic|NoneType|BaseModel|<class|object at 0x|AnsibleTagged|Undefined\b)"


def faults_of(sentence: str) -> list[str]:
    """Return what is wrong with a refusal as a sentence for people."""
    faults = []
    if not all(one.isprintable() for one in sentence):
        faults.append("raw control characters")
    if found := re.search(_CLASS_NAMES, sentence):
        faults.append(f"words of a programmer: {found[0]}")
    if not sentence.endswith((".", "?")):
        faults.append("no end")
    if len(sentence) > 700:
        faults.append(f"{len(sentence)} characters")
    return faults
