/*
 * hf3fs usrbio with GPU memory: iovs in the memory of a CUDA device, for reads and writes without a copy by a CPU. The
 * functions ending in _gpu belong to the first generation of this interface. The functions ending in _device,
 * hf3fs_iovsync, hf3fs_iov_mem_type and hf3fs_iov_device_id belong to the third; a second generation is not
 * implemented. Both generations work on the same iovs.
 *
 * RULES FOR ALL FUNCTIONS
 *   Results      0, or a negative errno. A function that fails changes nothing, unless its description says otherwise.
 *   -ENOTSUP     Every function that can fail returns this error for all arguments if this process has no CUDA:
 *                libcuda.so.1 is not installed or cannot be initialized, or the library was built with ENABLE_GDR=OFF.
 *   Threads      Any thread may call, also concurrently. Every function preserves the calling thread's current CUDA
 *                context.
 *   Structs      A null pointer, a struct of zeros, a destroyed iov and an iov of host memory are not GPU iovs. The
 *                functions refuse or ignore them and never dereference their pointers. A copy of a struct refers
 *                to the same iov.
 *   Addresses    iov->base is a device address, which a CPU must not dereference. Pass iov->base, or any address from
 *                there up to iov->base + iov->size, to hf3fs_prep_io as `ptr`.
 *   Logging      The environment variable HF3FS_USRBIO_LIB_LOG sets the level of the log. A logged error contains the
 *                CUDA driver's result code.
 *   fork         A forked child has none of its parent's GPU iovs: in the child, the functions ignore them.
 *
 * PUBLICATION
 *   Other processes find an iov by the symbolic link <mount>/3fs-virt/iovs/<uuid>.gdr.d<device>, whose target is
 *     gdr://v2/device/<device>/allocation/<bytes>/offset/<bytes>/size/<bytes>/ipc/<128 hexadecimal digits>
 *   (the CUDA IPC handle of the allocation, and the offset of the iov in the allocation). <device> is the number of the
 *   device in the process that publishes. Other processes may have other numbers (CUDA_VISIBLE_DEVICES), so they find
 *   the device by the handle. For memory without an IPC handle (VMM, memory pools) the target ends in /dmabuf instead
 *   of /ipc/... If the mount has an agent (<mount>/3fs-virt/agent.sock), the library also sends the dma-buf of the
 *   memory, and the agent registers it with its NICs. If the agent refuses the dma-buf, the publication fails. Without
 *   an agent, the library only creates the link, and the server of the mount decides whether it accepts the memory.
 *
 * OWNERSHIP
 *   A created iov owns the memory and the link, a wrapped iov only the link, and an opened or imported iov only its
 *   mapping.
 *   hf3fs_iovunlink and hf3fs_iovdestroy do for a GPU iov what hf3fs_iovunlink_gpu and hf3fs_iovdestroy_gpu do.
 */
#pragma once

#include "hf3fs_usrbio.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- queries ----------------------------------------------------- */

/*
 * Returns true if hf3fs_gdr_device_count() is above 0. The agent of this user, or `gdrkit reach`, must have run since
 * the boot, because they measure which NICs reach which devices. Whether a NIC can access particular memory is known
 * only after create or wrap.
 */
HF3FS_API bool hf3fs_gdr_available(void);

/*
 * Returns the number of CUDA devices that can have iovs; 0 without CUDA. A device counts under three conditions:
 *   1. This process sees the device (CUDA_VISIBLE_DEVICES).
 *   2. The device can share its memory with other processes: it has unified addressing, and a compute mode that admits
 *      several processes.
 *   3. A NIC reaches the device: in the measurement that hf3fs_gdr_available() needs, the NIC registered memory of the
 *      device, and wrote and read the right bytes there.
 */
HF3FS_API int hf3fs_gdr_device_count(void);

/* ---- first generation -------------------------------------------- */

