"""The stand-in library and its program for this very machine, compiled once and kept in the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sim.hardware import install
from sim.machine.common import CHECKOUT

CACHE = CHECKOUT / ".cache/standin"


def library() -> Path:
    """Return the NVML library."""
    return install.compile_library(CACHE)


def program() -> Path:
    """Return the program `gpus-standin`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    main = CACHE / "check.c"
    main.write_text(
        '#include "state_standin.h"\n#include <stdio.h>\nstatic struct state a, b;\n'
        "int main(int c, char **v) { (void)c; const char *p = state_read(v[2], &a, &b);"
        ' if (p) fprintf(stderr, "gpus-standin: %s: %s.\\n", v[2], p); return p != 0; }\n'
    )
    sources = [str(file) for file in install.SOURCES.glob("state_*.c")]
    subprocess.run(
        [
            "gcc",
            "-std=c11",
            "-D_DEFAULT_SOURCE",
            "-O1",
            f"-I{install.SOURCES}",
            "-o",
            str(CACHE / "gpus-standin"),
            str(main),
            *sources,
        ],
        check=True,
    )
    return CACHE / "gpus-standin"
