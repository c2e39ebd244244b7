/*
 * hf3fs usrbio with GPU memory: iovs whose bytes lie in the memory of a CUDA device, for reads and writes that no CPU
 * copies. The names ending in _gpu are those of the first generation of this interface, those ending in _device and
 * hf3fs_iovsync, hf3fs_iov_mem_type and hf3fs_iov_device_id those of the third; both work on the same iovs.
 *
 * WHAT HOLDS FOR ALL FUNCTIONS
 *   Results      0, or a negative errno. Nothing is changed when a function fails, unless it says otherwise.
 *   -ENOTSUP     Every function that returns an error returns this one, whatever its arguments, when this process has
 *                no CUDA: there is no libcuda.so.1, it cannot be initialized, or the library was built with
 *                ENABLE_GDR=OFF.
 *   Threads      Any thread may call, also at the same time. The CUDA context that is current in the calling thread is
 *                the same afterwards.
 *   Structs      A null pointer, a struct of zeros, one that was destroyed and one of host memory are no GPU iov; they
 *                are refused or ignored, never followed. A copy of a struct names the same iov.
 *   Addresses    iov->base is a device address. No CPU may follow it; hf3fs_prep_io takes it, and whatever lies between
 *                it and iov->base + iov->size, as `ptr`.
 *   Logging      The environment variable HF3FS_USRBIO_LIB_LOG; errors say what the driver answered.
 *   fork         A child that is forked has none of its parent's GPU iovs: there they are ignored.
 *
 * PUBLICATION
 *   An iov is known to others by the symbolic link <mount>/3fs-virt/iovs/<uuid>.gdr.d<device>, whose target is
 *     gdr://v2/device/<device>/allocation/<bytes>/offset/<bytes>/size/<bytes>/ipc/<128 hexadecimal digits>
 *   (the CUDA IPC handle of the allocation, and where in it the iov lies), or, for memory that has no IPC handle (VMM,
 *   memory pools), the same with /dmabuf at its end. Where the mount has an agent (<mount>/3fs-virt/agent.sock), it
 *   gets the dma-buf of the memory with it and registers that; its verdict is the result of the publication. Else there
 *   is the link alone, and whoever serves the mount decides.
 *
 * OWNERSHIP
 *   create  owns the memory and the link;  wrap  owns the link;  open and import  own neither, only their mapping.
 *   hf3fs_iovunlink and hf3fs_iovdestroy do for a GPU iov what hf3fs_iovunlink_gpu and hf3fs_iovdestroy_gpu do.
 */
#pragma once

#include "hf3fs_usrbio.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what this process has --------------------------------------- */

/*
 * True when some CUDA device of this process can share its memory with other processes (it has unified addressing, and
 * its compute mode lets processes use it). It says nothing about NICs: the result of create or wrap is the verdict for
 * that very memory.
 */
HF3FS_API bool hf3fs_gdr_available(void);

/* How many CUDA devices this process sees (CUDA_VISIBLE_DEVICES counts); 0 when it has no CUDA. */
HF3FS_API int hf3fs_gdr_device_count(void);

/* ---- first generation -------------------------------------------- */

/*
 * Allocates `size` bytes on the device and publishes them by a new random id, which is iov->id afterwards. The memory
 * is not cleared. It is allocated in whole pages of 64 KiB, with CU_POINTER_ATTRIBUTE_SYNC_MEMOPS set, in the primary
 * context of the device, which stays retained until the iov is destroyed.
 *   block_size   Is kept in iov->block_size: no operation of hf3fs_prep_io may cross a multiple of it. 0: no such
 *                limit. The memory is registered in one piece whatever it says.
 * Errors
 *   -EINVAL      iov or mount is null, the mount is empty or has 256 characters or more, or size is 0.
 *   -ENODEV      There is no such device, or it has no context for us.
 *   -ENOMEM      The device has not that much memory.
 *   -ENOTSUP     Also: neither a dma-buf nor an IPC handle goes from this device to whoever serves the mount.
 *   -EIO         The driver failed.
 *   other        What the agent or symlink(2) answered: -ENOENT (no 3fs-virt/iovs there), -EACCES, -EREMOTEIO (the
 *                agent has ended), what a NIC said ...
 */
