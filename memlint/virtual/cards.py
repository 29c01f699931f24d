"""What is known of the cards that people train on, by the names that people give them.

The total differs by a few hundred MiB between drivers and systems (on Windows the driver hides nothing, on Linux it
keeps a part to itself), so each card has the total of one recent report, of a Linux driver where there was one, and the
range of all reports seen.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from memlint.errors import ConfigError

_MIB = 2**20

#: shared memory that a block can opt in to, and threads that a multiprocessor holds, by capability: CUDA C++
#: Programming Guide, table "Technical Specifications per Compute Capability"
_SHARED_PER_BLOCK = {
    (6, 0): 48 * 1024,
    (7, 0): 96 * 1024,
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
_THREADS = {
    (6, 0): 2048,
    (7, 0): 2048,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1536,
    (8, 9): 1536,
    (9, 0): 2048,
    (10, 0): 2048,
    (12, 0): 1536,
}

#: what the CUDA context and the kernels loaded so far take, for each multiprocessor. An estimate: see `context_bytes`.
CONTEXT_PER_MULTIPROCESSOR = 4_600_000
#: the share by which the estimate of the context may be off, up or down
CONTEXT_ERROR = 0.45
_CONTEXT_SOURCE = (
    "estimate of 4.4 MiB a multiprocessor, right within 45%: fitted to what is left of a process when torch's reserved "
    "memory is taken off, in public out-of-memory messages and measurements of torch 2 with lazily loaded kernels "
    "(RTX A4000 210 MiB: DengKaiCQ/VGGT-Long#6; RTX 4090 473 MiB: pinokiofactory/flux-webui#11; RTX 6000 Ada 426 MiB "
    "for the context alone, torch 2.10.0+cu130: unslothai/unsloth-zoo#1053; and, in logs without an address, "
    "T4 115 to 164, V100 379 to 389, RTX 3090 354 to 488, A100 505 to 522, H100 666 MiB); compare "
    "pytorch/pytorch#107667 (about 300 MB), #109888 (about 400 MB), #86509 (274 MiB lazy, 636 MiB eager)"
)


@dataclass(frozen=True, slots=True)
class Card:
    """One model of card.

    name: what to call it here. title: what torch.cuda.get_device_name says. total_bytes: what
    torch.cuda.get_device_properties(...).total_memory says, by `source`; totals_seen: the least and the most that any
    report said. capability: as torch.cuda.get_device_capability. multiprocessors: as multi_processor_count.
    """

    name: str
    title: str
    total_bytes: int
    totals_seen: tuple[int, int]
    capability: tuple[int, int]
    multiprocessors: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def bf16(self) -> bool:
        """Whether the card computes in bfloat16 itself: as torch.cuda.is_bf16_supported(including_emulation=False)."""
        return self.capability >= (8, 0)

    @property
    def tf32(self) -> bool:
        """Whether the card has TensorFloat-32: Ampere and later."""
        return self.capability >= (8, 0)

    @property
    def shared_bytes_per_block(self) -> int:
        """The shared memory that a block can opt in to."""
        return _SHARED_PER_BLOCK[self.capability]

    @property
    def threads_per_multiprocessor(self) -> int:
        return _THREADS[self.capability]


def _card(
    name: str,
    title: str,
    total: int,
    capability: tuple[int, int],
    multiprocessors: int,
    source: str,
    seen: tuple[int, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Card:
    every = (total, *seen)
    return Card(name, title, total, (min(every), max(every)), capability, multiprocessors, source, aliases)


# Where a source says "MiB", the report was torch's own, which drops the rest of the division (e.g. "15095MB").
# "deviceQuery" is the sample of that name in NVIDIA/cuda-samples, printed in a public repository or issue; behind it
# stands the version of CUDA that the driver had. Multiprocessors: from the same prints unless noted.
_CARDS = (
    _card(
        "t4",
        "Tesla T4",
        15_095 * _MIB,
        (7, 5),
        40,
        "deviceQuery on Colab, 15095 MiB; out-of-memory messages on Colab and Kaggle say 14.74 GiB",
        seen=(15_642_329_088, 15_843_721_216),  # deviceQuery: driver 12.5; driver 11.2
    ),
    _card(
        "p100",
        "Tesla P100-PCIE-16GB",
        16_280 * _MIB,
        (6, 0),
        56,
        "_CudaDeviceProperties print of torch 1.8.0+cu101, 16280 MiB",
        aliases=("p100-16gb",),
    ),
    _card(
        "v100-16gb",
        "Tesla V100-SXM2-16GB",
        16_928_342_016,
        (7, 0),
        80,
        "deviceQuery, driver 12.4",
        seen=(16_911_433_728, 16_936_927_232),  # deviceQuery: SXM2, driver 11.0; PCIe, driver 9.0
        aliases=("Tesla V100-PCIE-16GB",),
    ),
    _card(
        "v100-32gb",
        "Tesla V100-SXM2-32GB",
        34_072_559_616,
        (7, 0),
        80,
        "deviceQuery of the PCIe card, driver 12.4; out-of-memory messages say 31.73 GiB",
        seen=(34_058_272_768, 34_089_730_048),  # deviceQuery: PCIe, driver 10.1; SXM2, driver 11.4
        aliases=("Tesla V100-PCIE-32GB", "Tesla V100S-PCIE-32GB"),
    ),
    _card("a10", "NVIDIA A10", 23_609_475_072, (8, 6), 72, "deviceQuery, driver 12.2", aliases=("a10-24gb",)),
    _card(
        "a10g",
        "NVIDIA A10G",
        22_587 * _MIB,
        (8, 6),
        80,
        "_CudaDeviceProperties print, 22587 MiB",
        aliases=("a10g-24gb",),
    ),
    _card(
        "a30",
        "NVIDIA A30",
        24_164 * _MIB,
        (8, 0),
        56,  # 3,584 CUDA cores (NVIDIA A30 data sheet), 64 to a multiprocessor of capability 8.0
        "total_memory of torch 2.8.0+cu128, 24164 MiB",
        aliases=("a30-24gb",),
    ),
    _card("a40", "NVIDIA A40", 47_608_692_736, (8, 6), 84, "deviceQuery, driver 12.4", aliases=("a40-48gb",)),
    _card(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        42_298_834_944,
        (8, 0),
        108,
        "deviceQuery, driver 12.2: https://github.com/bottlerocket-os/bottlerocket/pull/3873",
        seen=(42_297_786_368, 42_405_855_232),  # deviceQuery of the PCIe card: driver 12.3; driver 13.0
        aliases=("NVIDIA A100-PCIE-40GB",),
    ),
    _card(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB",
        85_100_068_864,
        (8, 0),
        108,
        "deviceQuery, driver 12.5",
        seen=(84_974_239_744, 84_987_740_160),  # deviceQuery: PCIe, driver 12.4; SXM4, driver 12.2
        aliases=("NVIDIA A100 80GB PCIe",),
    ),
    _card("l4", "NVIDIA L4", 23_612_293_120, (8, 9), 58, "deviceQuery, driver 12.0", aliases=("l4-24gb",)),
    _card("l40s", "NVIDIA L40S", 47_576_711_168, (8, 9), 142, "deviceQuery, driver 12.4", aliases=("l40s-48gb",)),
    _card(
        "h100",
        "NVIDIA H100 80GB HBM3",
        85_028_896_768,
        (9, 0),
        132,
        "deviceQuery, driver 12.8",
        seen=(85_017_755_648, 85_045_477_376),  # deviceQuery: driver 13.0; driver 12.7
        aliases=("h100-sxm", "h100-sxm5", "h100-80gb", "h100-sxm-80gb"),
    ),
    _card(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        81_008 * _MIB,
        (9, 0),
        114,
        "_CudaDeviceProperties print, 81008 MiB",
        aliases=("h100-pcie-80gb",),
    ),
    _card(
        "h200",
        "NVIDIA H200",
        143_156 * _MIB,
        (9, 0),
        132,
        "_CudaDeviceProperties print, 143156 MiB; out-of-memory messages say 139.80 or 139.81 GiB",
        aliases=("h200-141gb", "h200-sxm"),
    ),
    _card(
        "b200",
        "NVIDIA B200",
        182_631 * _MIB,
        (10, 0),
        148,
        "_CudaDeviceProperties print, 182631 MiB; out-of-memory messages say 178.35 GiB",
        seen=(182_642 * _MIB,),  # another such print
        aliases=("b200-180gb", "b200-192gb"),
    ),
    _card(
        "rtx-2080-ti",
        "NVIDIA GeForce RTX 2080 Ti",
        11_012 * _MIB,
        (7, 5),
        68,
        "total_memory of torch 2.1, 11012 MiB",
        seen=(11_020 * _MIB,),  # torch 1.11.0+cu113
    ),
    _card(
        "rtx-3060",
        "NVIDIA GeForce RTX 3060",
        12_587_106_304,
        (8, 6),
        28,
        "deviceQuery, driver 12.4",
        seen=(11_901 * _MIB, 12_884_377_600),  # deviceQuery: driver 13.0; the most: under Windows
        aliases=("rtx-3060-12gb",),
    ),
    _card(
        "rtx-3070",
        "NVIDIA GeForce RTX 3070",
        8_197_111_808,
        (8, 6),
        46,
        "deviceQuery, driver 12.8",
        seen=(8_589_410_304,),  # deviceQuery under Windows
    ),
    _card(
        "rtx-3080",
        "NVIDIA GeForce RTX 3080",
        10_472_390_656,
        (8, 6),
        68,
        "deviceQuery of the card with 10 GB, driver 12.0",
        seen=(10_736_893_952,),  # deviceQuery under Windows
        aliases=("rtx-3080-10gb",),
    ),
    _card(
        "rtx-3090",
        "NVIDIA GeForce RTX 3090",
        25_414_860_800,
        (8, 6),
        82,
        "deviceQuery, driver 12.2",
        seen=(25_447_170_048,),  # deviceQuery, driver 11.8
    ),
    _card(
        "rtx-4060-ti",
        "NVIDIA GeForce RTX 4060 Ti",
        7_806 * _MIB,
        (8, 9),
        34,  # 4,352 CUDA cores (NVIDIA's specification), 128 to a multiprocessor of capability 8.9
        "total_memory of torch 2.12.1+cu130 on the card with 8 GB, 7806 MiB",
        aliases=("rtx-4060-ti-8gb",),
    ),
    _card(
        "rtx-4070",
        "NVIDIA GeForce RTX 4070",
        12_002 * _MIB,
        (8, 9),
        46,  # 5,888 CUDA cores (NVIDIA's specification), 128 to a multiprocessor of capability 8.9
        "total_memory of torch 2.5.1+cu124, 12002 MiB",
        seen=(11_994 * _MIB, 12_282 * _MIB),  # torch 1.13.0+cu117; torch 2.4.1+cu124
    ),
    _card(
        "rtx-4080",
        "NVIDIA GeForce RTX 4080",
        16_049 * _MIB,
        (8, 9),
        76,
        "_CudaDeviceProperties print, 16049 MiB",
        seen=(16_375 * _MIB,),  # torch 1.13.1+cu116 under Windows
    ),
    _card(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        25_250_627_584,
        (8, 9),
        128,
        "deviceQuery, driver 13.0",
        # deviceQuery, driver 12.6, with error correction on, as it seems; and driver 12.1, under Windows
        seen=(24_146_083_840, 25_756_696_576),
    ),
    _card(
        "rtx-5080",
        "NVIDIA GeForce RTX 5080",
        15_840 * _MIB,
        (12, 0),
        84,
        "total_memory in a log of training, 15840 MiB",
        seen=(16_303 * _MIB,),  # torch 2.9.0+cu130, probably under Windows
    ),
    _card(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        33_660_534_784,
        (12, 0),
        170,
        "deviceQuery, driver 13.0; out-of-memory messages say 31.35 GiB",
        seen=(33_668_857_856,),  # deviceQuery, driver 13.0
    ),
    _card(
        "rtx-a4000",
        "NVIDIA RTX A4000",
        15_985 * _MIB,
        (8, 6),
        48,
        "an out-of-memory message that says 15.61 GiB: https://github.com/DengKaiCQ/VGGT-Long/issues/6",
        seen=(17_174_683_648,),  # deviceQuery under Windows
    ),
    _card("rtx-a5000", "NVIDIA RTX A5000", 25_402_343_424, (8, 6), 64, "a print of cudaGetDeviceProperties"),
    _card(
        "rtx-a6000",
        "NVIDIA RTX A6000",
        51_160_023_040,
        (8, 6),
        84,
        "deviceQuery, driver 12.7",
        seen=(48_676 * _MIB,),  # an unnamed tool's print, 48676 MB
    ),
    _card(
        "rtx-6000-ada",
        "NVIDIA RTX 6000 Ada Generation",
        50_865_307_648,
        (8, 9),
        142,
        "total_memory of torch 2.10.0+cu130: https://github.com/unslothai/unsloth-zoo/pull/1053",
        seen=(48_622 * _MIB,),  # another print of torch
        aliases=("6000-ada",),
    ),
)

CARDS: dict[str, Card] = {each.name: each for each in _CARDS}


def _key(name: str) -> str:
    """`name` without what people write or leave out: case, punctuation, the makers' words."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"nvidia|geforce|tesla|quadro|rtx|generation", "", bare)