/*
 * Allocates `size` bytes on the device and publishes them under a new random id, which it stores in iov->id. The
 * memory consists of whole pages of 64 KiB in the primary context of the device, with CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
 * set. The context stays retained until the iov is destroyed. Memory of the pool (see below) is filled with zeros;
 * other memory is not cleared.
 *   block_size   Stored in iov->block_size: no operation of hf3fs_prep_io may cross a multiple of it, counted from
 *                iov->base. 0: no such limit. The registration does not depend on it: the memory is always one region.
 * Errors
 *   -EINVAL      iov or mount is null, the mount is empty or has 256 characters or more, or size is 0.
 *   -ENODEV      The device does not exist, or its context cannot be retained.
 *   -ENOMEM      The device does not have enough free memory.
 *   -ENOTSUP     There is no CUDA, or the driver can export neither a dma-buf nor an IPC handle of the memory.
 *   -EIO         The driver failed.
 *   other        The error of the agent or of symlink(2): -ENOENT (the mount has no 3fs-virt/iovs), -EACCES,
 *                -EREMOTEIO (the agent has ended), the error of a NIC ...
 */
HF3FS_API int hf3fs_iovcreate_gpu(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size, size_t block_size,
                                  int gpu_device_id);

/*
 * Maps memory that another process published as `id`. A process cannot open its own memory. If an agent serves the
 * mount, the iov borrows the owner's publication: operations fail with -EACCES from the time at which the owner
 * withdraws the publication or ends.
 *   size         The size of the iov as it was published.
 * Errors: the errors of hf3fs_iovcreate_gpu, and
 *   -ENOENT      There is no publication with that id.
 *   -EINVAL      Two links have that id; the target of the link is malformed or contains another size; the memory is on
 *                another device than gpu_device_id, or the driver reports an allocation of another size.
 *   -ENOTSUP     The memory was published only by its dma-buf: VMM memory and pools have no IPC handle.
 *   -EIO         The driver refuses the handle: the owner is this process, has ended, or has freed the memory.
 *   other        The error of the agent: -EACCES (the memory belongs to another user), -ENOENT (it is not published),
 *                -EREMOTEIO (the agent has ended) ...
 */
HF3FS_API int hf3fs_iovopen_gpu(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point, size_t size,
                                size_t block_size, int gpu_device_id);

/*
 * Publishes `size` bytes of device memory that the caller has allocated (by cudaMalloc, as a tensor ...) as `id`;
 * gpu_ptr may be inside an allocation. The memory must stay allocated until the iov is destroyed. The function sets the
 * attribute CU_POINTER_ATTRIBUTE_SYNC_MEMOPS of the memory, which stays set. VMM memory has no such attribute, so the
 * function sets the flag CU_CTX_SYNC_MEMOPS of the context.
 * Errors: the errors of hf3fs_iovcreate_gpu, and
 *   -EINVAL      gpu_ptr or id is null; the bytes are host memory, managed memory or memory of another device, or they
 *                extend beyond the end of their allocation.
 *   -EEXIST      A publication with that id exists.
 */
HF3FS_API int hf3fs_iovwrap_gpu(struct hf3fs_iov* iov, void* gpu_ptr, const uint8_t id[16],
                                const char* hf3fs_mount_point, size_t size, size_t block_size, int gpu_device_id);

/*
 * Withdraws the publication of a created or wrapped iov: the agent deregisters the memory, and the link is removed. The
 * memory stays allocated. Does nothing for other iovs. After a failure, which is logged, the next call of this function
 * or of hf3fs_iovdestroy_gpu tries again.
 */
HF3FS_API void hf3fs_iovunlink_gpu(struct hf3fs_iov* iov);

/*
 * Destroys a GPU iov. First the function withdraws the publication, unless hf3fs_iovunlink_gpu has done so (a link that
 * was created since under the same name stays). Then it frees the memory that create allocated, or closes the mapping
 * of open or import. Then it fills the struct with zeros. If the publication cannot be withdrawn, a NIC may still
 * access the memory. In that case the function neither frees the memory nor changes the struct, and may be called
 * again. Does nothing for an iov that is not a GPU iov.
 */
HF3FS_API void hf3fs_iovdestroy_gpu(struct hf3fs_iov* iov);

/* Returns true if `iov` is a GPU iov of this process. */
HF3FS_API bool hf3fs_iov_is_gpu(const struct hf3fs_iov* iov);

/* Returns the number of the device of `iov`; -1 if `iov` is not a GPU iov. */
HF3FS_API int hf3fs_iov_gpu_device(const struct hf3fs_iov* iov);

