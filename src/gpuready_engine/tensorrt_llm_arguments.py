"""TensorRT-LLM's reading of its command line and its file, where its libraries can be loaded.

Read in its source, 1.0.0: commands/serve.py (serve, get_llm_args), llmapi/llm_args.py (TorchLlmArgs,
update_llm_args_with_extra_dict). Not run: its wheels are not on PyPI, and without a driver they cannot be imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from gpuready_engine.parsing import Report, deep, first_of, nearest, says_the_same, sentences, shown, version_of


def check(arguments: list[str], written: Mapping[str, Any], report: Report) -> str:
    """Check a file and the command line beside it; return the engine's version."""
    version = version_of("tensorrt_llm", "tensorrt-llm")
    serve = first_of("tensorrt_llm.commands.serve:serve")
    refusal = first_of("click:ClickException")
    try:
        given = serve.make_context("trtllm-serve", list(arguments)).params
    except refusal as error:
        report.add("", error.format_message())
        return version
    # Without a GPU it would ask for the number of them and stop.
    base, _ = first_of("tensorrt_llm.commands.serve:get_llm_args")(
        model=given["model"], backend=given["backend"], gpus_per_node=8
    )
    base.pop("build_config", None)  # as it does itself for this backend
    record = first_of("tensorrt_llm.llmapi.llm_args:TorchLlmArgs")
    update = first_of("tensorrt_llm.commands.serve:update_llm_args_with_extra_dict")
    try:
        found = record(**update(base, copy.deepcopy(dict(written))))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        for where, said in sentences(error):
            near = "" if where.split(".")[0] in record.model_fields else nearest(where, record.model_fields)
            report.add(where, said, near)
        return version
    for name, value in _leaves(written):
        taken = deep(found, name)
        if not says_the_same(value, getattr(taken, "value", taken)):
            report.add(name, f"the file says {shown(value)}, and the engine took {shown(taken)}")
    return version


def _leaves(written: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings by its dotted name."""
    for name, value in written.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield above + name, value