_BY_KEY = {_key(name): each for each in _CARDS for name in (each.name, each.title, *each.aliases)}


def card(name: str) -> Card:
    """The card that `name` means: "t4", "RTX3060", "a100-80gb", or as torch.cuda.get_device_name has it.

    "h100" is the SXM card. Raises ConfigError where no card, or more than one, goes by the name.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    started = sorted({each.name for known, each in _BY_KEY.items() if key and known.startswith(key)})
    if len(started) == 1:
        return CARDS[started[0]]
    if started:
        raise ConfigError(f"there is more than one card {name!r}: write {' or '.join(started)}")
    close = dict.fromkeys(_BY_KEY[known].name for known in difflib.get_close_matches(key, _BY_KEY, n=5, cutoff=0.5))
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(CARDS)}"
    raise ConfigError(f"no card {name!r} is known here: {hint}")


def context_bytes(on: Card, torch_version: str) -> tuple[int, str]:
    """How much of the card the CUDA context and its kernels take, outside of torch's allocator, and where that is from.

    What NVML counts for the process, less what torch has reserved. The context keeps stacks and other room for each
    multiprocessor, so cards with more of them lose more. From cuDNN, cuBLAS and NCCL more may come; with
    CUDA_MODULE_LOADING=EAGER much more does. No version of torch from 2.1 on is known to differ from the others.
    """
    return on.multiprocessors * CONTEXT_PER_MULTIPROCESSOR, f"{_CONTEXT_SOURCE}; taken for torch {torch_version}"