/*
 * Waits until the device has finished all work that was submitted before this call, in all streams of the context that
 * holds the memory.
 *   direction    0: for a write to a file. Call the function before you submit the write; the NIC then reads what the
 *                GPU has written. 1: for a read from a file. Call the function after the read has completed; kernels
 *                that start after the call see what the NIC has written. Some devices show writes of a NIC only after
 *                a flush: hf3fs_wait_for_ios flushes them, and so does this function.
 * Errors
 *   -EINVAL      `iov` is not a GPU iov, or direction is neither 0 nor 1.
 *   -ENODEV      The context of the memory was destroyed.
 *   -EIO         The driver reports an error, perhaps of an earlier kernel.
 */
HF3FS_API int hf3fs_iovsync_gpu(const struct hf3fs_iov* iov, int direction);

/*
 * The handle with which another process imports the iov: bytes 0 to 63 are a CUDA IPC handle, 64 to 71 the size, 72 to
 * 79 the number of the device, in the byte order of the host. It has no offset: see gdrkit_iov_export_share.
 */
typedef struct {
    uint8_t data[80];
} hf3fs_gpu_ipc_handle_t;

/*
 * Exports the handle of a GPU iov.
 * Errors
 *   -EINVAL      `iov` is not a GPU iov, handle is null, the memory has no IPC handle (VMM, pools), or the iov does
 *                not begin at the start of its allocation.
 */
HF3FS_API int hf3fs_iov_export_gpu(const struct hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle);

/*
 * Maps the memory of a handle that another process exported, and publishes nothing. If the same memory is published on
 * this mount, the function sets iov->id to the id of that publication, so that the iov can be used with a ring.
 * Otherwise it sets iov->id to zeros. It sets iov->block_size to iov->size.
 * Errors
 *   -EINVAL      iov, handle or mount is null, the mount is empty or too long; the handle is malformed (an empty IPC
 *                handle, a size of 0); the allocation is smaller than the size in the handle; the driver refuses the
 *                handle (the owner is this process, has ended, or has freed the memory, or CUDA_VISIBLE_DEVICES hides
 *                the device from this process). The owner's device number in the handle is only a hint.
 *   -ENODEV      This process has no CUDA device.
 *   -ENOMEM      The device has not enough resources for the mapping.
 *   -EIO         The driver mapped the memory, but a later call of the driver failed.
 */
HF3FS_API int hf3fs_iov_import_gpu(struct hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle,
                                   const char* hf3fs_mount_point);

/* ---- third generation -------------------------------------------- */

enum hf3fs_mem_type {
    HF3FS_MEM_HOST = 0,
    HF3FS_MEM_DEVICE = 1,
    HF3FS_MEM_MANAGED = 2, /* Reserved: no function here creates or accepts such an iov. */
};

/*
 * Same as hf3fs_iovcreate_gpu, hf3fs_iovopen_gpu and hf3fs_iovwrap_gpu, but a block_size other than 0 is -EINVAL. The
 * functions never use host memory instead of device memory.
 */
HF3FS_API int hf3fs_iovcreate_device(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size,
                                     size_t block_size, int device_id);
HF3FS_API int hf3fs_iovopen_device(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point,
                                   size_t size, size_t block_size, int device_id);
HF3FS_API int hf3fs_iovwrap_device(struct hf3fs_iov* iov, void* device_ptr, const uint8_t id[16],
                                   const char* hf3fs_mount_point, size_t size, size_t block_size, int device_id);

/* Returns HF3FS_MEM_DEVICE for a GPU iov of this process, HF3FS_MEM_HOST for every other iov. */
HF3FS_API enum hf3fs_mem_type hf3fs_iov_mem_type(const struct hf3fs_iov* iov);

/* Same as hf3fs_iov_gpu_device. */
HF3FS_API int hf3fs_iov_device_id(const struct hf3fs_iov* iov);

/*
 * Same as hf3fs_iovsync_gpu for a GPU iov. For an iov of host memory it returns 0 at once, also without CUDA.
 *   -EINVAL      iov is null, or direction is neither 0 nor 1.
 */
HF3FS_API int hf3fs_iovsync(const struct hf3fs_iov* iov, int direction);

/* ---- extensions of gdrkit ---------------------------------------- */

/*
 * A versioned handle with an offset, the UUID of the device, the owner and a checksum. gdrkit.registration.share
 * exports and imports the same handles in Python.
 */
