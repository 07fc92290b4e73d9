"""SGLang's parser of arguments, without a GPU.

Read in the sources of 0.5.10.post1 and 0.5.23: srt/server_args.py (prepare_server_args), server_args_config_parser.py.
What it derives from model and GPU comes after the parser (ServerArgs.__post_init__), at the start alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from gpuready_engine.parsing import Report, check_apart, check_parsed, first_of, version_of


def check(arguments: list[str], written: Mapping[str, Any], report: Report) -> str:
    """Check a file; return the engine's version."""
    check_apart(arguments, written, report)
    parser = argparse.ArgumentParser(prog="sglang serve")
    first_of("sglang.srt.server_args:ServerArgs").add_cli_args(parser)
    merger = first_of(
        "sglang.srt.utils.server_args_config_parser:ConfigArgumentMerger",
        "sglang.srt.server_args_config_parser:ConfigArgumentMerger",
    )

    def parse() -> argparse.Namespace:
        return parser.parse_args(merger(parser).merge_config_with_args(arguments))

    found = check_parsed(parser, parse, written, report)
    for name in (name for name in written if name.startswith("json") and found is not None):
        try:
            json.loads(str(getattr(found, name.replace("-", "_"))))
        except ValueError as error:  # it reads it only when it loads the model
            report.add(name, f"it is not JSON: {error}")
    return version_of("sglang")
