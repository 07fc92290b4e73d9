"""A server's state file with a library and an nvidia-smi, as the tests of nvidia-smi drive them."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sim.hardware import install, state_file
from sim.hardware.state_file import Section

MIB = 1024 * 1024
NO_ANSWER = "[N/A]"


class Done(NamedTuple):
    """How a call of nvidia-smi ended, and all that it printed."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """Return what was printed, line by line."""
        return self.text.splitlines()


@dataclass(frozen=True)
class Machine:
    """A simulated server as a program on it sees it."""

    program: Path
    library: Path
    file: Path

    def run(self, *arguments: str) -> Done:
        """Run nvidia-smi."""
        done = subprocess.run(
            [str(self.program), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return Done(done.returncode, done.stdout + done.stderr)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that makes a program find this server's hardware."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.library), "GPUREADY_STANDIN_STATE": str(self.file)}

    def gpus(self) -> list[Section]:
        """Return what the state says of each GPU now."""
        state = state_file.read(self.file)
        return [state.effective(section.title) for section in state.gpus]

    def set(self, index: int, **values: object) -> None:
        """Set keys of one GPU."""
        with state_file.change(self.file) as state:
            for key, value in values.items():
                state.gpus[index].set(key, str(value))

    def add(self, index: int, key: str, value: str) -> None:
        """Give a key of one GPU one value more."""
        with state_file.change(self.file) as state:
            state.gpus[index].add(key, value)

    def csv(self, *fields: str) -> list[list[str]]:
        """Return what --query-gpu says, one list per GPU."""
        done = self.run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        assert done.code == 0, done.text
        return [line.split(", ") for line in done.lines]

    def xml(self) -> ET.Element:
        """Return what -q -x says."""
        done = self.run("-q", "-x")
        assert done.code == 0, done.text
        return ET.fromstring(done.text)  # noqa: S314 - from a program that the test runs

    def instances(self, index: int = 0) -> list[str]:
        """Return the GPU instances as `mig -lgi` tells them: `ID NAME START:SIZE`."""
        done = self.run("mig", "-lgi", "-i", str(index))
        rows = [line.strip("|").split() for line in done.lines if line.startswith(f"|   {index}")]
        return [f"{row[-2]} {row[2]} {row[-1]}" for row in rows]


def machine_of(preset: str, program: Path, library: Path, place: Path) -> Machine:
    """Make a described server in a folder."""
    file = place / "gpus.conf"
    file.write_text(install.describe(preset, "h100-sg-01").state)
    return Machine(program, library, file)


def bus_id(gpu: Section) -> str:
    """Return the PCI address as NVML writes it."""
    domain, rest = str(gpu.get("pci_address")).split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"
