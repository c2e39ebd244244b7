/*
 * User-space I/O of 3FS. An application and an agent share memory. The application writes its requests into a ring
 * (ior), the agent moves bytes between files and the application's buffers (iov), and the ring reports the completions.
 *
 * Conventions, unless the description of a function says otherwise:
 *   - Functions return 0 or a count on success and a negative errno on failure. hf3fs_reg_fd, hf3fs_hardlink and
 *     hf3fs_punchhole return a *positive* errno on failure. The variable errno after a call has no meaning.
 *   - Sizes and offsets are in bytes, timeouts in milliseconds. Deadlines are times of CLOCK_REALTIME.
 *   - Structures belong to the caller. They may be anywhere in memory, and may be copied while no function uses them.
 *     The objects behind `iovh` and `iorh` belong to the library until hf3fs_iovdestroy or hf3fs_iordestroy.
 *   - Several threads may use the library at once, with one rule for a ring: one thread at a time prepares and submits,
 *     while others may wait. No thread may destroy a ring, an iov or a registered descriptor that another thread uses.
 *   - After fork(), a child may create iovs and rings of its own. If it uses a ring of its parent, the functions return
 *     -EREMOTEIO. If it destroys iovs or rings of its parent, they free only the child's copy. Memory mapped by iovs
 *     stays shared, as fork() leaves it.
 *
 * A mount is a folder with `3fs-virt/iovs` in it: a FUSE mount of 3FS, or a plain folder that an agent serves over the
 * socket `3fs-virt/agent.sock`. The library publishes each iov and ring in `3fs-virt/iovs`, so that the agent or the
 * FUSE daemon finds the memory. If the socket exists, the agent accepts or refuses each publication. If this agent
 * dies, operations in flight complete with -EREMOTEIO, and later calls on the same ring return -EREMOTEIO. With a new
 * agent, create new rings and iovs, and register descriptors again. Without a socket, the library cannot notice the
 * death of the FUSE daemon.
 *
 * Environment variables, which the library reads once:
 *   HF3FS_USRBIO_LIB_LOG         Level of the log on stderr: DBG, INFO, WARN (the default), ERR or OFF. ERR: failed
 *                                calls. WARN: calls that work, but not as well as they could. INFO: each iov, ring
 *                                and file that is created, published, registered or destroyed. DBG: each operation,
 *                                submission and completion.
 *   HF3FS_USRBIO_WAIT_JITTER_MS  Longest sleep of hf3fs_wait_for_ios before it checks again whether the agent lives.
 *                                Default: 1, or 20 if the agent supports gdrkit's extension of the ring layout, as the
 *                                agent of gdrkit does.
 * If the agent supports the extension and HF3FS_USRBIO_WAIT_JITTER_MS is not set, a wait without a deadline makes no
 * such checks. Instead, a thread of the library watches the agent's socket. This thread starts when such a wait first
 * sleeps, blocks all signals, and ends with the last iov, ring and descriptor of the mount.
 */
#ifndef HF3FS_USRBIO_H
#define HF3FS_USRBIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HF3FS_API __attribute__((visibility("default")))

/* The number by which an ioctl of 3FS identifies its file system (see hf3fs_is_hf3fs). */
#define HF3FS_SUPER_MAGIC 0x8f3f5fff

typedef void* hf3fs_iov_handle;
typedef void* hf3fs_ior_handle;

/* Memory that operations read into or write from. `id` contains the 16 bytes of a UUID, in the order of its text. */
struct hf3fs_iov {
    uint8_t* base;
    hf3fs_iov_handle iovh; /* For the library's use; NULL for memory that was wrapped. */
    char id[16];
    char mount_point[256];
    size_t size;
    size_t block_size; /* No operation may cross a multiple of it, counted from `base`. 0: no such limit. */
    int numa;          /* NUMA node of the memory; -1: any. */
};

struct hf3fs_ior {
    struct hf3fs_iov iov;  /* Memory of the ring itself. */
    hf3fs_ior_handle iorh; /* For the library's use. */
    char mount_point[256];
    bool for_read; /* true: the ring reads files; false: it writes them. */
    int io_depth;  /* hf3fs_iorcreate describes io_depth, timeout and priority. */
    int priority;
    int timeout;    /* In milliseconds. */
    uint64_t flags; /* HF3FS_IOR_ALLOW_READ_UNCOMMITTED, HF3FS_IOR_FORBID_READ_HOLES. */
};

