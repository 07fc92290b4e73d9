"""Reads descriptions of simulated hardware: servers (presets/), GPUs (gpus/) and MIG tables (mig/).

A mistake is refused in one sentence that names file and key.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from sim.hardware.contradictions import check_gpu, check_server
from sim.hardware.model import Gpu, MigTable, Server
from sim.hardware.refusal import RefusalError

HERE = Path(__file__).resolve().parent
ENDING = ".yaml"
Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML with whole numbers and without surprises: 12.4 and 0000:05:00.0 are texts, a key stands once."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class's own form


for _tag, _pattern, _first in (
    ("null", r"~|null", "~n"),
    ("bool", r"true|false", "tf"),
    ("int", r"-?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[Any] = set()
    for key, _value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is one word", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{_shown(key.value)} stands twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def names(folder: str) -> list[str]:
    """Return the names of our own descriptions in `presets`, `gpus` or `mig`."""
    return sorted(file.stem for file in (HERE / folder).glob(f"*{ENDING}"))


def load_server(name: str) -> Server:
    """Return a server by the name of one of our presets, or by the path of an operator's own YAML file."""
    own = name.endswith((ENDING, ".yml")) or "/" in name
    file = Path(name) if own else _ours("presets", name, "preset")
    data = _read(file)
    if "gpu" in data:
        data["gpu"] = _gpu(data["gpu"], file)
    server = _validate(Server, data, file)
    check_server(server, file)
    return server


def load_gpu(name: str, where: str = "") -> Gpu:
    """Return one of our GPUs by its name; `where` tells in a refusal who names it."""
    file = _ours("gpus", name, "GPU", where)
    return _gpu_of(_read(file), file)


def _gpu(data: Any, file: Path) -> Any:
    """Return the GPU that a server names or holds; what is neither is refused with the server."""
    if isinstance(data, str):
        return load_gpu(data, f"{file}: gpu: ")
    return _gpu_of(data, file, "gpu.") if isinstance(data, dict) else data


def _gpu_of(data: dict[str, Any], file: Path, inside: str = "") -> Gpu:
    mig = data.get("mig")
    if isinstance(mig, dict) and isinstance(mig.get("table"), str):
        table = _ours("mig", mig["table"], "MIG table", f"{file}: {inside}mig.table: ")
        data = {**data, "mig": {**mig, "table": _validate(MigTable, _read(table), table)}}
    gpu = _validate(Gpu, data, file, inside)
    check_gpu(gpu, file, inside)
    return gpu


def _ours(folder: str, name: str, what: str, where: str = "") -> Path:
    if name not in names(folder):
        raise RefusalError(f"{where}there is no {what} {name!r:.60}; known are: {', '.join(names(folder))}")
    return HERE / folder / f"{name}{ENDING}"


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader
    except OSError as error:
        raise RefusalError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RefusalError(f"{file} is not UTF-8 text") from None
    except RecursionError:
        raise RefusalError(f"{file} is not YAML: it is nested too deeply") from None
    except (LookupError, AttributeError, TypeError):  # what PyYAML raises about `!!bool maybe` and the like
        raise RefusalError(f"{file} is not YAML: a value is not of the type that its tag says") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise RefusalError(f"{file} is not YAML{line}: {problem}") from None
    if not isinstance(data, dict):
        raise RefusalError(f"{file} is not a description: it holds no `key: value` at its top")
    return data


def _validate(model: type[Model], data: Any, file: Path, inside: str = "") -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RefusalError(f"{file}: {_problem(model, first, inside)}") from None


def _problem(model: type[BaseModel], error: Mapping[str, Any], inside: str) -> str:
    place: Sequence[str | int] = error["loc"]
    key = inside + _dotted(place)
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}; allowed here are: {', '.join(sorted(_keys(model, place[:-1])))}"
    if error["type"] == "missing":
        return f"key {key} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    shown = error["input"]
    value = f" = {shown!r:.60}" if isinstance(shown, str | int | bool) else ""
    return f"{key}{value}: {message[0].lower()}{message[1:]}"


def _shown(text: str) -> str:
    """Return a key as it may stand in a sentence: short, and nothing that a terminal acts on."""
    return text if text.isprintable() and len(text) <= 60 else f"{text!r:.60}"


def _dotted(place: Sequence[str | int]) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{_shown(step)}"
    return text.removeprefix(".")


def _keys(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Return the keys that the part of a model at a place has."""
    for step in place:
        if step in model.model_fields:
            part = _part(model.model_fields[str(step)].annotation)
            model = part or model
    return list(model.model_fields)


def _part(annotation: Any) -> type[BaseModel] | None:
    """Return the model within an annotation such as `list[Device]` or `Nvlinks | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = (_part(inner) for inner in getattr(annotation, "__args__", ()))
    return next((part for part in parts if part is not None), None)
