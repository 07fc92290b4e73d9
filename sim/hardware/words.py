"""Words that descriptions use where NVML has numbers; the numbers are those of NVIDIA's pynvml."""

from __future__ import annotations

BRANDS = {
    "unknown": 0,
    "quadro": 1,
    "tesla": 2,
    "nvs": 3,
    "grid": 4,
    "geforce": 5,
    "titan": 6,
    "quadro_rtx": 12,
    "nvidia_rtx": 13,
    "nvidia": 14,
    "geforce_rtx": 15,
    "titan_rtx": 16,
}
ARCHITECTURES = {"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}
FABRIC_STATES = {"not_supported": 0, "not_started": 1, "in_progress": 2, "completed": 3}
MIG_PROFILES = {
    "1_slice": 0,
    "2_slice": 1,
    "3_slice": 2,
    "4_slice": 3,
    "7_slice": 4,
    "8_slice": 5,
    "6_slice": 6,
    "1_slice_rev1": 7,
    "2_slice_rev1": 8,
    "1_slice_rev2": 9,
    "1_slice_gfx": 10,
    "2_slice_gfx": 11,
    "4_slice_gfx": 12,
    "1_slice_no_me": 13,
    "2_slice_no_me": 14,
    "1_slice_all_me": 15,
    "2_slice_all_me": 16,
    "3_slice_gfx": 17,
}
