"""What is looked at before anything is stopped for a new release, so that one that cannot start changes nothing.

The engine's own parser reads the rendered file in the engine's own environment; engine and model must be whole. What is
refused here leaves the running service as it is, and no release behind.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpuready.operations.targets import Target
from gpuready.outcome import Failure
from gpuready.serving import arguments, engine_store, models
from gpuready.serving.files import make_folder, write_text
from gpuready.serving.layout import Layout
from gpuready.serving.releases import FILE_MODE, FOLDER_MODE


def refusals(layout: Layout, target: Target) -> list[Failure]:
    """Return everything that would keep a replica from starting on its files."""
    engine = Path(str(target.plan["engine_folder"]))
    if why := engine_store.why_not_whole(engine, {}):
        what = f"{target.replica} cannot start: its engine in {engine} is {why}"
        return [Failure("release.engine", what, "", "run playbooks/engines.yml for this server")]
    broken = models.check(Path(str(target.plan["model_path"])))
    if broken:
        return broken
    with _staged(layout, target.files) as folder:
        return arguments.refused(target.plan, folder, target.part)


def is_there(target: Target) -> bool:
    """Say whether engine and model are on the server already, as they need not be in check mode."""
    return all(Path(str(target.plan[name])).is_dir() for name in ("engine_folder", "model_path"))


@contextmanager
def _staged(layout: Layout, files: Mapping[str, str]) -> Iterator[Path]:
    """Give a folder with the files of a release, readable for the engine as a release is; it goes afterwards."""
    above = layout.root / "run/gpuready/.staged"
    make_folder(above)
    folder = Path(tempfile.mkdtemp(dir=above))
    try:
        make_folder(folder, FOLDER_MODE, layout.engine_gid)
        for name, text in files.items():
            write_text(folder / name, text, FILE_MODE, layout.engine_gid)
        yield folder
    finally:
        shutil.rmtree(folder)
