"""What a description may hold: a server (presets/), a GPU (gpus/), a table of MIG profiles (mig/)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sim.hardware import words

MAX_GPUS = 16
MAX_LINKS = 36


class Part(BaseModel):
    """A part of a description: it has no other keys than these, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _text(length: int, pattern: str = r"[!-~]([ -~]*[!-~])?", what: str = "one line of printable ASCII") -> Any:
    """Return the form of a text, which the state file has `length` characters for."""

    def check(text: str) -> str:
        if len(text) > length:
            raise ValueError(f"longer than {length} characters")
        if not re.fullmatch(pattern, text):
            raise ValueError(f"not {what}")
        return text

    return AfterValidator(check)


def _word(numbers: Mapping[str, int]) -> Any:
    """Return the form of a word that has a number in NVML."""

    def check(word: str) -> str:
        if word not in numbers:
            raise ValueError(f"none of {', '.join(numbers)}")
        return word

    return AfterValidator(check)


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Number16 = Annotated[int, Field(ge=0, le=0xFFFF)]
Address = Annotated[str, _text(15, r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", "a PCI address like 0000:1b:00.0")]
Cpus = Annotated[str, _text(63, r"\d+(-\d+)?(,\d+(-\d+)?)*", "CPUs like 0-31,64-95")]
Uuid = Annotated[str, _text(36, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "a UUID in lower case")]
Sources = Annotated[list[str], Field(min_length=1)]


class Driver(Part):
    """The driver that a server with this GPU comes with."""

    version: Annotated[str, _text(79, r"\d+\.\d+(\.\d+)?", "a version like 550.163.01")]
    nvml: Annotated[str, _text(79)]
    cuda: Annotated[str, _text(4, r"\d+\.\d", "a version like 12.4")]


class GpuPci(Part):
    """The GPU as a PCI device; `generation` is the idle GPU's, which may be lower than its highest."""

    device: Number16
    subsystem_vendor: Number16
    subsystem_device: Number16
    class_code: Annotated[int, Field(ge=0x030000, le=0x03FFFF)]
    revision: Annotated[int, Field(ge=0, le=0xFF)]
    generation: Annotated[int, Field(ge=1, le=6)] | None = None
    generation_max: Annotated[int, Field(ge=1, le=6)]
    width: Literal[1, 2, 4, 8, 16]
    width_max: Literal[1, 2, 4, 8, 16]


class Memory(Part):
    """Memory on the card; what is used without any process is what the driver itself takes."""

    total_bytes: Annotated[int, Field(gt=0, lt=1 << 53)]
    reserved_bytes: Count | None = None
    used_bytes: Count = 0
    bar1_bytes: Count | None = None
    bar1_used_bytes: Count | None = None
    bus_bits: Count | None = None


class Clocks(Part):
    """Clocks in MHz: of an idle GPU, and the highest."""

    graphics: Count | None = None
    sm: Count | None = None
    memory: Count | None = None
    video: Count | None = None
    graphics_max: Count | None = None
    sm_max: Count | None = None
    memory_max: Count | None = None
    video_max: Count | None = None


class Power(Part):
    """Power in milliwatts: of an idle GPU, and the limits. A new server has its default as limit."""

    idle: Count | None = None
    limit: Count | None = None
    limit_min: Count | None = None
    limit_max: Count | None = None


class Temperature(Part):
    """Temperatures in degrees Celsius: of an idle GPU and its memory, and the thresholds."""

    gpu: Count | None = None
    memory: Count | None = None
    slowdown: Count | None = None
    shutdown: Count | None = None
    gpu_max: Count | None = None
    memory_max: Count | None = None


class NvlinkOfGpu(Part):
    """The NVLinks that the card has, whether or not a server connects them."""

    version: Annotated[int, Field(ge=1, le=7)]
    links: Annotated[int, Field(ge=1, le=MAX_LINKS)]
    mbps: Annotated[int, Field(gt=0, lt=1 << 32)]


class Profile(Part):
    """A MIG profile. `derived` tells that some of its figures were not seen but follow from others."""

    profile: Annotated[str, _word(words.MIG_PROFILES)]
    id: Annotated[int, Field(ge=0, le=255)]
    slices: Annotated[int, Field(ge=1, le=8)]
    max: Annotated[int, Field(ge=1, le=12)]
    multiprocessors: Number16
    copy_engines: Number16
    decoders: Number16
    encoders: Number16
    jpegs: Number16
    ofas: Number16
    memory_mib: Annotated[int, Field(gt=0, lt=1 << 31)]
    size: Annotated[int, Field(ge=1, le=12)]
    starts: Annotated[list[Annotated[int, Field(ge=0, le=11)]], Field(min_length=1, max_length=12)]
    derived: bool = False


class MigTable(Part):
    """The MIG profiles of a card by name, and the memory slots that their placements count in."""

    sources: Sources
    slots: Annotated[int, Field(ge=1, le=12)]
    profiles: Annotated[
        dict[Annotated[str, _text(31, r"\dg\.\d+gb([+-][a-z.]+)?", "a profile like 1g.10gb+me")], Profile],
        Field(min_length=1, max_length=20),
    ]


class Mig(Part):
    """How the card does MIG. mirrored: the ids of GPU instances count the halves the other way round."""

    table: MigTable
    max_devices: Annotated[int, Field(ge=1, le=12)]
    needs_reset: bool
    mode_persists: bool
    mirrored: bool = False


class Gpu(Part):
    """A GPU. A key that is left out is not known, or not there on such a card: NVML then answers Not Supported."""

    sources: Sources
    name: Annotated[str, _text(95)]
    driver: Driver
    brand: Annotated[str, _word(words.BRANDS)] | None = None
    architecture: Annotated[str, _word(words.ARCHITECTURES)]
    compute_capability: Annotated[str, _text(4, r"\d+\.\d", "a compute capability like 9.0")]
    cores: Count | None = None
    vbios: Annotated[str, _text(31)] | None = None
    board_part_number: Annotated[str, _text(31)] | None = None
    pci: GpuPci
    memory: Memory
    clocks_mhz: Clocks = Clocks()
    performance_state: Annotated[int, Field(ge=0, le=15)] | None = None
    power_milliwatts: Power = Power()
    temperature_celsius: Temperature = Temperature()
    fan_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    compute_mode: Annotated[str, _word(words.COMPUTE_MODES)] = "default"
    persistence_mode: bool = True
    ecc: bool | None = None
    bad_memory: Literal["remapped_rows", "retired_pages"] | None = None
    recovery_action: bool = False
    pcie_peer_to_peer: bool | None = None
    nvlink: NvlinkOfGpu | None = None
    mig: Mig | None = None


class GpuPlace(Part):
    """Where one GPU of a server is. GPUs of one root share a host bridge, those of one switch a PCIe switch."""

    address: Address
    numa_node: Annotated[int, Field(ge=0, le=255)] | None = None
    root: Annotated[int, Field(ge=0, le=255)]
    switch: Annotated[int, Field(ge=0, le=255)] | None = None
    module: Annotated[int, Field(ge=0, le=255)] | None = None
    minor: Annotated[int, Field(ge=0, le=255)] | None = None


class Fabric(Part):
    """What the GPUs know about the fabric of their NVSwitches."""

    state: Annotated[str, _word(words.FABRIC_STATES)]
    clique: Count
    cluster: Uuid
    health_mask: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None


class Nvlinks(Part):
    """How a server connects the NVLinks of its GPUs; exactly one of the first three.

    switches: every GPU has that many links to each NVSwitch. mesh: every GPU has that many to each other GPU. links: by
    GPU, for each of its links in order, the index of the GPU or the address of the NVSwitch at its other end. An
    NVSwitch that the server does not see on its PCI bus has the address ffff:ff:00.0.
    """

    switches: dict[Address, Annotated[int, Field(ge=1, le=MAX_LINKS)]] | None = None
    mesh: Annotated[int, Field(ge=1, le=MAX_LINKS)] | None = None
    links: dict[int, list[int | str]] | None = None
    fabric: Fabric | None = None


class Device(Part):
    """Another PCI device."""

    what: str
    address: Address
    vendor: Number16
    device: Number16
    class_code: Annotated[int, Field(ge=0, le=0xFFFFFF)]
    revision: Annotated[int, Field(ge=0, le=0xFF)] = 0
    subsystem_vendor: Number16 | None = None
    subsystem_device: Number16 | None = None
    numa_node: Annotated[int, Field(ge=0, le=255)] | None = None


class Server(Part):
    """A server: which GPUs, where they are, how they are connected, and its other PCI devices."""

    description: Annotated[str, _text(200)]
    sources: Sources
    gpu: Gpu
    numa: dict[Annotated[int, Field(ge=0, le=255)], Cpus] = {}
    gpus: Annotated[list[GpuPlace], Field(min_length=1, max_length=MAX_GPUS)]
    nvlink: Nvlinks | None = None
    devices: list[Device] = []
