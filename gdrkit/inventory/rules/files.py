"""Rules about files that do not go directly into GPU memory: file systems, block devices, BAR1 and udev."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.inventory import cufile_json
from gdrkit.inventory.rules.base import Answer, Look, rule
from gdrkit.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from gdrkit.host import BlockDevice, Mount

__all__ = ["RULES"]

_NETWORK = ("lustre", "nfs", "nfs4", "wekafs", "beegfs", "gpfs", "scatefs", "virtiofs")
_BLOCK = ("ext4", "xfs")
_BLOCK_BYTES_MAX = 4096
_WITHOUT_DIRECT_IO = ("overlay", "tmpfs", "ramfs", "zfs", "ecryptfs")
_BAR1_BYTES_MIN, _BAR1_FREE_MIN = GIB, 64 * MIB


def _obstacle(mount: Mount, block: BlockDevice | None) -> str | None:
    """Return why cuFile cannot directly access files of this mount; None if no obstacle is known."""
    if mount.kind in _NETWORK:
        return None
    if mount.kind not in _BLOCK:
        return f"{mount.kind} is not supported"
    if mount.kind == "ext4" and "data=ordered" not in mount.options:
        return "ext4 whose mount does not say data=ordered"
    if block is not None and block.mapper:
        return f"device mapper ({block.mapper.partition('-')[0]})"
    if block is not None and block.raid_level not in (None, "raid0", "raid1", "raid10"):
        return str(block.raid_level)
    return "integrity metadata" if block is not None and block.has_integrity else None


@rule(
    code="file-system",
    title="no mount that cuFile can reach directly",
    why="Direct transfers work on XFS, on ext4, and on some cluster file systems; elsewhere cuFile falls back. For "
    "ext4 it looks for data=ordered in the mount table, where the kernel shows it only if it was asked for.",
    remedy="mount ext4 with -o data=ordered, or use XFS, on a plain NVMe namespace or partition; not below overlay, "
    "device mapper or RAID 5",
    reads="/proc/self/mountinfo, /sys/dev/block, /sys/class/block/*/{md/level,integrity}",
)
def _file_system(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    found = {mount.mount_point: _obstacle(mount, block) for mount, block in look.file_systems()}
    if not found:
        return look.not_run("no mount can be seen")
    good = [place for place, obstacle in found.items() if obstacle is None]
    bad = "; ".join(f"{place}: {obstacle}" for place, obstacle in found.items() if obstacle)
    return look.passes(f"usable: {', '.join(good)}" + (f"; not {bad}" if bad else "")) if good else look.fails(bad)


@rule(
    code="direct-io",
    title="no mount takes direct I/O at 4 KiB",
    why="cuFile opens with O_DIRECT and needs offset and size at multiples of 4 KiB to go directly; what is not "
    "takes a bounce buffer.",
    remedy="use a file system with O_DIRECT on a device with logical blocks of at most 4 KiB, and align file "
    "offsets and sizes to 4 KiB",
    reads="/proc/self/mountinfo, /sys/class/block/*/queue/logical_block_size",
)
def _direct_io(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    good, bad = [], []
    for mount, block in look.file_systems():
        size = None
        if block is not None:
            size = look.tree.number(f"/sys/class/block/{block.name}/queue/logical_block_size")
            look.saw(f"/sys/class/block/{block.name}/queue/logical_block_size", size)
        if mount.kind in _WITHOUT_DIRECT_IO:
            bad.append(f"{mount.mount_point}: {mount.kind}")
        elif size is not None and size > _BLOCK_BYTES_MAX:
            bad.append(f"{mount.mount_point}: blocks of {size} bytes")
        elif size is not None or mount.kind in _NETWORK:
            good.append(mount.mount_point)
    if good:
        return look.passes(f"aligned direct I/O fits on {', '.join(good)}")
    return look.fails("; ".join(bad)) if bad else look.not_run("no mount can be seen")


@rule(
    code="bar1-small",
    title="BAR1 is small or used up",
    why="NICs and NVMe reach GPU memory through this window; what does not fit cannot be registered.",
    remedy="switch on 'above 4G decoding' and resizable BAR in the firmware; keep max_device_pinned_mem_size_kb of "
    "cufile.json below BAR1; release registrations",
    reads="NVML BAR1 total and free; /sys/bus/pci/devices/*/resource; max_device_pinned_mem_size_kb of cufile.json",
)
def _bar1(look: Look) -> Answer:
    sizes = dict(_bar1_sizes(look))
    if not sizes:
        return look.not_run("no GPU whose BAR1 can be seen")
    _, config = look.config()
    pinned_kb = cufile_json.value(config, "properties", "max_device_pinned_mem_size_kb")
    bad = []
    for address, (total, free) in sizes.items():
        look.saw(f"BAR1 of {address}", format_bytes(total) + ("" if free is None else f", free {format_bytes(free)}"))
        if total < _BAR1_BYTES_MIN:
            bad.append(f"BAR1 of {address} has {format_bytes(total)}")
        elif free is not None and free < _BAR1_FREE_MIN:
            bad.append(f"BAR1 of {address} has {format_bytes(free)} left of {format_bytes(total)}")
        elif isinstance(pinned_kb, int) and total < pinned_kb << 10 and pinned_kb != _PINNED_DEFAULT_KB:
            bad.append(f"BAR1 of {address} is smaller than max_device_pinned_mem_size_kb")
    return look.fails("; ".join(bad)) if bad else look.passes("there is room in every BAR1")


_PINNED_DEFAULT_KB = 33554432  # 32 GiB, the value in the file that NVIDIA ships.


def _bar1_sizes(look: Look) -> list[tuple[str, tuple[int, int | None]]]:
    if look.facts.nvml is not None:
        return [
            (gpu.pci_bus_id, (gpu.bar1_bytes, gpu.bar1_free_bytes))
            for gpu in look.facts.nvml.gpus
            if gpu.bar1_bytes is not None
        ]
    found: list[tuple[str, tuple[int, int | None]]] = []
    for gpu in look.gpus:
        lines = (look.text(f"/sys/bus/pci/devices/{gpu.address}/resource") or "").splitlines()
        # BAR0 has the registers. BAR1 has 64 bits and takes two lines, of which the first has the range.
        ends = re.findall(r"0x[0-9a-f]+", lines[1]) if len(lines) > 1 else []
        if len(ends) > 1 and int(ends[1], 16):
            found.append((gpu.address, (int(ends[1], 16) - int(ends[0], 16) + 1, None)))
    return found


@rule(
    code="udev-database",
    title="no udev database",
    why="libcufile asks udev what a block device holds (ID_FS_USAGE). Containers often have no /run/udev: then every "
    "cuFileHandleRegister ends in 5027, and nothing says why.",
    remedy="mount /run/udev of the host into the container (`-v /run/udev:/run/udev:ro`), or write "
    "/run/udev/data/b<major>:<minor> of the block device with the lines E:ID_FS_USAGE=filesystem and E:ID_FS_TYPE=ext4",
    reads="/run/udev/data/b*: of the block device below each mount",
)
def _udev(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    names = look.names("/run/udev/data")
    if look.is_uncaptured("/run/udev/data"):
        return look.not_run("the capture does not say")
    if not names:
        why = look.unread("/run/udev/data")
        return (
            look.not_run(f"/run/udev/data: {why}")
            if why
            else look.fails("there is no /run/udev/data, or nothing in it")
        )
    unknown = []
    for mount, block in look.file_systems():
        if block is None or mount.kind not in _BLOCK:
            continue
        text = look.text(f"/run/udev/data/b{mount.device}") or ""
        unknown += [] if "E:ID_FS_USAGE=filesystem" in text else [f"{mount.mount_point} (b{mount.device})"]
    if unknown:
        return look.fails(f"it does not say what is on the device of {', '.join(unknown)}")
    return look.passes("it knows the block device of every mount")


RULES = (_file_system, _direct_io, _bar1, _udev)
