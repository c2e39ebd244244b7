"""The table of the review: finding, case, defect, symptom. docs/findings.md and `nox -s review` show it."""

from __future__ import annotations

from meta.defects import regions, sharing, storage, usrbio
from meta.defects.defect import Defect, Finding

__all__ = ["DEFECTS", "FINDINGS"]

_REVIEW = "test_gdr_review.py::"
_LATER = "test_later_defects.py::"
_STORAGE = "test_storage_review.py::"
_USRBIO = "test_usrbio_review.py::"
_TOUCHED = "the CPU was let loose on device memory: the client died of SIGSEGV in a"

FINDINGS: tuple[Finding, ...] = (
    Finding("1", "the start can end early without a region cache, and every call goes on as if there were one"),
    Finding("2", "IPC export and import say success with a placeholder or a null pointer"),
    Finding("3", "the storage client copies and sums device memory by the CPU"),
    Finding("4", "where dma-buf cannot be registered, the fallback registers a null pointer"),
    Finding("5", "the cache keeps the region of memory that was freed"),
    Finding("6", "device memory is wrapped into a buffer of the host"),
    Finding("a", "memory is freed before it is deregistered"),
    Finding("b", "two wraps of one pointer share a region and take it from each other, or it outlives both"),
    Finding("c", "an interior pointer goes out as an IPC handle, and the importer gets the base"),
    Finding("d", "an address of one process is published for others"),
    Finding("e", "a registration with some of the NICs is taken for success"),
    Finding("f", "errors of a publication are ignored"),
    Finding("g", "a hole in a file is filled by the CPU in device memory"),
    Finding("h", "the start says success without a cache"),
    Finding("i", "a call changes the current device of the caller's thread"),
    Finding("j", "the cache throws out arbitrary regions, also those in use, which are then registered twice"),
    Finding("k", "an address that was freed and allocated again is a hit: a stale key"),
    Finding("l", "the device number of a handle from another process is not checked"),
    Finding("m", "an address and a length overflow in the preparation of a transfer"),
    Finding("n", "an importer whose manager is unavailable says success"),
    Finding("o", "the name of a ring has its flags in base 10 in one place and in base 2 in the other"),
)

