"""Tables of the findings of the code reviews, and of their defects.

A finding has one or more defects. For each defect, the table names the function or patch that injects it again, the
case that must then fail, and the symptom. docs/findings.md shows both tables.
"""

from __future__ import annotations

from meta.defects import proof, regions, sharing, storage, usrbio
from meta.defects.defect import Defect, Finding

__all__ = ["DEFECTS", "FINDINGS"]

# Beginnings of `Defect.case`: the files of the cases, below suites/review.
_GDR_REVIEW = "test_gdr_review.py::"
_LATER_DEFECTS = "test_later_defects.py::"
_PROOF = "test_proof_review.py::"
_STORAGE = "test_storage_review.py::"
_USRBIO = "test_usrbio_review.py::"
# Beginning of a symptom. The table appends the operation of the client: read or write.
_CPU_ACCESS_SYMPTOM = "the CPU accessed device memory: SIGSEGV killed the client in a"

FINDINGS: tuple[Finding, ...] = (
    Finding(
        "1",
        "the start of the manager can return before it creates a region cache, and later calls use the missing cache",
    ),
    Finding("2", "IPC export and import report success with a placeholder or a null pointer"),
    Finding("3", "the CPU of the storage client copies device memory and computes its checksums"),
    Finding("4", "if no dma-buf can be registered, the fallback registers a null pointer"),
    Finding("5", "the cache keeps the region of freed memory"),
    Finding("6", "device memory is wrapped into a host buffer"),
    Finding("a", "memory is freed before it is deregistered"),
    Finding(
        "b",
        "memory objects with one pointer share a region: closing one removes it for all, or it is never removed",
    ),
    Finding("c", "an interior pointer is exported as an IPC handle, and the importer gets the base of the allocation"),
    Finding("d", "a virtual address of one process is published for other processes"),
    Finding("e", "a registration with only some of the NICs counts as success"),
    Finding("f", "an error while memory is published is ignored"),
    Finding("g", "the CPU fills a hole of a file in device memory"),
    Finding("h", "the manager starts with success although it has no region cache"),
    Finding("i", "a call changes the current device of the caller's thread"),
    Finding("j", "the cache evicts arbitrary regions, also those in use, which are then registered twice"),
    Finding("k", "a lookup of an address that was freed and allocated again returns a stale key"),
    Finding("l", "the device of memory from another process is not checked"),
    Finding("m", "the bounds check of a prepared transfer adds address and length, and the sum overflows"),
    Finding("n", "an importer whose manager is unavailable reports success"),
    Finding("o", "the name of a ring has its flags in base 2 where it is created and in base 10 where it is removed"),
    Finding("p", "a route between GPU and NIC is reported as proven although no port counter was read"),
    Finding("q", "bytes that stayed inside one NIC are reported as bytes on a wire"),
    Finding("r", "the GPU sees old data after a read, until the caller flushes"),
    Finding("s", "GDR is available when memory can be registered, although no bytes move"),
    Finding("t", "a NIC whose DMA fails is used, because it registered the memory"),
)

