"""`gpuready plan docs`: the worked examples, made anew with their pictures; for a checkout only."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuready.cli.reading import mapping_of
from gpuready.cli.screen import Screen
from gpuready.cli.verb import Call
from gpuready.outcome import Change, Failed, Failure, MachineCannot, Result

CHECKOUT = Path(__file__).resolve().parents[3]
FOLDER = CHECKOUT / "docs" / "planner"
PAGE = CHECKOUT / "docs" / "planner-examples.md"
_HEAD = """\
# Worked examples of the planner

<!-- Made by `gpuready plan docs` from planner/examples.yaml; a change belongs there, or into the planner. -->

Every figure below is computed, without a GPU and without a network; how, and how sure it is, stands in
[planner.md](planner.md). Each example begins with the command that makes it; `gpuready plan explain` with the same
options says more: what one more step would cost, and which rules of thumb hold.
"""
Make = Callable[[list[str]], Result]
"""Runs a command line of `gpuready` and returns what it came to."""


def pages(make: Make) -> dict[Path, str]:
    """Return the page of examples and its pictures, by path."""
    texts, found = [_HEAD], {}
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "picture.svg"
        for one in mapping_of(str(FOLDER / "examples.yaml"))["examples"]:
            words = ["--host", str(FOLDER / one["host"])] if "host" in one else shlex.split(one["words"])
            result = make(["plan", "make", *words, "--svg", str(drawn)])
            if result.failures:
                raise Failed(result.failures)
            found[FOLDER / f"{one['name']}.svg"] = drawn.read_text(encoding="utf-8")
            texts.append(_section(one, result.page.removesuffix(f"\n\n{drawn} is written.")))
    found[PAGE] = "\n".join(texts)
    return found


def _section(one: Mapping[str, Any], page: str) -> str:
    words = f"--host docs/planner/{one['host']}" if "host" in one else one["words"].strip()
    return (
        f"## {one['title']}\n\n{one['text'].strip()}\n\n    gpuready plan make {words}\n\n"
        f"![{one['title']}: memory of a GPU](planner/{one['name']}.svg)\n\n```\n{page}\n```\n"
    )


def run_docs(call: Call) -> Result:
    """Write what differs."""
    from gpuready.cli import main

    def make(words: list[str]) -> Result:
        return main.run(words, screen=Screen(unicode=True))[0]

    if not FOLDER.is_dir():
        what = "gpuready plan docs runs in a checkout only"
        raise MachineCannot(Failure("plan.checkout", what, "", "run it from the checkout's .venv"))
    result = Result()
    for path, text in pages(make).items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != text:
            result.changed = True
            result.diff.append(Change(str(path.relative_to(CHECKOUT)), before, text))
            if not call.check:
                path.write_text(text, encoding="utf-8")
    said = "would be written anew" if call.check else "are written anew"
    result.summary = f"the planner's examples {said if result.changed else 'are as they should be'}"
    return result