_DEFECTS = (
    Defect(
        "1",
        f"{_REVIEW}test_without_a_nic_a_lease_says_why_and_nothing_crashes",
        "AttributeError: 'NoneType' object has no attribute 'lease'",
        "gdrkit.registration.manager",
        regions.null_cache,
    ),
    Defect(
        "2",
        f"{_REVIEW}test_without_cuda_an_export_is_enotsup_and_no_handle",
        "success without a driver: the handle means nothing",
        "gdrkit.registration.share",
        sharing.placeholder,
    ),
    Defect(
        "2",
        f"{_REVIEW}test_an_exported_handle_opens_in_another_process",
        "cuIpcOpenMemHandle",
        "gdrkit.registration.gdr_handle",
        sharing.metadata_only,
    ),
    Defect(
        "2",
        f"{_REVIEW}test_an_import_has_an_address_and_the_bytes_of_its_owner",
        "an import that succeeded has a null pointer",
        "gdrkit.registration.gdr_handle",
        sharing.null_import,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_a_read_into_device_memory_is_not_touched_by_the_cpu",
        f"{_TOUCHED} read",
        "gdrkit.storage.batch",
        storage.inline_read,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_a_read_into_device_memory_is_not_touched_by_the_cpu",
        f"{_TOUCHED} read",
        "gdrkit.storage.batch",
        storage.sum_read,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_a_write_from_device_memory_is_summed_by_the_server",
        f"{_TOUCHED} write",
        "gdrkit.storage.batch",
        storage.inline_write,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_a_write_from_device_memory_is_summed_by_the_server",
        f"{_TOUCHED} write",
        "gdrkit.storage.batch",
        storage.sum_written,
    ),
    Defect(
        "4",
        f"{_REVIEW}test_memory_without_an_address_is_never_registered_by_its_address",
        "ibv_reg_mr was called with a null pointer",
        "gdrkit.registration.policy",
        regions.null_pointer,
    ),
    Defect(
        "5",
        f"{_REVIEW}test_after_a_free_the_old_key_reaches_nothing",
        "a write by the key of freed memory gave SUCCESS",
        "gdrkit.registration.cache",
        regions.unwatched,
    ),
    Defect(
        "6",
        f"{_STORAGE}test_memory_that_came_by_its_address_is_no_host_buffer",
        "device memory is in a buffer of the host",
        "gdrkit.storage.iobuffer",
        storage.host_buffer_of_device,
    ),
    Defect(
        "6",
        f"{_USRBIO}test_device_memory_is_published_as_device_memory",
        "device memory was published as memory of the host",
        "gdrkit.usrbio.gpu",
        usrbio.published_as_host,
    ),
    Defect(
        "a",
        f"{_LATER}test_the_nic_lets_go_before_the_memory_is_freed",
        "the memory was freed before the NIC let go",
        "gdrkit.cuda.memory",
        regions.free_first,
    ),
    Defect(
        "b",
        f"{_LATER}test_two_wraps_of_one_pointer_do_not_take_each_others_key",
        "the other wrap lost its region: REM_ACCESS_ERR",
        "gdrkit.registration.cache",
        regions.invalidate_for_all,
    ),
    Defect(
        "b",
        f"{_LATER}test_two_wraps_of_one_pointer_do_not_take_each_others_key",
        "the region outlived its last lease: SUCCESS",
        "gdrkit.registration.cache",
        regions.never_deregister,
    ),
    Defect(
        "c",
        f"{_LATER}test_memory_inside_an_allocation_arrives_at_the_right_byte",
        "DataMismatch: byte 0 of",
        "gdrkit.registration.share",
        sharing.base_for_interior,
    ),
    Defect(
        "c",
        f"{_LATER}test_a_handle_without_an_offset_is_not_made_for_memory_inside_an_allocation",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.gdr_handle",
        sharing.no_base_check,
    ),
    Defect(
        "d",
        f"{_USRBIO}test_what_was_published_is_its_owners_memory_in_another_process",
        "the opener of a publication has other memory",
        "native/usrbio/client/gpu_offered.cpp",
        usrbio.RAW_ADDRESS,
    ),
    Defect(
        "d",
        f"{_USRBIO}test_a_shared_buffer_is_its_owners_memory_in_another_process",
        "the importer of a handle has other memory",
        "gdrkit.usrbio.gpu",
        usrbio.address_for_handle,
    ),
    Defect(
        "e",
        f"{_LATER}test_memory_is_registered_with_every_nic_or_with_none",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.policy",
        regions.any_nic,
    ),
    Defect(
        "f",
        f"{_USRBIO}test_memory_that_cannot_be_published_is_not_made",
        "Failed: DID NOT RAISE",
        "native/usrbio/client/link.cpp",
        usrbio.LINK_ERRORS_IGNORED,
    ),
    Defect(
        "g",
        f"{_STORAGE}test_a_hole_in_a_file_is_zeroed_by_the_device",
        f"{_TOUCHED} read",
        "gdrkit.storage.iobuffer",
        storage.memset_holes,
    ),
    Defect(
        "h",
        f"{_LATER}test_available_is_said_only_where_a_region_can_be_had",
        "it says that it is available, and nothing can be registered",
        "gdrkit.registration.manager",
        regions.available_anyway,
    ),
    Defect(
        "i",
        f"{_LATER}test_no_call_leaves_another_device_current",
        "allocate left another device current",
        "gdrkit.cuda._driver",
        regions.sticky_device,
    ),
    Defect(
        "j",
        f"{_LATER}test_the_cache_forgets_what_was_used_least_recently",
        "what was used last was thrown out",
        "gdrkit.registration._entries",
        regions.arbitrary_eviction,
    ),
    Defect(
        "j",
        f"{_LATER}test_a_region_that_is_in_use_is_not_registered_a_second_time",
        "memory in use was registered a second time",
        "gdrkit.registration.cache",
        regions.eviction_in_use,
    ),
    Defect(
        "k",
        f"{_LATER}test_an_address_that_comes_back_is_another_memory",
        "the key of the old memory was given for the new one",
        "gdrkit.cuda.pointer",
        regions.same_address_same_memory,
    ),
    Defect(
        "k",
        f"{_LATER}test_a_chunk_that_was_remapped_under_the_range_is_another_memory",
        "the key of the chunk before was given",
        "gdrkit.cuda.pointer",
        regions.first_chunk_only,
    ),
    Defect(
        "l",
        f"{_LATER}test_the_device_number_of_a_stranger_is_checked",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.gdr_handle",
        sharing.no_device_check,
    ),
    Defect(
        "m",
        f"{_USRBIO}test_a_range_that_overflows_is_outside_of_its_memory",
        "were taken for a part of the memory",
        "native/usrbio/client/range.cpp",
        usrbio.OVERFLOWING_RANGE,
    ),
    Defect(
        "n",
        f"{_LATER}test_an_importer_without_nics_fails_and_does_not_register_with_none",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.manager",
        regions.no_nics_no_error,
    ),
    Defect(
        "o",
        f"{_USRBIO}test_the_flags_of_a_ring_are_in_its_name_in_base_2",
        "whoever reads these flags in base 2 gets other ones",
        "native/usrbio/client/flags.cpp",
        usrbio.DECIMAL_FLAGS,
    ),
)

# The key is the name of the function or of the translation unit that puts the defect back.
DEFECTS: dict[str, Defect] = {defect.name: defect for defect in _DEFECTS}