# The positional arguments of Defect() are: finding_identifier, case, symptom, module_or_file, injection.
_DEFECTS = (
    Defect(
        "1",
        f"{_GDR_REVIEW}test_lease_without_nic_fails_with_the_cause",
        "AttributeError: 'NoneType' object has no attribute 'lease'",
        "gdrkit.registration.manager",
        regions.return_no_cache,
    ),
    Defect(
        "2",
        f"{_GDR_REVIEW}test_export_without_cuda_fails_with_enotsup",
        "an export without a driver succeeded",
        "gdrkit.registration.share",
        sharing.export_placeholder,
    ),
    Defect(
        "2",
        f"{_GDR_REVIEW}test_exported_handle_opens_in_another_process",
        "cuIpcOpenMemHandle",
        "gdrkit.registration.gdr_handle",
        sharing.export_placeholder_handle,
    ),
    Defect(
        "2",
        f"{_GDR_REVIEW}test_import_has_an_address_and_its_owners_bytes",
        "the import succeeded with a null pointer",
        "gdrkit.registration.gdr_handle",
        sharing.import_null_pointer,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_read_into_device_memory_avoids_the_cpu",
        f"{_CPU_ACCESS_SYMPTOM} read",
        "gdrkit.storage.batch",
        storage.copy_short_read_by_cpu,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_read_into_device_memory_avoids_the_cpu",
        f"{_CPU_ACCESS_SYMPTOM} read",
        "gdrkit.storage.batch",
        storage.checksum_read_by_cpu,
        also_fails=(f"{_PROOF}test_read_of_the_storage_client_is_visible",),
    ),
    Defect(
        "3",
        f"{_STORAGE}test_checksum_of_a_device_write_is_the_servers",
        f"{_CPU_ACCESS_SYMPTOM} write",
        "gdrkit.storage.batch",
        storage.copy_short_write_by_cpu,
    ),
    Defect(
        "3",
        f"{_STORAGE}test_checksum_of_a_device_write_is_the_servers",
        f"{_CPU_ACCESS_SYMPTOM} write",
        "gdrkit.storage.batch",
        storage.checksum_write_by_cpu,
    ),
    Defect(
        "4",
        f"{_GDR_REVIEW}test_memory_without_address_is_not_registered_by_address",
        "ibv_reg_mr was called with a null pointer",
        "gdrkit.registration.policy",
        regions.register_null_pointer,
    ),
    Defect(
        "5",
        f"{_GDR_REVIEW}test_old_key_after_a_free_is_refused",
        "a write with the key of freed memory ended with SUCCESS",
        "gdrkit.registration.cache",
        regions.ignore_frees,
    ),
    Defect(
        "6",
        f"{_STORAGE}test_borrowed_device_memory_is_not_a_host_buffer",
        "device memory is in a host buffer",
        "gdrkit.storage.iobuffer",
        storage.register_device_as_host,
    ),
    Defect(
        "6",
        f"{_USRBIO}test_device_memory_is_published_as_device_memory",
        "device memory was published as host memory",
        "gdrkit.usrbio.gpu",
        usrbio.publish_as_host,
        also_fails=(f"{_PROOF}test_read_is_visible_after_hf3fs_wait_for_ios",),
    ),
    Defect(
        "a",
        f"{_LATER_DEFECTS}test_region_is_deregistered_before_the_free",
        "the memory was freed before its deregistration",
        "gdrkit.cuda.memory",
        regions.free_before_deregistration,
    ),
    Defect(
        "b",
        f"{_LATER_DEFECTS}test_borrowed_memories_of_one_pointer_keep_their_keys",
        "the other memory lost its region: REM_ACCESS_ERR",
        "gdrkit.registration.cache",
        regions.deregister_leased,
    ),
    Defect(
        "b",
        f"{_LATER_DEFECTS}test_borrowed_memories_of_one_pointer_keep_their_keys",
        "the region outlived its last lease: SUCCESS",
        "gdrkit.registration.cache",
        regions.never_deregister,
    ),
    Defect(
        "c",
        f"{_LATER_DEFECTS}test_export_of_interior_memory_keeps_its_offset",
        "DataMismatch: byte 0 of",
        "gdrkit.registration.share",
        sharing.export_base_for_interior,
    ),
    Defect(
        "c",
        f"{_LATER_DEFECTS}test_80_byte_handle_of_interior_memory_is_refused",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.gdr_handle",
        sharing.skip_base_check,
    ),
    Defect(
        "d",
        f"{_USRBIO}test_published_memory_is_the_same_in_another_process",
        "the opener of published memory has other bytes",
        "native/usrbio/client/gpu_publish.cpp",
        usrbio.RAW_ADDRESS,
    ),
    Defect(
        "d",
        f"{_USRBIO}test_shared_buffer_is_the_same_in_another_process",
        "the importer of a handle has other bytes",
        "gdrkit.usrbio.gpu",
        usrbio.export_address_as_handle,
    ),
    Defect(
        "e",
        f"{_LATER_DEFECTS}test_memory_is_registered_with_every_nic_or_none",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.policy",
        regions.accept_one_nic,
    ),
    Defect(
        "f",
        f"{_USRBIO}test_creation_fails_if_the_memory_cannot_be_published",
        "Failed: DID NOT RAISE",
        "native/usrbio/client/publication.cpp",
        usrbio.LINK_ERRORS_IGNORED,
    ),
    Defect(
        "g",
        f"{_STORAGE}test_hole_in_a_file_is_zeroed_by_the_device",
        f"{_CPU_ACCESS_SYMPTOM} read",
        "gdrkit.storage.iobuffer",
        storage.fill_holes_by_cpu,
    ),
    Defect(
        "h",
        f"{_LATER_DEFECTS}test_manager_that_cannot_register_is_unavailable",
        "the manager is available although no memory can be registered",
        "gdrkit.registration.manager",
        regions.accept_unregistrable_gpu,
        also_fails=(f"{_PROOF}test_manager_is_available_only_if_bytes_moved",),
    ),
    Defect(
        "i",
        f"{_LATER_DEFECTS}test_calls_keep_the_current_device",
        "allocate left another device current",
        "gdrkit.cuda._driver",
        regions.leave_device_current,
    ),
    Defect(
        "j",
        f"{_LATER_DEFECTS}test_cache_evicts_the_least_recently_used_region",
        "the most recently used region was evicted",
        "gdrkit.registration._entries",
        regions.evict_most_recent,
    ),
    Defect(
        "j",
        f"{_LATER_DEFECTS}test_leased_region_is_not_registered_twice",
        "memory in use was registered twice",
        "gdrkit.registration.cache",
        regions.evict_leased,
    ),
    Defect(
        "k",
        f"{_LATER_DEFECTS}test_reused_address_gets_a_new_key",
        "the cache returned the key of the old memory",
        "gdrkit.cuda.pointer",
        regions.identify_by_address,
    ),
    Defect(
        "k",
        f"{_LATER_DEFECTS}test_range_with_a_remapped_chunk_gets_a_new_key",
        "the cache returned the key of the unmapped chunk",
        "gdrkit.cuda.pointer",
        regions.check_first_chunk_only,
    ),
    Defect(
        "l",
        f"{_LATER_DEFECTS}test_device_of_a_received_handle_is_checked",
        "Failed: DID NOT RAISE",
        "gdrkit.cuda.ipc",
        sharing.skip_device_check,
    ),
    Defect(
        "m",
        f"{_USRBIO}test_range_that_overflows_is_refused",
        "hf3fs_prep_io accepted",
        "native/usrbio/client/io.cpp",
        usrbio.OVERFLOWING_RANGE,
    ),
    Defect(
        "n",
        f"{_LATER_DEFECTS}test_registration_of_an_import_without_nics_fails",
        "Failed: DID NOT RAISE",
        "gdrkit.registration.manager",
        regions.return_no_nics,
    ),
    Defect(
        "o",
        f"{_USRBIO}test_flags_of_a_ring_are_in_its_name_in_base_2",
        "the flags of this name are not in base 2",
        "native/usrbio/client/names.cpp",
        usrbio.DECIMAL_FLAGS,
    ),
    Defect(
        "p",
        f"{_PROOF}test_route_without_counted_bytes_is_unproven",
        "the states are",
        "gdrkit.report.routes",
        proof.ignore_counters,
    ),
    Defect(
        "q",
        f"{_PROOF}test_loopback_is_not_called_wire",
        "the path is TransferPath.WIRE",
        "gdrkit.registration.reach",
        proof.report_loopback_as_wire,
    ),
    Defect(
        "r",
        f"{_PROOF}test_read_of_the_storage_client_is_visible",
        "the GPU sees old data after a read of the storage client",
        "gdrkit.storage.client",
        proof.leave_out_flush,
    ),
    Defect(
        "r",
        f"{_PROOF}test_read_is_visible_after_hf3fs_wait_for_ios",
        "the GPU sees old data after hf3fs_wait_for_ios",
        "native/usrbio/client/io.cpp",
        proof.READ_NOT_FLUSHED,
    ),
    Defect(
        "s",
        f"{_PROOF}test_manager_is_available_only_if_bytes_moved",
        "the manager is available although no bytes moved",
        "gdrkit.registration.manager",
        proof.accept_registered_gpu,
    ),
    Defect(
        "s",
        f"{_PROOF}test_client_library_is_available_only_if_bytes_moved",
        "GDR is available although no bytes moved",
        "native/usrbio/client/gpu_api.cpp",
        proof.NIC_NOT_CHECKED,
    ),
    Defect(
        "t",
        f"{_PROOF}test_nic_that_moves_nothing_is_not_used",
        "is used although it moves nothing",
        "gdrkit.registration.placement",
        proof.use_every_nic,
    ),
)

# The key is the name of the function or of the patch that injects the defect.
DEFECTS: dict[str, Defect] = {defect.name: defect for defect in _DEFECTS}
