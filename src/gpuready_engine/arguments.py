"""Has an engine's own parser read a release's file, and answers with what it refuses.

The program's only word is the job as JSON: `{"engine": ..., "arguments": [the words after the program and its module],
"file": path of serve.yaml}`. It writes one JSON object, `{"checked", "reason", "version", "refused": [{"flag", "said",
"near"}]}`; where the parser could not be asked, `reason` says why.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuready_engine.parsing import LONGEST, NotChecked, Report


def checked(job: Mapping[str, Any]) -> dict[str, Any]:
    """Check one file; return the answer."""
    report, version = Report(), ""
    try:
        text = Path(job["file"]).read_text(encoding="utf-8")
        written = importlib.import_module("yaml").safe_load(text) or {}
        engine = importlib.import_module(f"gpuready_engine.{job['engine']}_arguments")
        version = engine.check(list(job["arguments"]), written, report)
    except (ImportError, OSError, RuntimeError, NotChecked) as error:
        if report.refused:
            return {"checked": True, "reason": "", "version": version, "refused": report.refused}
        reason = f"{type(error).__name__}: {error}"[:LONGEST]
        return {"checked": False, "reason": reason, "version": "", "refused": []}
    return {"checked": True, "reason": "", "version": version, "refused": report.refused}


def main() -> None:
    """Answer on standard output alone what was asked; all that the engine prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        json.dump(checked(json.loads(sys.argv[1])), answer)
    os._exit(0)  # threads that an engine started must not hold up the end