struct hf3fs_cqe {
    int32_t index; /* Index that hf3fs_prep_io returned. */
    int32_t reserved;
    int64_t result;       /* Bytes moved (fewer than requested: end of file), or -errno. */
    const void* userdata; /* `userdata` of hf3fs_prep_io. */
};

/* flags of a ring */
#define HF3FS_IOR_ALLOW_READ_UNCOMMITTED 1 /* Reads may return data that is not in a committed chunk yet. */
#define HF3FS_IOR_FORBID_READ_HOLES 2      /* A read that meets a hole fails with -ENODATA; otherwise it reads zeros. */

/*
 * Returns true if an open file is on a mount of 3FS: its file system answers the ioctl of 3FS, or the file is below a
 * folder with an agent's socket. Returns false for every other file, and for a bad descriptor.
 */
HF3FS_API bool hf3fs_is_hf3fs(int fd);

/*
 * Finds the mount that contains `path`, which must exist. Returns the length of the path of the mount, including the
 * final 0. Writes this path to the buffer unless it is longer than `size` bytes. Returns -1 if an argument is null,
 * `path` does not exist, or no mount contains it. With `size` 0 the buffer may be NULL. If several mounts contain the
 * path, the function chooses the innermost. With HF3FS_USRBIO_DONT_CHECKFS_FOR_MP=yes in the environment, a mounted
 * file system of any type is a mount of 3FS if it contains a folder 3fs-virt.
 */
HF3FS_API int hf3fs_extract_mount_point(char* hf3fs_mount_point, int size, const char* path);

/*
 * Creates shared memory of `size` bytes, zeroed, and publishes it. All pages are allocated before the return.
 *   -EINVAL        iov or mount point null, mount point empty or 256 bytes or longer, size 0, block_size above size
 *   -EIO           shared memory cannot be allocated (the log has the reason: usually /dev/shm is full)
 *   -ENOENT        the mount point is not a mount of 3FS
 *   -EREMOTEIO     the agent has ended
 *   -errno         the agent or the file system refused the publication: -EACCES, -ENOTSUP, -ENOSPC ...
 * numa: NUMA node for the pages; -1: any. If that node has no memory, the library logs this and uses another node.
 * After a failure nothing is left behind, and *iov is unchanged.
 */
HF3FS_API int hf3fs_iovcreate(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size, size_t block_size,
                              int numa);

/*
 * Maps memory that another process created with this id, size and block_size. The creator still owns the memory:
 * hf3fs_iovunlink does nothing, and hf3fs_iovdestroy only unmaps it. If an agent serves the mount, a process of the
 * same user must have published the memory to the agent. Operations on the memory fail with -EACCES from the time at
 * which that process withdraws the publication or ends.
 *   -EINVAL        null, mount point empty or too long, size 0, or the link points outside /dev/shm
 *   -ENOENT        the iov does not exist, or its name was unlinked
 *   -EIO           mmap failed, or the memory is smaller than size
 *   -EREMOTEIO     the agent has ended
 *   -errno         readlink failed, or the agent refused: -ENOENT (not published), -EACCES (published by another user)
 */
HF3FS_API int hf3fs_iovopen(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point, size_t size,
                            size_t block_size, int numa);

/*
 * Removes the name of the shared memory: no further process can open it, and existing mappings stay. The publication
 * stays too, so I/O continues. Does nothing for an iov that was opened or wrapped.
 */
HF3FS_API void hf3fs_iovunlink(struct hf3fs_iov* iov);

/*
 * Withdraws the publication, removes the name, unmaps the memory and sets iov->base and iov->iovh to NULL. Large memory
 * may go to the pool instead: see gdrkit_host_pool_trim. No operation on the iov may be in flight. For an iov that was
 * wrapped, the function only withdraws the publication of hf3fs_iovwrap. Does nothing for NULL and for an iov that was
 * destroyed before.
 */
HF3FS_API void hf3fs_iovdestroy(struct hf3fs_iov* iov);

