"""Rules about memory kinds, lifetime, ordering and the builds of libraries."""

from __future__ import annotations

import posixpath

from gdrkit import loader
from gdrkit.errors import Reason
from gdrkit.inventory import cufile_json
from gdrkit.inventory.rules.base import Answer, Look, rule

__all__ = ["RULES"]

_NEEDS_BOTH = "no GPU here", "no RDMA device here"
_SLABS_DEFAULT = [128, 64, 64]
_DEPTH_DEFAULT, _BATCH_DEFAULT = 128, 128


def _needs_both(look: Look) -> Answer | None:
    if not look.has_gpu:
        return look.not_run(_NEEDS_BOTH[0])
    return None if look.has_nic else look.not_run(_NEEDS_BOTH[1])


@rule(
    code="vmm-memory",
    title="memory of a kind that this driver cannot register",
    why="Expandable segments are made of many chunks, and managed memory moves: both are registered only where the "
    "driver can, and in part or not at all elsewhere.",
    remedy="unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF for buffers that are registered, or use a driver with "
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    reads="PYTORCH_CUDA_ALLOC_CONF; CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
)
def _vmm(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run(_NEEDS_BOTH[0])
    if not look.machine.has_environment:
        return look.not_run("the capture does not say")
    setting = look.machine.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    look.saw("PYTORCH_CUDA_ALLOC_CONF", setting or "not set")
    if "expandable_segments:true" not in setting.lower().replace(" ", ""):
        return look.passes("no expandable segments are asked for in this environment")
    if look.facts.cuda is None:
        return look.unproven("expandable segments are asked for, and CUDA does not say whether it registers them")
    name = "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
    without = []
    for device in look.facts.cuda.devices:
        look.saw(f"{name} of GPU {device.index}", device.attributes.get(name, 0))
        without += [] if device.has(name) else [str(device.index)]
    if without:
        return look.fails(f"expandable segments are asked for, and GPU {', '.join(without)} cannot register them")
    return look.passes("expandable segments are asked for, and every GPU can register them")


@rule(
    code="stale-key",
    title="a freed buffer whose key stays good cannot be told from its successor",
    why="After a free the address comes back with other memory. A cache of registrations that does not notice "
    "writes into pages that nobody owns.",
    remedy="keep the buffer id (CU_POINTER_ATTRIBUTE_BUFFER_ID) beside each cached region and compare it at each use; "
    "deregister before freeing",
    reads="register, free, allocate again: address, buffer id, and where a write by the old key lands",
    act="stale_key",
)
def _stale(look: Look) -> Answer:
    missing = _needs_both(look)
    if missing:
        return missing
    seen = look.observed("stale_key")
    if seen is None:
        return look.not_run("nobody has tried")
    if seen.failure is not None:
        return look.fails(f"the try itself failed: {seen.failure.message}")
    if seen.seen.get("the new owner was reached by the old key") == "yes":
        return look.fails("a write by the key of freed memory landed in memory of another owner")
    if seen.seen.get("buffer id") == "the same":
        return look.fails("memory at the same address has the same buffer id as what was freed")
    return look.passes("the buffer id tells them apart, and the old key never reached the new owner")


@rule(
    code="missing-flush",
    title="the completion is there, and the GPU still reads old data",
    why="A completion says that the data reached the GPU, not that its work sees it. Where the device orders too "
    "little, a flush must come first; what the model suggests is no proof.",
    remedy="call cuFlushGPUDirectRDMAWrites (or gdrkit.registration.Ordering.make_visible) between completion and use",
    reads="GPU_DIRECT_RDMA_WRITES_ORDERING and _FLUSH_WRITES_OPTIONS; RDMA WRITE, flush, copy by the GPU, many times",
    act="flush",
)
def _flush(look: Look) -> Answer:
    missing = _needs_both(look)
    if missing:
        return missing
    seen = look.observed("flush")
    if seen is None:
        return look.not_run("nobody has tried")
    if seen.failure is not None:
        return look.fails(f"the try itself failed: {seen.failure.message}")
    stale = [f"{where}: {what}" for where, what in seen.seen.items() if where.startswith("old data") and what != "0"]
    if stale:
        return look.fails("; ".join(stale))
    return look.passes("after completion and flush the copy engine of every GPU saw the new data each time")


@rule(
    code="pool-starved",
    title="cuFile's pool of bounce buffers is smaller than what is asked for at once",
    why="In compatibility mode, and for what is not aligned, each transfer takes a bounce buffer of the smallest size "
    "of the pool that holds it; where all of that size are taken, cuFile 1.15 waits for ever (1.18 does not).",
    remedy="raise every number of posix_pool_slab_count in cufile.json to at least the product of queue depth and "
    "batch size, or lower io_batchsize",
    reads="properties.posix_pool_slab_count and properties.io_batchsize of cufile.json; then a batch of as many reads "
    "as cuFile takes at once, in a child process with a time limit",
    act="pool",
)
def _pool(look: Look) -> Answer:  # noqa: PLR0911 - one return per answer.
    if not look.has_gpu:
        return look.not_run(_NEEDS_BOTH[0])
    path, config = look.config()
    slabs = cufile_json.value(config, "properties", "posix_pool_slab_count")
    batch = cufile_json.value(config, "properties", "io_batchsize")
    counts = [count for count in slabs if isinstance(count, int)] if isinstance(slabs, list) else _SLABS_DEFAULT
    wanted = batch if isinstance(batch, int) else _BATCH_DEFAULT
    if path is not None:
        look.saw(f"{path} properties.posix_pool_slab_count", slabs or "not set")
        look.saw(f"{path} properties.io_batchsize", wanted)
        if sum(counts) < wanted:
            return look.fails(f"{sum(counts)} bounce buffers for batches of {wanted}")
    tried = look.tried_cufile("pool")
    if tried is not None and tried.failure is None:
        said = "; ".join(f"{where}: {what}" for where, what in tried.seen.items())
        is_whole = all(what.endswith(" COMPLETE") and "," not in what for what in tried.seen.values())
        return look.passes(said) if is_whole else look.unproven(f"the batch came back, and not whole: {said}")
    if tried is not None and tried.failure is not None:
        if tried.failure.reason is Reason.TIMEOUT:
            return look.fails("a batch of as many reads as cuFile takes at once did not come back")
        # This is a different cause, which another rule reports.
        look.saw("a batch of as many reads as cuFile takes at once", tried.failure.message)
    if path is None:
        return look.not_run("no cufile.json, whose numbers could be compared, and no batch was seen to end")
    if min(counts, default=wanted) < wanted:
        return look.unproven(
            f"{min(counts)} bounce buffers of one size for batches of {wanted}, and none was seen to end"
        )
    return look.passes(f"{min(counts)} bounce buffers of each size for batches of {wanted}")


@rule(
    code="ucx-without-cuda",
    title="UCX was built without CUDA",
    why="Such a UCX takes GPU memory for host memory, and copies it, or faults on it.",
    remedy="install UCX with CUDA (the package ucx-cuda, or the wheel libucx-cu12/-cu13) where the loader finds it "
    "first",
    reads="the folder ucx beside libucs.so.0: libuct_cuda.so",
)
def _ucx(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run(_NEEDS_BOTH[0])
    search = look.machine.environment.get("LD_LIBRARY_PATH", "").split(":")
    from gdrkit.host import cached_libraries

    cached = cached_libraries(look.tree).get("libucs.so.0", ())
    place = next(filter(look.tree.exists, loader.search_paths("libucs.so.0", search_path=search, cached=cached)), None)
    if place is None:
        return look.not_run("no UCX here")
    look.saw(place, "is there")
    folder = posixpath.join(posixpath.dirname(place), "ucx")
    if any(name.startswith("libuct_cuda.so") for name in look.names(folder)):
        return look.passes("it has libuct_cuda.so")
    return look.fails(f"{folder} has no libuct_cuda.so")


@rule(
    code="driver-open",
    title="cuFileDriverOpen does not come back",
    why="libcufile (1.15 to 1.20) spins for ever in cuFileDriverOpen where there is no /proc/modules: whoever calls it "
    "hangs. Without libcuda it opens nothing, or can do nothing.",
    remedy="run a kernel with loadable modules; install the NVIDIA driver, or in a container have its libraries "
    "mounted (`--gpus all`), before anything opens cuFile",
    reads="/proc/modules; which files the loader finds for libcufile.so.0 and libcuda.so.1; then the call, in a child "
    "process with a time limit",
    act="driver_open",
)
def _driver_open(look: Look) -> Answer:  # noqa: PLR0911 - one return per answer.
    found = {library.soname: library.path for library in look.facts.libraries}
    for soname in ("libcufile.so.0", "libcuda.so.1"):
        look.saw(soname, found.get(soname) or "not found by the loader")
    if not found.get("libcufile.so.0"):
        return look.not_run("no libcufile here")
    if not found.get("libcuda.so.1"):
        return look.fails("libcufile is here and libcuda is not")
    has_modules = look.tree.exists("/proc/modules")
    look.saw("/proc/modules", "is there" if has_modules else "not there")
    seen = look.observed("driver_open")
    if seen is None:
        return (
            look.not_run("nobody has tried")
            if has_modules
            else look.unproven("there is no /proc/modules, and nobody has tried")
        )
    if seen.failure is None:
        return look.passes("it opened")
    if seen.failure.reason is Reason.TIMEOUT:
        why = "" if has_modules else ": there is no /proc/modules"
        return look.fails(f"it did not come back within the time limit{why}")
    if seen.failure.reason is Reason.LIBRARY_MISSING:
        return look.unproven(f"nobody could try: {seen.failure.message}")
    return look.fails(f"it failed: {seen.failure.message}")


RULES = (_vmm, _stale, _flush, _pool, _ucx, _driver_open)
