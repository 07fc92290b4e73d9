"""The two ends of an NVLink between GPUs: where one is down, so is the other."""

from __future__ import annotations

from sim.hardware.state_file import Section, State, as_number


def _joined_to(gpu: Section, address: str) -> list[int]:
    """Return the links of a GPU that lead to another one, in their order."""
    links = (value.split() for value in gpu.all("nvlink"))
    return [
        as_number(number) for number, remote, there in links if remote == "gpu" and there.lower() == address.lower()
    ]


def other_end(state: State, gpu: int, link: int) -> tuple[int, int] | None:
    """Return GPU and link at the other end; None where it leads to a switch or is not there."""
    here = state.gpus[gpu]
    remote, address = next(
        (value.split()[1:] for value in here.all("nvlink") if as_number(value.split()[0]) == link), ("", "")
    )
    if remote != "gpu":
        return None
    for index, there in enumerate(state.gpus):
        if (there.get("pci_address") or "").lower() == address.lower():
            back = _joined_to(there, here.get("pci_address") or "")
            rank = _joined_to(here, address).index(link)
            return (index, back[rank]) if rank < len(back) else None
    return None
