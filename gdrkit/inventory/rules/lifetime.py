"""Rules about memory kinds, lifetime, ordering and the builds of libraries."""

from __future__ import annotations

import posixpath

from gdrkit import loader
from gdrkit.errors import Reason
from gdrkit.inventory import cufile_json
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule

__all__ = ["RULES"]

_NO_GPU_TEXT = "no GPU here"
# Defaults of libcufile for posix_pool_slab_count and io_batchsize.
_SLAB_COUNTS_DEFAULT = [128, 64, 64]
_BATCH_SIZE_DEFAULT = 128


@rule(
    code="vmm-memory",
    title="memory of a type that the driver cannot register",
    why="Expandable segments consist of many chunks, and managed memory migrates. Some drivers register such memory "
    "only in part or not at all.",
    remedy="unset expandable_segments in PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) for buffers that are "
    "registered, or use a driver with GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    reads="PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF; CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
)
def _check_vmm_memory(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run(_NO_GPU_TEXT)
    if not context.machine.is_environment_known:
        return context.not_run("the capture does not contain the files of this rule")
    if not context.has_expandable_segments:
        return context.passes("this environment does not enable expandable segments")
    if context.facts.cuda is None:
        return context.unproven("expandable segments are enabled, and CUDA does not report whether it registers them")
    attribute_name = "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
    gpus_without_support = []
    for device in context.facts.cuda.devices:
        context.record(f"{attribute_name} of GPU {device.index}", device.attributes.get(attribute_name, 0))
        gpus_without_support += [] if device.has(attribute_name) else [str(device.index)]
    if gpus_without_support:
        return context.fails(
            f"expandable segments are enabled, and GPU {', '.join(gpus_without_support)} cannot register them"
        )
    return context.passes("expandable segments are enabled, and every GPU can register them")


@rule(
    code="stale-key",
    title="the rkey of freed memory still works, or new memory at its address has the same buffer id",
    why="After a free, the same address can belong to other memory. With a registration cache that does not detect "
    "this, a NIC writes to the wrong pages.",
    remedy="keep the buffer id (CU_POINTER_ATTRIBUTE_BUFFER_ID) beside each cached region and compare it at each use; "
    "deregister before freeing",
    reads="register, free, allocate again: address, buffer id, and the destination of a write with the old rkey",
    experiment="stale_key",
)
def _check_stale_key(context: RuleContext) -> RuleResult:
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    observation = context.observe("stale_key")
    if observation is None:
        return context.not_run("the experiment was not run")
    if observation.failure is not None:
        return context.fails(f"the experiment failed: {observation.failure.message}")
    if observation.seen.get("the new owner was reached by the old key") == "yes":
        return context.fails("a write with the rkey of freed memory reached the memory of another owner")
    if observation.seen.get("buffer id") == "the same":
        return context.fails("memory at the same address has the same buffer id as the freed memory")
    return context.passes("the buffer id differs, and a write with the old rkey did not reach the new owner")


@rule(
    code="missing-flush",
    title="the GPU reads old data after a completion",
    why="A completion means that the data reached the GPU, but not that kernels and copies on the GPU see it. A device "
    "without sufficient ordering needs a flush before the data is used.",
    remedy="call cuFlushGPUDirectRDMAWrites (or gdrkit.registration.Ordering.make_visible) between completion and use",
    reads="GPU_DIRECT_RDMA_WRITES_ORDERING and _FLUSH_WRITES_OPTIONS; RDMA WRITE, flush, copy by the GPU, many times",
    experiment="flush",
)
def _check_missing_flush(context: RuleContext) -> RuleResult:
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    observation = context.observe("flush")
    if observation is None:
        return context.not_run("the experiment was not run")
    if observation.failure is not None:
        return context.fails(f"the experiment failed: {observation.failure.message}")
    stale_read_texts = [
        f"{step}: {result}"
        for step, result in observation.seen.items()
        if step.startswith("old data") and result != "0"
    ]
    if stale_read_texts:
        return context.fails("; ".join(stale_read_texts))
    return context.passes("after completion and flush the copy engine of every GPU read the new data each time")


@rule(
    code="pool-starved",
    title="cuFile has fewer bounce buffers than a batch needs",
    why="A transfer in compatibility mode, or a transfer that is not aligned, takes a bounce buffer of the smallest "
    "size that fits. If all buffers of that size are in use, cuFile 1.15 waits for ever. cuFile 1.18 does not.",
    remedy="raise every number of posix_pool_slab_count in cufile.json to at least the product of queue depth and "
    "batch size, or lower io_batchsize",
    reads="properties.posix_pool_slab_count and properties.io_batchsize of cufile.json; then a batch of as many reads "
    "as cuFile accepts, in a child process with a time limit",
    experiment="pool",
)
def _check_pool_starved(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    if not context.has_gpu:
        return context.not_run(_NO_GPU_TEXT)
    config_path, cufile_config = context.cufile_config()
    # posix_pool_slab_count has the number of bounce buffers of each size.
    configured_slab_counts = cufile_json.get_value(cufile_config, "properties", "posix_pool_slab_count")
    configured_batch_size = cufile_json.get_value(cufile_config, "properties", "io_batchsize")
    buffer_counts = (
        [count for count in configured_slab_counts if isinstance(count, int)]
        if isinstance(configured_slab_counts, list)
        else _SLAB_COUNTS_DEFAULT
    )
    batch_size = configured_batch_size if isinstance(configured_batch_size, int) else _BATCH_SIZE_DEFAULT
    if config_path is not None:
        context.record(f"{config_path} properties.posix_pool_slab_count", configured_slab_counts or "not set")
        context.record(f"{config_path} properties.io_batchsize", batch_size)
        if sum(buffer_counts) < batch_size:
            return context.fails(f"{sum(buffer_counts)} bounce buffers for batches of {batch_size}")
    observation = context.observe_cufile("pool")
    if observation is not None and observation.failure is None:
        results_text = "; ".join(f"{step}: {result}" for step, result in observation.seen.items())
        is_complete = all(result.endswith(" COMPLETE") and "," not in result for result in observation.seen.values())
        return (
            context.passes(results_text)
            if is_complete
            else context.unproven(f"the batch completed only in part: {results_text}")
        )
    if observation is not None and observation.failure is not None:
        if observation.failure.reason is Reason.TIMEOUT:
            return context.fails("a batch of as many reads as cuFile accepts did not complete")
        # The experiment failed for another reason than a lack of buffers. Other rules report such reasons.
        context.record("a batch of as many reads as cuFile accepts", observation.failure.message)
    if config_path is None:
        return context.not_run("there is no cufile.json with numbers to compare, and no batch was completed")
    if min(buffer_counts, default=batch_size) < batch_size:
        return context.unproven(
            f"{min(buffer_counts)} bounce buffers of one size for batches of {batch_size}, "
            "and no such batch was completed"
        )
    return context.passes(f"{min(buffer_counts)} bounce buffers of each size for batches of {batch_size}")


@rule(
    code="ucx-without-cuda",
    title="UCX was built without CUDA",
    why="Such a UCX treats GPU memory as host memory, and copies it or crashes.",
    remedy="install UCX with CUDA (the package ucx-cuda, or the wheel libucx-cu12/-cu13) where the loader finds it "
    "first",
    reads="libuct_cuda.so in the folder ucx next to libucs.so.0",
)
def _check_ucx_without_cuda(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run(_NO_GPU_TEXT)
    search_folders = context.machine.environment.get("LD_LIBRARY_PATH", "").split(":")
    from gdrkit.host import cached_libraries

    cached_paths = cached_libraries(context.tree).get("libucs.so.0", ())
    candidate_paths = loader.search_paths("libucs.so.0", search_path=search_folders, cached=cached_paths)
    library_path = next(filter(context.tree.exists, candidate_paths), None)
    if library_path is None:
        return context.not_run("no UCX here")
    context.record(library_path, "exists")
    folder = posixpath.join(posixpath.dirname(library_path), "ucx")
    if any(name.startswith("libuct_cuda.so") for name in context.names(folder)):
        return context.passes(f"{folder} has libuct_cuda.so")
    return context.fails(f"{folder} has no libuct_cuda.so")


@rule(
    code="driver-open",
    title="cuFileDriverOpen does not return",
    why="libcufile (1.15 to 1.20) loops for ever in cuFileDriverOpen if there is no /proc/modules. Without libcuda the "
    "call fails, or transfers fail later.",
    remedy="run a kernel with loadable modules; install the NVIDIA driver, or in a container have its libraries "
    "mounted (`--gpus all`), before a process opens cuFile",
    reads="/proc/modules; which files the loader finds for libcufile.so.0 and libcuda.so.1; then the call, in a child "
    "process with a time limit",
    experiment="driver_open",
)
def _check_driver_open(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    path_by_soname = {library.soname: library.path for library in context.facts.libraries}
    for soname in ("libcufile.so.0", "libcuda.so.1"):
        context.record(soname, path_by_soname.get(soname) or "not found by the loader")
    if not path_by_soname.get("libcufile.so.0"):
        return context.not_run("no libcufile here")
    if not path_by_soname.get("libcuda.so.1"):
        return context.fails("libcufile is installed, but libcuda is not")
    has_modules = context.tree.exists("/proc/modules")
    context.record("/proc/modules", "exists" if has_modules else "does not exist")
    observation = context.observe("driver_open")
    if observation is None:
        return (
            context.not_run("the experiment was not run")
            if has_modules
            else context.unproven("there is no /proc/modules, and the experiment was not run")
        )
    if observation.failure is None:
        return context.passes("cuFileDriverOpen succeeded")
    if observation.failure.reason is Reason.TIMEOUT:
        cause_suffix = "" if has_modules else ": there is no /proc/modules"
        return context.fails(f"cuFileDriverOpen did not return within the time limit{cause_suffix}")
    if observation.failure.reason is Reason.LIBRARY_MISSING:
        return context.unproven(f"cuFileDriverOpen could not be called: {observation.failure.message}")
    return context.fails(f"the call failed: {observation.failure.message}")


RULES = (
    _check_vmm_memory,
    _check_stale_key,
    _check_missing_flush,
    _check_pool_starved,
    _check_ucx_without_cuda,
    _check_driver_open,
)
