"""Rules about what prevents direct transfers between files and GPU memory: file system, block device, BAR1 and udev."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.inventory import cufile_json
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.inventory.rules.processes import describe_dmabuf_holders
from gdrkit.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from gdrkit.host import BlockDevice, Mount

__all__ = ["RULES"]

_NETWORK_FILE_SYSTEMS = ("lustre", "nfs", "nfs4", "wekafs", "beegfs", "gpfs", "scatefs", "virtiofs")
_BLOCK_FILE_SYSTEMS = ("ext4", "xfs")
_LOGICAL_BLOCK_BYTES_MAX = 4096
_FILE_SYSTEMS_WITHOUT_DIRECT_IO = ("overlay", "tmpfs", "ramfs", "zfs", "ecryptfs")
_BAR1_BYTES_MIN, _BAR1_FREE_BYTES_MIN = GIB, 64 * MIB
# max_device_pinned_mem_size_kb in the cufile.json that NVIDIA ships: 32 GiB. This default is not compared with BAR1.
_PINNED_LIMIT_DEFAULT_KB = 33554432


def _find_obstacle(mount: Mount, block: BlockDevice | None) -> str | None:
    """Return why cuFile cannot directly access files of this mount; None if no obstacle is known."""
    if mount.kind in _NETWORK_FILE_SYSTEMS:
        return None
    if mount.kind not in _BLOCK_FILE_SYSTEMS:
        return f"{mount.kind} is not supported"
    if mount.kind == "ext4" and "data=ordered" not in mount.options:
        return "ext4 without the mount option data=ordered"
    if block is not None and block.mapper:
        return f"device mapper ({block.mapper.partition('-')[0]})"
    if block is not None and block.raid_level not in (None, "raid0", "raid1", "raid10"):
        return str(block.raid_level)
    return "integrity metadata" if block is not None and block.has_integrity else None


@rule(
    code="file-system",
    title="no mount supports direct transfers of cuFile",
    why="Direct transfers work on XFS, on ext4, and on some cluster file systems. On other file systems cuFile falls "
    "back to host memory. For ext4 it requires data=ordered in the mount table, and the kernel lists "
    "this option only if it was given to mount.",
    remedy="mount ext4 with -o data=ordered, or use XFS, on a plain NVMe namespace or partition; not below overlay, "
    "device mapper or RAID 5",
    reads="/proc/self/mountinfo, /sys/dev/block, /sys/class/block/*/{md/level,integrity}",
)
def _check_file_system(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    obstacle_by_mount_point = {
        mount.mount_point: _find_obstacle(mount, block) for mount, block in context.file_systems()
    }
    if not obstacle_by_mount_point:
        return context.not_run("no mount of a data file system was found")
    usable_mount_points = [mount_point for mount_point, obstacle in obstacle_by_mount_point.items() if obstacle is None]
    obstacle_texts = "; ".join(
        f"{mount_point}: {obstacle}" for mount_point, obstacle in obstacle_by_mount_point.items() if obstacle
    )
    return (
        context.passes(
            f"usable: {', '.join(usable_mount_points)}" + (f"; not usable: {obstacle_texts}" if obstacle_texts else "")
        )
        if usable_mount_points
        else context.fails(obstacle_texts)
    )


@rule(
    code="direct-io",
    title="no mount supports direct I/O at 4 KiB",
    why="cuFile opens with O_DIRECT and needs offset and size at multiples of 4 KiB for a direct transfer. Other "
    "transfers use a bounce buffer.",
    remedy="use a file system with O_DIRECT on a device with logical blocks of at most 4 KiB, and align file "
    "offsets and sizes to 4 KiB",
    reads="/proc/self/mountinfo, /sys/class/block/*/queue/logical_block_size",
)
def _check_direct_io(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    usable_mount_points, obstacle_texts = [], []
    for mount, block in context.file_systems():
        logical_block_bytes = None
        if block is not None:
            logical_block_bytes = context.tree.number(f"/sys/class/block/{block.name}/queue/logical_block_size")
            context.record(f"/sys/class/block/{block.name}/queue/logical_block_size", logical_block_bytes)
        if mount.kind in _FILE_SYSTEMS_WITHOUT_DIRECT_IO:
            obstacle_texts.append(f"{mount.mount_point}: {mount.kind}")
        elif logical_block_bytes is not None and logical_block_bytes > _LOGICAL_BLOCK_BYTES_MAX:
            obstacle_texts.append(f"{mount.mount_point}: blocks of {logical_block_bytes} bytes")
        elif logical_block_bytes is not None or mount.kind in _NETWORK_FILE_SYSTEMS:
            usable_mount_points.append(mount.mount_point)
    if usable_mount_points:
        return context.passes(f"aligned direct I/O is possible on {', '.join(usable_mount_points)}")
    return (
        context.fails("; ".join(obstacle_texts))
        if obstacle_texts
        else context.not_run("no mount of a data file system was found")
    )


@rule(
    code="bar1-small",
    title="BAR1 is small or full",
    why="NICs and NVMe reach GPU memory through BAR1, a window in the PCI address space. Memory that does not fit into "
    "this window cannot be registered.",
    remedy="switch on 'above 4G decoding' and resizable BAR in the firmware; keep max_device_pinned_mem_size_kb of "
    "cufile.json below BAR1; release registrations",
    reads="NVML BAR1 total and free; /sys/bus/pci/devices/*/resource; max_device_pinned_mem_size_kb of cufile.json; "
    "the dma-bufs of every process that has a GPU open",
)
def _check_bar1_small(context: RuleContext) -> RuleResult:
    sizes_by_gpu = dict(_read_bar1_sizes(context))
    if not sizes_by_gpu:
        return context.not_run("the BAR1 size cannot be read for any GPU")
    _, cufile_config = context.cufile_config()
    pinned_limit_kb = cufile_json.get_value(cufile_config, "properties", "max_device_pinned_mem_size_kb")
    problems = []
    for address, (total_bytes, free_bytes) in sizes_by_gpu.items():
        context.record(
            f"BAR1 of {address}",
            format_bytes(total_bytes) + ("" if free_bytes is None else f", free {format_bytes(free_bytes)}"),
        )
        if total_bytes < _BAR1_BYTES_MIN:
            problems.append(f"BAR1 of {address} has {format_bytes(total_bytes)}")
        elif free_bytes is not None and free_bytes < _BAR1_FREE_BYTES_MIN:
            problems.append(f"BAR1 of {address} has {format_bytes(free_bytes)} left of {format_bytes(total_bytes)}")
        elif (
            isinstance(pinned_limit_kb, int)
            and total_bytes < pinned_limit_kb << 10
            and pinned_limit_kb != _PINNED_LIMIT_DEFAULT_KB
        ):
            problems.append(f"BAR1 of {address} is smaller than max_device_pinned_mem_size_kb")
    if problems:
        return context.fails("; ".join(filter(None, (*problems, describe_dmabuf_holders(context)))))
    return context.passes("every BAR1 has free space")


def _read_bar1_sizes(context: RuleContext) -> list[tuple[str, tuple[int, int | None]]]:
    """Return the address of each GPU, and the size and free part of its BAR1 in bytes.

    The free part is None if the size comes from sysfs, which does not report it.
    """
    if context.facts.nvml is not None:
        return [
            (gpu.pci_bus_id, (gpu.bar1_bytes, gpu.bar1_free_bytes))
            for gpu in context.facts.nvml.gpus
            if gpu.bar1_bytes is not None
        ]
    sizes: list[tuple[str, tuple[int, int | None]]] = []
    for gpu in context.gpus:
        bar1_range = context.bar1_range(gpu.address)
        if bar1_range:
            sizes.append((gpu.address, (bar1_range[1] - bar1_range[0] + 1, None)))
    return sizes


@rule(
    code="udev-database",
    title="no udev database",
    why="libcufile reads the file system of a block device from udev (ID_FS_USAGE). Without /run/udev, which is "
    "common in containers, every cuFileHandleRegister fails with 5027 (CU_FILE_HANDLE_NOT_REGISTERED) "
    "and names no cause.",
    remedy="mount /run/udev of the host into the container (`-v /run/udev:/run/udev:ro`), or write "
    "/run/udev/data/b<major>:<minor> of the block device with the lines E:ID_FS_USAGE=filesystem and E:ID_FS_TYPE=ext4",
    reads="/run/udev/data/b<major>:<minor> for the block device below each mount",
)
def _check_udev_database(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    database_names = context.names("/run/udev/data")
    if context.is_uncaptured("/run/udev/data"):
        return context.not_run("the capture does not contain the files of this rule")
    if not database_names:
        errno_name = context.read_error("/run/udev/data")
        if errno_name:
            return context.not_run(f"/run/udev/data cannot be read: {errno_name}")
        return context.fails("/run/udev/data does not exist or is empty")
    undescribed_mount_texts = []
    for mount, block in context.file_systems():
        if block is None or mount.kind not in _BLOCK_FILE_SYSTEMS:
            continue
        udev_text = context.text(f"/run/udev/data/b{mount.device}") or ""
        undescribed_mount_texts += (
            [] if "E:ID_FS_USAGE=filesystem" in udev_text else [f"{mount.mount_point} (b{mount.device})"]
        )
    if undescribed_mount_texts:
        return context.fails(f"the udev database does not describe the device of {', '.join(undescribed_mount_texts)}")
    return context.passes("the udev database describes the block device of every mount")


RULES = (_check_file_system, _check_direct_io, _check_bar1_small, _check_udev_database)