/*
 * Fills *iov for memory that the caller has mapped from /dev/shm. The caller has created the link
 * <mount>/3fs-virt/iovs/<uuid>[.b<block size>] to this memory, and removes the link later. The caller still owns the
 * memory, which must stay mapped. iov->block_size is set to the block size in the name of the link (0 if the name has
 * none), also if `block_size` differs. If the mount is not a FUSE mount, the library reports the link to the agent,
 * which withdraws the publication when the caller removes the link.
 *   -EINVAL        null, mount point empty or too long, size 0
 *   -ENOENT        there is no link with this uuid, so nothing is published
 *   -errno         the agent refused the publication (only if the mount is not a FUSE mount)
 */
HF3FS_API int hf3fs_iovwrap(struct hf3fs_iov* iov, void* base, const uint8_t id[16], const char* hf3fs_mount_point,
                            size_t size, size_t block_size, int numa);

/* Returns the size of a ring with this number of entries, in bytes; 0 if `entries` is not from 1 to 16777216. */
HF3FS_API size_t hf3fs_ior_size(int entries);

/* Returns how many operations can be in flight in a ring at once, or -EINVAL: ior is null or not a ring. */
HF3FS_API int hf3fs_io_entries(const struct hf3fs_ior* ior);

/*
 * Creates a ring. A function without the parameter priority, timeout or flags uses 0 for it.
 * for_read: true: the ring reads files; false: it writes them.
 * io_depth: > 0: the agent takes batches of exactly that many operations, and an incomplete batch stays in the ring (a
 *           wait for it without a deadline never ends); 0: the agent takes all submitted operations; < 0: the agent
 *           takes at most -io_depth operations at once.
 * timeout:  with io_depth < 0, milliseconds for which the agent waits for more operations before it takes an incomplete
 *           batch; 0: it takes the batch at once.
 * priority: < 0 high, 0 normal, > 0 low.
 *   -EINVAL        null, mount point empty or too long, entries out of range, timeout < 0, |io_depth| > entries
 *   -ENOENT        the mount point is not a mount of 3FS
 *   -EIO           the link 3fs-virt/iovs/submit-ios* of the submit semaphore, which wakes the agent, is invalid, or
 *                  shared memory cannot be allocated
 *   -EREMOTEIO     the agent has ended
 *   -errno         the link of the submit semaphore cannot be read, the semaphore cannot be opened, or the agent
 *                  refused the publication
 * After a failure nothing is left behind.
 */
HF3FS_API int hf3fs_iorcreate(struct hf3fs_ior* ior, const char* hf3fs_mount_point, int entries, bool for_read,
                              int io_depth, int numa);
HF3FS_API int hf3fs_iorcreate2(struct hf3fs_ior* ior, const char* hf3fs_mount_point, int entries, bool for_read,
                               int io_depth, int priority, int numa);
HF3FS_API int hf3fs_iorcreate3(struct hf3fs_ior* ior, const char* hf3fs_mount_point, int entries, bool for_read,
                               int io_depth, int priority, int timeout, int numa);
HF3FS_API int hf3fs_iorcreate4(struct hf3fs_ior* ior, const char* hf3fs_mount_point, int entries, bool for_read,
                               int io_depth, int timeout, int numa, uint64_t flags);

/*
 * Makes *ior a ring in memory that the caller has mapped, aligned to 64 bytes, and published. The caller still owns
 * the memory. The errors are the errors of hf3fs_iorcreate. The function also returns -EINVAL if `size` is too small or
 * too large for a ring, or if the memory contains an invalid ring.
 */
HF3FS_API int hf3fs_iorwrap(struct hf3fs_ior* ior, void* buf, const char* hf3fs_mount_point, size_t size, bool for_read,
                            int io_depth, int priority, int timeout, uint64_t flags);

/*
 * Withdraws the ring. The function does not wait for operations in flight, so wait for their completions before: the
 * agent may write to their buffers until it has noticed the withdrawal.
 */
HF3FS_API void hf3fs_iordestroy(struct hf3fs_ior* ior);

