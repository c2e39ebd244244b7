"""Wrong files of sysfs and procfs are reported as unreadable, and a hostile config space causes one clear error."""

from __future__ import annotations

import errno
import random
import struct
from typing import TYPE_CHECKING

import pytest
from inventory.healthy_machine import HEALTHY_FILES, NIC_ADDRESS, make_config_space, make_machine

from gdrkit.errors import ApiError, Reason
from gdrkit.host import HostTree, block_device, mount_of, mounts, parse_config_space, pci_devices, virtual_machine_hint
from gdrkit.inventory import RULES, diagnose, rule_of, topology
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path


def make_config_space_with(offset: int, value: int, struct_format: str = "<I") -> bytes:
    """Return a valid config space with another value at one offset. `struct_format` is the format of the value."""
    config_space = bytearray(make_config_space(acs_control=0x1D, ats_enabled=True))
    struct.pack_into(struct_format, config_space, offset, value)
    return bytes(config_space)


# A valid config space has capabilities at 0x40 and 0x60, with the offset of the next capability in the second byte
# (0x41 and 0x61). It has extended capabilities at 0x100, 0x150 and 0x160. The offset of the next extended capability
# begins at bit 20 of a header.
HOSTILE_CONFIG_SPACES = {
    "too short": (b"\0" * 63, "a header has 64"),
    "empty": (b"", "a header has 64"),
    "capabilities loop": (make_config_space_with(0x61, 0x40, "<B"), "loops at 0x40"),
    "a capability is its own next": (make_config_space_with(0x41, 0x40, "<B"), "loops at 0x40"),
    "capabilities lead into the header": (make_config_space_with(0x61, 0x10, "<B"), "outside"),
    "extended capabilities loop": (make_config_space_with(0x150, 0x000D | 0x100 << 20), "loops at 0x100"),
    "an extended capability is its own next": (make_config_space_with(0x150, 0x000D | 0x150 << 20), "loops at 0x150"),
    "extended capabilities lead into the standard ones": (
        make_config_space_with(0x150, 0x000D | 0x40 << 20),
        "outside",
    ),
}


@pytest.mark.parametrize("example_name", HOSTILE_CONFIG_SPACES)
def test_hostile_config_space_is_one_clear_error(example_name: str) -> None:
    config_space, error_text = HOSTILE_CONFIG_SPACES[example_name]
    with pytest.raises(ApiError, match=error_text) as error_info:
        parse_config_space(config_space, name=NIC_ADDRESS)
    assert error_info.value.reason is Reason.MALFORMED
    assert NIC_ADDRESS in str(error_info.value)


def test_random_config_space_is_read_or_refused() -> None:
    generator = random.Random(5)
    for _ in range(2000):
        data = bytearray(
            make_config_space(acs_control=0x1D, ats_enabled=True)[: generator.choice((64, 65, 128, 256, 257, 4096))]
        )
        for _change in range(generator.randint(0, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        reasons = set()
        try:
            parse_config_space(bytes(data))
        except ApiError as error:
            reasons.add(error.reason)
        assert reasons <= {Reason.MALFORMED}


def test_whole_config_space_has_its_registers() -> None:
    config = parse_config_space(make_config_space(acs_control=0x1D, ats_enabled=False, read_request_bytes=512))
    assert config.acs is not None
    assert (str(config.acs), config.ats_enabled) == ("SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+", False)
    assert (config.max_read_request_bytes, config.relaxed_ordering, config.is_whole) == (512, True, True)
    header = parse_config_space(make_config_space(acs_control=0x1D)[:64])
    assert (header.acs, header.max_read_request_bytes, header.is_whole) == (None, None, False)


def test_rule_with_hostile_config_space_is_unproven(tmp_path: Path) -> None:
    path = next(path for path in HEALTHY_FILES if path.endswith(f"{NIC_ADDRESS}/config"))
    finding = rule_of("small-read-request").apply(
        make_machine(tmp_path, files={path: HOSTILE_CONFIG_SPACES["capabilities loop"][0]})
    )
    assert finding.verdict is Verdict.UNPROVEN
    assert "loops at 0x40" in finding.text


# "४" is the Devanagari digit 4: str.isdigit() and int() accept it.
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x01" * 20, b"\0", b"9" * 5000, "४".encode(), b"0x", b"-"])
def test_files_with_wrong_contents_raise_no_error(tmp_path: Path, content: bytes) -> None:
    files = {
        path: content for path in HEALTHY_FILES if not path.startswith("/proc/self") and not path.endswith("/class")
    }
    faulty_host = make_machine(tmp_path, files=files)
    diagnosis = diagnose(faulty_host)
    topology(faulty_host)
    assert len(diagnosis.findings) == len(RULES)


def test_file_without_a_number_is_reported_as_unreadable(tmp_path: Path) -> None:
    device_folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device_folder.mkdir(parents=True)
    for name, content in (("vendor", "0x10de"), ("device", "0x2335"), ("class", "garbage")):
        (device_folder / name).write_text(content)
    tree = HostTree(tmp_path)
    assert pci_devices(tree) == ()
    assert [(unreadable_file.path, unreadable_file.errno) for unreadable_file in tree.unreadable] == [
        ("/sys/bus/pci/devices/0000:1b:00.0/class", errno.EBADMSG)
    ]


def test_mounts_are_read_with_escapes_and_without_bad_lines(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "22 1 259:1 / / rw shared:1 master:2 - ext4 /dev/root rw,data=ordered\n"
        "30 22 8:1 / /my\\040data rw - xfs /dev/sda1 rw\n"
        "31 22 8:2 / /data rw - xfs /dev/sda2 rw\n"
        "32 22 8:3 / /data rw - ext4 /dev/sda3 rw\n"
        "garbage\n33 22 8:4 / /x rw - \n"
    )
    all_mounts = mounts(HostTree(tmp_path))
    assert [(mount.mount_point, mount.kind) for mount in all_mounts] == [
        ("/", "ext4"),
        ("/my data", "xfs"),
        ("/data", "xfs"),
        ("/data", "ext4"),
    ]
    for path, device_number in {"/data/a": "8:3", "/database": "259:1", "/my data": "8:1"}.items():
        mount = mount_of(all_mounts, path)
        assert mount is not None
        assert mount.device == device_number


def test_partition_has_its_disk(tmp_path: Path) -> None:
    healthy_host = make_machine(tmp_path)
    disk = block_device(HostTree.of(healthy_host.files), "259:1")
    assert disk is not None
    assert (disk.name, disk.mapper, disk.has_integrity) == ("nvme0n1", None, False)
    assert block_device(HostTree.of(healthy_host.files), "8:0") is None


def test_virtual_machine_is_detected_by_cpu_or_product_name(tmp_path: Path) -> None:
    assert virtual_machine_hint(HostTree(tmp_path)) is None
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("KVM Virtual Machine\n")
    assert "KVM" in (virtual_machine_hint(HostTree(tmp_path)) or "")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t: fpu hypervisor\n")
    assert "hypervisor" in (virtual_machine_hint(HostTree(tmp_path)) or "")