HF3FS_API int hf3fs_iovcreate_gpu(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size, size_t block_size,
                                  int gpu_device_id);

/*
 * Maps memory that another process published as `id`. Memory of this very process cannot be opened. Where an agent
 * listens it lends the publication: operations are -EACCES from when its owner takes it back or ends.
 *   size         The size of the iov as it was published.
 * Errors: those of create, and
 *   -ENOENT      There is no such publication on this device.
 *   -EINVAL      Its target is malformed, of another device or another size, or the driver says that the memory is
 *                another.
 *   -ENOTSUP     It was published by its dma-buf alone: VMM memory and pools have no IPC handle.
 *   -EIO         The driver refuses: the owner is this process, has ended, or has freed the memory.
 *   other        What the agent answered: -EACCES (it is another user's), -ENOENT (nobody has published it),
 *                -EREMOTEIO (the agent has ended) ...
 */
HF3FS_API int hf3fs_iovopen_gpu(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point, size_t size,
                                size_t block_size, int gpu_device_id);

/*
 * Publishes `size` bytes of device memory that somebody else allocated (cudaMalloc, a tensor ...) as `id`; gpu_ptr may
 * lie inside an allocation. The memory must stay until the iov is destroyed. Its SYNC_MEMOPS attribute is set, and
 * stays set; for VMM memory, which has no such attribute, the flag CU_CTX_SYNC_MEMOPS of the context.
 * Errors: those of create, and
 *   -EINVAL      gpu_ptr or id is null; the bytes are host memory, managed memory or another device's, or run over the
 *                end of their allocation.
 *   -EEXIST      There is such a publication.
 */
HF3FS_API int hf3fs_iovwrap_gpu(struct hf3fs_iov* iov, void* gpu_ptr, const uint8_t id[16],
                                const char* hf3fs_mount_point, size_t size, size_t block_size, int gpu_device_id);

/*
 * Takes the publication of a created or wrapped iov back: the agent deregisters the memory, the link goes. The memory
 * stays. Does nothing for other iovs. When it fails, that is logged, and this function or destroy tries again.
 */
HF3FS_API void hf3fs_iovunlink_gpu(struct hf3fs_iov* iov);

/*
 * The end of a GPU iov, in this order: the publication is taken back, if hf3fs_iovunlink_gpu has not done that (a link
 * that somebody made since under the same name stays); memory that create allocated is freed, a mapping of open or
 * import closed; the struct is zeroed. When the publication cannot be taken back, a NIC may still reach the memory:
 * then it is neither freed nor the struct zeroed, and destroy may be called again. Does nothing for what is no GPU iov.
 */
HF3FS_API void hf3fs_iovdestroy_gpu(struct hf3fs_iov* iov);

/* Whether it is a GPU iov of this process. */
HF3FS_API bool hf3fs_iov_is_gpu(const struct hf3fs_iov* iov);

/* The number of its device; -1 when it is no GPU iov. */
HF3FS_API int hf3fs_iov_gpu_device(const struct hf3fs_iov* iov);

/*
 * Waits until work that was given to the device before has finished (all streams of the context that holds the memory).
 *   direction    0 before a write is submitted: the NIC then reads what the GPU has written. 1 after a read has
 *                completed: kernels that are started from now on see what the NIC has written; on devices that need
 *                it, its writes are flushed.
 * Errors
 *   -EINVAL      It is no GPU iov, or another direction.
 *   -ENODEV      The context of the memory is gone.
 *   -EIO         The driver failed, or an earlier kernel did.
 */
HF3FS_API int hf3fs_iovsync_gpu(const struct hf3fs_iov* iov, int direction);

/*
 * What another process needs to import the iov: bytes 0 to 63 a CUDA IPC handle, 64 to 71 the size, 72 to 79 the number
 * of the device, in the host's byte order. It has no offset: see gdrkit_iov_export_share.
 */
