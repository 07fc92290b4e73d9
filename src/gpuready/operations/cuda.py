"""The CUDA toolkit: proof that it has the wanted version and compiles for the card."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpuready.operations import packages
from gpuready.operations.machine import Machine
from gpuready.outcome import Change, Exit, Failure, Result
from gpuready.serving.files import read_json

RECORD = "/var/lib/gpuready/cuda.json"

KERNEL = """\
__global__ void scale(float *x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}
"""


@dataclass(frozen=True)
class Wanted:
    """What the plan asks of the toolkit."""

    version: str
    """Major and minor, e.g. 12.4."""
    sm: str
    """The card's architecture, e.g. sm_90."""


def install(machine: Machine, needed: packages.Wanted, wanted: Wanted, check: bool) -> Result:
    """Install the toolkit's packages and prove the toolkit; `check` cannot prove what is not installed."""
    result = packages.ensure(machine, needed, check)
    if check and result.data["installed"]:
        result.undecided.append(f"whether nvcc is CUDA {wanted.version} and compiles a kernel for {wanted.sm}")
        return result
    proof = verify(machine, wanted, check)
    result.include(proof)
    result.data |= proof.data
    result.exit = proof.exit
    result.summary = f"{result.summary}; {proof.summary}"
    return result


def verify(machine: Machine, wanted: Wanted, check: bool) -> Result:
    """Say whether nvcc is the wanted one and turns a kernel into machine code of the card.

    The compilation is repeated only when nvcc, the version or the card changed since it was last proved.
    """
    nvcc = find_nvcc(machine, wanted.version)
    if nvcc is None:
        return _no(
            Failure("cuda.no_nvcc", f"nvcc of CUDA {wanted.version} is not on this server", "", "run the stage cuda")
        )
    shown = machine.run([nvcc, "--version"])
    found = re.search(r"release (\d+\.\d+)", shown.out)
    if not found or found.group(1) != wanted.version:
        what = f"{nvcc} is CUDA {found.group(1) if found else 'of an unknown version'}, the plan wants {wanted.version}"
        fix = "install the wanted toolkit, or set a gpuready_stack whose toolkit is this one"
        return _no(Failure("cuda.version", what, "" if found else shown.complaint, fix))
    proof = {"nvcc": nvcc, "version": wanted.version, "sm": wanted.sm, "build": _build(shown.out)}
    data = {**proof, "compiled": True}
    # A record that is not whole proves nothing.
    if read_json(machine.path(RECORD)) == proof:
        return Result(data=data, summary=f"CUDA {wanted.version} compiles for {wanted.sm} (proved before)")
    with tempfile.TemporaryDirectory(prefix="gpuready-cuda-") as folder:
        source, binary = Path(folder) / "scale.cu", Path(folder) / "scale.cubin"
        source.write_text(KERNEL, encoding="utf-8")
        compiled = machine.run([nvcc, "-cubin", f"-arch={wanted.sm}", "-o", str(binary), str(source)])
        is_elf = binary.exists() and binary.read_bytes()[:4] == b"\x7fELF"
    if compiled.code or not is_elf:
        what = f"{nvcc} does not compile a kernel for {wanted.sm}"
        why = compiled.complaint if compiled.code else "its output is not machine code"
        return _no(
            Failure(
                "cuda.compile", what, why, "look for a missing host compiler, or a card that this CUDA does not know"
            )
        )
    result = Result(changed=True, data=data, summary=f"CUDA {wanted.version} compiles for {wanted.sm}")
    result.diff.append(Change(RECORD, machine.read(RECORD) or "", json.dumps(proof) + "\n"))
    if not check:
        machine.write(RECORD, json.dumps(proof) + "\n")
    return result


def find_nvcc(machine: Machine, version: str) -> str | None:
    """Return the nvcc of this version: NVIDIA's packages put it beside the others, the distribution's on the PATH."""
    for path in (f"/usr/local/cuda-{version}/bin/nvcc", "/usr/local/cuda/bin/nvcc"):
        if machine.path(path).exists():
            return path
    return machine.which("nvcc")


def _build(shown: str) -> str:
    lines = shown.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _no(failure: Failure) -> Result:
    return Result(failures=[failure], exit=Exit.VERIFY_NO, summary=failure.sentence())
