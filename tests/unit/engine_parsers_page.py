"""docs/engine-parsers.md: what the engines' real parsers said, from what is recorded in tests/unit/data/parsers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.unit import engine_mistakes, engine_parsers, golden_files

from gpuready.planning import flags

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
_HEAD = """\
# What the engines' own argument parsers say

<!-- Made by .venv/bin/python -m tests.unit.engine_parsers from tests/unit/data/parsers. -->

Before a release replaces another one, the engine's own argument parser reads its file, inside the engine's
environment, as the engines' user and without GPU and network (`src/gpuready/serving/arguments.py`,
`src/gpuready_engine/`). This page is what came of giving it every golden file (tests/unit/data/golden) and every
planted mistake (tests/unit/engine_mistakes.py), in environments made from the catalog's locks by hash, with nothing
built.

- What a parser accepts is then compared, value by value, with what the file says. So a switch that its reader
  skips, a name that it takes for a longer one and a list of which it takes the first element are refused too; these
  are marked "by comparison".
- vLLM keeps ranges and choices in its configuration's fields and applies them when it starts. They are asked as
  well, marked "by its fields".
- SGLang checks its arguments against model and GPU when it starts (`ServerArgs.__post_init__`); without a GPU its
  parser alone can be asked.
- TensorRT-LLM's wheels are not on PyPI, and its package cannot be imported without a driver. Its check is written
  from the source of 1.0.0 and was not run: such a server answers "not checked" with the reason, never "good".
"""


def page() -> str:
    """Return the page as Markdown."""
    found = engine_parsers.recorded()
    parts = [_HEAD, "## Golden files\n", _table(_GOLDEN, [_golden(one) for one in found])]
    parts.append(_not_asked(found))
    for engine in engine_mistakes.OF_ENGINE:
        parts += [f"## Mistakes: {NAMES[engine]}\n", _mistakes([one for one in found if one["engine"] == engine])]
    parts += ["## What no parser notices\n", _UNNOTICED, *_unnoticed(found)]
    return "\n".join(parts)


_GOLDEN = ("engine", "stack", "lock", "Python", "golden files", "accepted", "mistakes", "refused", "environment")
_UNNOTICED = """\
The engine would fail at its start with these, or serve otherwise. The planner checks the flags that it counts with;
what it does not refuse either is found by the start itself, after which the former release is back.
"""


def _golden(one: Mapping[str, Any]) -> list[object]:
    files, mistakes = one["golden"], one["mistakes"]
    accepted = sum(not said for said in files.values())
    refused = sum(bool(said) for said in mistakes.values())
    name = f"{NAMES[one['engine']]} {one['version']}"
    note = one["note"] or "the whole lock"
    return [name, one["stack"], one["lock"], one["python"], len(files), accepted, len(mistakes), refused, note]


def _not_asked(found: Sequence[Mapping[str, Any]]) -> str:
    asked = {(one["engine"], one["version"]) for one in found}
    missing = [
        f"{NAMES[engine]} {one['version']} ({stack})"
        for stack, entry in golden_files.stacks().items()
        for engine, one in entry["engines"].items()
        if (engine, one["version"]) not in asked
    ]
    return f"Not asked, for their files are not on PyPI: {', '.join(missing) or 'none'}.\n"


def _mistakes(found: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for one in found for name in one["mistakes"]))
    rows = [
        [f"`{name.rpartition(' (')[0]}`", name.rpartition(" (")[2][:-1], *(_told(one, name) for one in found)]
        for name in names
    ]
    return _table(("in the file", "what is wrong", *(str(one["version"]) for one in found)), rows)


def _told(one: Mapping[str, Any], name: str) -> str:
    if name not in one["mistakes"]:
        return "is right"
    said = one["mistakes"][name]
    if not said:
        return "**not noticed**"
    if any(
        words in said[0] for words in ("engine's parser took", "of which it is the beginning", "on the command line")
    ):
        return "by comparison"
    return "by its fields" if "Input should be" in said[0] else "refused"


def _unnoticed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for one in found:
        for mistake in engine_mistakes.of_release(one["engine"], one["version"]):
            said = one["mistakes"].get(engine_parsers.title(mistake))
            if said == []:
                failures = flags.split("", {mistake.flag: mistake.value}, one["engine"], one["version"]).failures
                release = f"{NAMES[one['engine']]} {one['version']}"
                written = f"`{mistake.flag}: {json.dumps(mistake.value)}`"
                rows.append([release, written, "yes" if failures else "**no**"])
    return [_table(("engine", "in the file", "refused by the planner, as a flag"), rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)