typedef struct {
    uint8_t data[80];
} hf3fs_gpu_ipc_handle_t;

/*
 * Errors
 *   -EINVAL      It is no GPU iov, handle is null, the memory has no IPC handle (VMM, pools), or the iov begins inside
 * its allocation.
 */
HF3FS_API int hf3fs_iov_export_gpu(const struct hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle);

/*
 * Maps the memory of such a handle, which another process exported. Publishes nothing. iov->id becomes that of the
 * publication on this mount that says the same (so that the iov can be used with a ring), and zeros when there is none.
 * iov->block_size is iov->size.
 * Errors
 *   -EINVAL      iov, handle or mount is null, the mount is empty or too long; the handle is malformed (an empty IPC
 *                handle, a size of 0); the allocation is smaller than the handle says; the driver refuses it (the owner
 *                is this process, has ended, or has freed the memory).
 *   -ENODEV      There is no such device here.
 *   -ENOMEM      There is no room for the mapping.
 *   -EIO         The driver failed afterwards.
 */
HF3FS_API int hf3fs_iov_import_gpu(struct hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle,
                                   const char* hf3fs_mount_point);

/* ---- third generation -------------------------------------------- */

enum hf3fs_mem_type {
    HF3FS_MEM_HOST = 0,
    HF3FS_MEM_DEVICE = 1,
    HF3FS_MEM_MANAGED = 2, /* Reserved: no function here makes or takes such an iov. */
};

/*
 * As hf3fs_iovcreate_gpu, hf3fs_iovopen_gpu and hf3fs_iovwrap_gpu; a block_size other than 0 is -EINVAL. Never host
 * memory instead.
 */
HF3FS_API int hf3fs_iovcreate_device(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size,
                                     size_t block_size, int device_id);
HF3FS_API int hf3fs_iovopen_device(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point,
                                   size_t size, size_t block_size, int device_id);
HF3FS_API int hf3fs_iovwrap_device(struct hf3fs_iov* iov, void* device_ptr, const uint8_t id[16],
                                   const char* hf3fs_mount_point, size_t size, size_t block_size, int device_id);

/* HF3FS_MEM_DEVICE for a GPU iov of this process, HF3FS_MEM_HOST for everything else. */
HF3FS_API enum hf3fs_mem_type hf3fs_iov_mem_type(const struct hf3fs_iov* iov);

/* As hf3fs_iov_gpu_device. */
HF3FS_API int hf3fs_iov_device_id(const struct hf3fs_iov* iov);

/*
 * As hf3fs_iovsync_gpu for a GPU iov. For an iov of host memory there is nothing to wait for: 0, also without CUDA.
 *   -EINVAL      iov is null, or the direction is neither 0 nor 1.
 */
HF3FS_API int hf3fs_iovsync(const struct hf3fs_iov* iov, int direction);

/* ---- gdrkit's own ------------------------------------------------ */

/*
 * A versioned handle with an offset, the UUID of the device, the owner and a checksum: what gdrkit.registration.share
 * exports and imports in Python.
 */
typedef struct {
    uint8_t data[192];
} gdrkit_share_handle_t;

/*
 * The handle of a created or wrapped iov, wherever in its allocation it begins.
 * Errors
 *   -EINVAL      It is no GPU iov, or handle is null.
 *   -ENOTSUP     The memory has no IPC handle (VMM, pools), or is itself another process's.
 */
HF3FS_API int gdrkit_iov_export_share(const struct hf3fs_iov* iov, gdrkit_share_handle_t* handle);

/*
 * As hf3fs_iov_import_gpu, at the right byte and on the right device, which is found by its UUID.
 * Errors: those of hf3fs_iov_import_gpu, and
 *   -EINVAL      The handle is damaged or of another version.
 *   -ENOTSUP     It is of the VMM or the dma-buf kind, which come with descriptors.
 *   -ESRCH       The owner has ended.
 */
HF3FS_API int gdrkit_iov_import_share(struct hf3fs_iov* iov, const gdrkit_share_handle_t* handle,
                                      const char* hf3fs_mount_point);

#ifdef __cplusplus
}
#endif