/*
 * Registers a file for use in hf3fs_prep_io. The library identifies the file by its inode: closing fd does not end the
 * registration, hf3fs_dereg_fd does. flags is reserved and must be 0.
 *   <= 0           success; the value is -d, where d is a duplicate of fd that the library holds. hf3fs_prep_io and
 *                  hf3fs_dereg_fd accept both fd and -d.
 *   EBADF          fd is not an open file on a 3FS mount
 *   EINVAL         fd is registered already (also if fd was closed afterwards and its number was reused)
 *   EMFILE, ...    dup or stat failed, or the agent refused
 *   EREMOTEIO      the agent has ended
 */
HF3FS_API int hf3fs_reg_fd(int fd, uint64_t flags);

/*
 * Ends a registration; fd is the registered descriptor or the value that hf3fs_reg_fd returned. Does nothing for other
 * numbers. Operations that were prepared before continue.
 */
HF3FS_API void hf3fs_dereg_fd(int fd);

/*
 * Prepares one operation: len bytes between the file at offset off and the memory at ptr, which is inside the iov. The
 * agent sees the operation after hf3fs_submit_ios. Makes no system call.
 *   >= 0           index of the operation in the ring, valid until its completion was returned
 *   -EINVAL        null, read differs from the ring's direction, len 0, [ptr, ptr + len) not inside the iov, off + len
 *                  above 2^63 - 1, a block boundary crossed, fd out of range
 *   -EBADF         fd is not registered
 *   -EACCES        the file was not opened for that direction
 *   -EAGAIN        the ring is full: wait for completions
 *   -EREMOTEIO     the agent has ended
 * fd: the descriptor that was registered, or the value that hf3fs_reg_fd returned.
 */
HF3FS_API int hf3fs_prep_io(const struct hf3fs_ior* ior, const struct hf3fs_iov* iov, bool read, void* ptr, int fd,
                            size_t off, uint64_t len, const void* userdata);

/*
 * Passes the prepared operations to the agent. Makes a system call only to wake a sleeping agent.
 *   -EINVAL        ior is null or not a ring
 *   -EREMOTEIO     the agent has ended; hf3fs_wait_for_ios returns the prepared operations with the result -EREMOTEIO
 */
HF3FS_API int hf3fs_submit_ios(const struct hf3fs_ior* ior);

/*
 * Returns completions, in the order of completion: match them by index or userdata. Waits until there are min_results
 * completions (0: does not wait; more than cqec counts as cqec) or until the deadline abs_timeout has passed (NULL: no
 * deadline).
 *   >= 0           number of cqes written, up to cqec; fewer than min_results if the deadline has passed
 *   -EINVAL        null, cqec <= 0, not a ring, or a deadline whose tv_nsec is not in [0, 999999999]
 *   -EREMOTEIO     the agent has ended and no operation is in flight (operations in flight are returned before, each
 *                  with result -EREMOTEIO)
 * cqe.result is a byte count or an error: -EINVAL, -EBADF (file not registered), -EACCES (this process has neither
 * published nor opened the iov), -ENODATA (a hole, with HF3FS_IOR_FORBID_READ_HOLES), -EREMOTEIO (agent or server has
 * ended), -ENOSPC, -EIO ...
 */
HF3FS_API int hf3fs_wait_for_ios(const struct hf3fs_ior* ior, struct hf3fs_cqe* cqes, int cqec, int min_results,
                                 const struct timespec* abs_timeout);

/*
 * Creates a hard link. Returns 0, or a positive errno: EINVAL (null, empty name), ENAMETOOLONG, EXDEV (two mounts),
 * ENOTTY (not a mount of 3FS), EREMOTEIO, and errors of link(2).
 */
HF3FS_API int hf3fs_hardlink(const char* target, const char* link_name);

/*
 * Removes n ranges [start[i], end[i]) of a file, which read as holes afterwards. Returns 0, or a positive errno: EINVAL
 * (null, n not in [1, 1000], end before start), EBADF (not open for writing), ENOTTY (not a mount of 3FS), EREMOTEIO.
 * After an error some ranges may have been removed. flags must be 0.
 */
HF3FS_API int hf3fs_punchhole(int fd, int n, const size_t* start, const size_t* end, size_t flags);

#ifdef __cplusplus
}
#endif

/* Programs of the third generation of the GPU interface include only hf3fs_usrbio.h, so it includes the GPU header. */
#include "hf3fs_usrbio_gdr.h"

#endif /* HF3FS_USRBIO_H */