typedef struct {
    uint8_t data[192];
} gdrkit_share_handle_t;

/*
 * Exports the handle of a created or wrapped iov. The iov may begin anywhere in its allocation.
 * Errors
 *   -EINVAL      `iov` is not a GPU iov, or handle is null.
 *   -ENOTSUP     The memory has no IPC handle (VMM, pools), or was imported from another process.
 */
HF3FS_API int gdrkit_iov_export_share(const struct hf3fs_iov* iov, gdrkit_share_handle_t* handle);

/*
 * Same as hf3fs_iov_import_gpu, but uses the offset in the handle, and finds the device by its UUID.
 * Errors: the errors of hf3fs_iov_import_gpu, and
 *   -EINVAL      The handle is damaged or has another version.
 *   -ENOTSUP     The handle is of a type (VMM, dma-buf) that needs descriptors.
 *   -ESRCH       The owner has ended.
 */
HF3FS_API int gdrkit_iov_import_share(struct hf3fs_iov* iov, const gdrkit_share_handle_t* handle,
                                      const char* hf3fs_mount_point);

/*
 * The pool of device memory. If the agent of the mount can keep registrations of idle memory, hf3fs_iovcreate_gpu takes
 * memory from the pool, and hf3fs_iovdestroy_gpu returns it. So later iovs need no new allocation and registration.
 *
 * Memory goes only to a later iov of the same process, mount and device, and is filled with zeros before. The memory of
 * a destroyed iov is freed instead if another process borrowed the iov (open, import), if a handle of the iov was
 * exported, or if hf3fs_iovunlink_gpu withdrew the publication. Idle memory is freed if it is idle for too long, if the
 * idle bytes exceed the limit, or if less than a sixteenth of the memory of a device is free. The agent deregisters the
 * memory before it is freed.
 *
 * The environment variables GDRKIT_USRBIO_GPU_POOL_BYTES (limit of idle bytes of the process; 268435456 if unset; 0: no
 * pool) and GDRKIT_USRBIO_GPU_POOL_IDLE_MS (10000 if unset) set the limits at the first use.
 */
typedef struct {
    uint64_t idle_bytes_max; /* The limit of idle bytes. */
    uint64_t idle_blocks;    /* Number of allocations of the pool that no iov uses now. */
    uint64_t idle_bytes;     /* Bytes of these allocations. */
    uint64_t in_use_blocks;  /* Number of allocations of the pool that iovs use now. */
    uint64_t in_use_bytes;   /* Bytes of these allocations. */
    uint64_t hits;           /* Number of iovs that got idle memory. */
    uint64_t misses;         /* Number of iovs for which the pool had no idle memory. */
    uint64_t trimmed_blocks; /* Number of idle allocations that were freed. */
    uint64_t refused_blocks; /* Number of destroyed iovs whose memory could not be used again. */
} gdrkit_gpu_pool_statistics_t;

/*
 * Sets the limits of the pool of device memory, as the environment variables do. Frees the idle memory above the new
 * limit, beginning with the memory that is idle longest.
 */
HF3FS_API int gdrkit_gpu_pool_limit(size_t idle_bytes_max, unsigned idle_ms_max);

/* Frees the device memory that is idle longest, until at most `idle_bytes_max` bytes are idle. */
HF3FS_API int gdrkit_gpu_pool_trim(size_t idle_bytes_max);

/*
 * Fills `statistics`; `size` is the size of the struct.
 *   -EINVAL      statistics is null, or size belongs to another version of the struct.
 */
HF3FS_API int gdrkit_gpu_pool_query(gdrkit_gpu_pool_statistics_t* statistics, size_t size);

/*
 * The pool of host memory, which needs no CUDA. hf3fs_iovdestroy keeps the memory of an iov of at least 4 MiB for
 * later iovs of the same process, mount, size and NUMA node, for at most 3 s. Such an iov begins with zeros. The
 * environment variable GDRKIT_USRBIO_HOST_POOL_BYTES (268435456 if unset; 0: no pool) limits the idle bytes of the
 * process.
 *
 * Frees idle memory until at most `idle_bytes_max` bytes are idle, beginning with the memory that is idle longest.
 * Returns 0.
 */
HF3FS_API int gdrkit_host_pool_trim(size_t idle_bytes_max);

#ifdef __cplusplus
}
#endif
