"""What the engines need: GPUs, the CUDA toolkit, their environments, the models."""

from __future__ import annotations

import functools
from typing import Any

import yaml
from tests.verify.server import CHECKOUT, Server

CATALOG = CHECKOUT / "src" / "gpuready" / "catalog" / "gpus.yaml"


@functools.cache
def cards() -> dict[str, dict[str, Any]]:
    """Return the catalog's cards by each of their names."""
    page = yaml.safe_load(CATALOG.read_text(encoding="utf-8"))["cards"]
    return {name: card for key, card in page.items() for name in (key, *card["aliases"])}


def test_the_planned_gpus_are_on_the_bus(server: Server) -> None:
    gpus, planned = server.topic("gpus"), server.plan["host"]
    kinds = sorted(set(gpus.values()))
    card = cards().get(planned["gpu_model"])
    if card is None:
        server.fail(f"{planned['gpu_model']} is planned and not in {CATALOG.name}", "a card of the catalog")
    if len(gpus) != planned["gpu_count"] or not {kind.removeprefix("0x") for kind in kinds} <= set(card["pci"]):
        found = f"{len(gpus)} GPUs of NVIDIA are on the PCI bus ({', '.join(kinds) or 'none'})"
        expected = f"{planned['gpu_count']} of {planned['gpu_model']} ({', '.join(card['pci'])})"
        server.fail(found, expected, "see lspci -d 10de: and dmesg on the server, and ask its provider")


def test_the_cuda_toolkit_is_the_recorded_one(server: Server) -> None:
    cuda = server.topic("cuda")
    recorded = cuda["recorded"].get("version")
    planned = server.plan["host"]["cuda"]["version"]
    if recorded is None:
        server.fail("/var/lib/gpuready/cuda.json is missing", "the record of a toolkit that compiled for the card")
    if recorded != planned:
        server.fail(f"CUDA {recorded} was recorded", f"{planned}, as planned")
    if cuda["release"] != recorded:
        said = f"CUDA {cuda['release']}" if cuda["release"] else f"silent ({cuda['said']})"
        server.fail(f"{cuda['recorded'].get('nvcc')} is {said}", f"CUDA {recorded}, as planned and recorded")


def test_engine_environments_are_whole(server: Server) -> None:
    for planned in server.plan["engines"]:
        folder, now = planned["folder"], server.topic("engines")[planned["folder"]]
        rebuild = f"remove {folder} and {server.run_site}"
        marker = now["marker"]
        if not isinstance(marker, dict):
            server.fail(f"{folder}/gpuready-engine.json is missing or damaged", "the marker of a whole engine")
        if (
            not folder.endswith(f"-{str(marker.get('lock_sha256'))[:12]}")
            or marker.get("version") != planned["version"]
        ):
            server.fail(
                f"the marker in {folder} is another engine's", f"{planned['engine']} {planned['version']}", rebuild
            )
        if now["distributions"] != marker.get("packages"):
            found = f"{folder} has {now['distributions']} packages"
            server.fail(found, f"the {marker.get('packages')} of its lock", rebuild)
        if now["lacking_count"]:
            found = f"{now['lacking_count']} files of {folder} are not as installed, the first: {now['lacking'][0]}"
            server.fail(found, "every file as its package recorded it", rebuild)


def test_engines_python_has_the_planned_version(server: Server) -> None:
    for planned in server.plan["engines"]:
        now = server.topic("engines")[planned["folder"]]
        if now["version"] is None:
            found = f"{planned['folder']}/bin/python does not run as gpuready-engine ({now['said']})"
            server.fail(found, f"{planned['engine']} {planned['version']}")
        if now["version"].partition("+")[0] != planned["version"]:
            server.fail(
                f"{planned['folder']} holds {planned['engine']} {now['version'] or 'nowhere'}", planned["version"]
            )


def test_models_are_complete(server: Server) -> None:
    found = [problem for model in server.topic("models").values() for problem in model["broken"]]
    found += [
        f"{path} cannot be read by gpuready-engine"
        for model in server.topic("models").values()
        for path in model["unreadable"]
    ]
    server.demand(found, "every file whole and readable", f"copy the model again or {server.run_site}")


def test_models_cannot_be_written_by_the_engines(server: Server) -> None:
    found = [
        f"{path} can be written by gpuready-engine"
        for model in server.topic("models").values()
        for path in model["writable"]
    ]
    server.demand(found, "weights that only root changes", "take the right to write away (chown root, chmod go-w)")
