/*
 * User-space I/O of 3FS: an application and an agent share memory. The application writes what it wants into a ring
 * (ior), the agent moves bytes between files and the application's buffers (iov), and the ring says when that is done.
 *
 * Conventions, unless a function says otherwise:
 *   - Functions return 0 or a count on success and a negative errno on failure. hf3fs_reg_fd, hf3fs_hardlink and
 *     hf3fs_punchhole return a *positive* errno on failure. errno itself is not part of the interface.
 *   - Sizes and offsets are in bytes, timeouts in milliseconds, deadlines in CLOCK_REALTIME.
 *   - Structures belong to the caller, who may put them anywhere and copies them at most while they are not in use;
 *     what is behind `iovh` and `iorh` belongs to the library until the matching destroy.
 *   - The library is safe to use from several threads at once, with one rule for a ring: one thread at a time prepares
 *     and submits, while others may wait. A ring, an iov or a registered descriptor must not be destroyed while another
 *     thread uses it.
 *   - Across fork(): a child may create iovs and rings of its own. What it inherited answers -EREMOTEIO, and destroying
 *     it there frees the child's copy alone. Memory mapped by iovs stays shared, as fork() does it.
 *
 * A mount is a folder with `3fs-virt/iovs` in it: a FUSE mount of 3FS, or a plain folder that an agent serves over the
 * socket `3fs-virt/agent.sock`. Where the socket is, the agent's answer decides, and its death is noticed: what is
 * under way then completes with -EREMOTEIO, and later calls on the same ring answer that. A new agent needs new rings
 * and iovs, and descriptors that are registered again. Without a socket nobody tells whether the other side lives.
 *
 * Environment, read once: HF3FS_USRBIO_LIB_LOG (DBG, INFO, WARN, ERR, OFF; default WARN; to stderr),
 * HF3FS_USRBIO_WAIT_JITTER_MS (longest sleep of a wait before it looks again whether the agent lives; default 1, and 20
 * with an agent that is known to wake who sleeps). With such an agent, and unless that variable is set, a wait without
 * a deadline does not look: the first one that sleeps starts a thread of the library, which blocks all signals, watches
 * the agent's socket and ends with the last iov, ring and descriptor of the mount.
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

#define HF3FS_SUPER_MAGIC 0x8f3f5fff

typedef void* hf3fs_iov_handle;
typedef void* hf3fs_ior_handle;

/* Memory that operations read into or write from. `id` are the 16 bytes of a UUID, in the order of its text. */
struct hf3fs_iov {
    uint8_t* base;
    hf3fs_iov_handle iovh; /* The library's; NULL for memory that was wrapped. */
    char id[16];
    char mount_point[256];
    size_t size;
    size_t block_size; /* 0: one block. No operation may cross a multiple of it. */
    int numa;          /* Node whose memory it is; -1: any. */
};

struct hf3fs_ior {
    struct hf3fs_iov iov; /* The ring's own memory. */
    hf3fs_ior_handle iorh;
    char mount_point[256];
    bool for_read; /* A ring reads, or it writes. */
    int io_depth;
    int priority;
    int timeout;
    uint64_t flags;
};

struct hf3fs_cqe {
    int32_t index; /* What hf3fs_prep_io returned. */
    int32_t reserved;
    int64_t result;       /* Bytes moved (fewer than asked: end of file), or -errno. */
    const void* userdata; /* What hf3fs_prep_io was given. */
};

/* flags of a ring */
#define HF3FS_IOR_ALLOW_READ_UNCOMMITTED 1 /* Reads may see what no committed chunk has yet. */
#define HF3FS_IOR_FORBID_READ_HOLES 2      /* A read that meets a hole is -ENODATA, not zeros. */

/*
 * Is the open file on a mount of 3FS? true when its file system says so (ioctl), or when it lies below a folder with an
 * agent's socket. false for anything else, a bad descriptor too.
 */
HF3FS_API bool hf3fs_is_hf3fs(int fd);

/*
 * Finds the mount that `path` (which must exist) lies in, writes it with its final 0 when `size` bytes are enough, and
 * returns how many bytes that takes. -1: null, no such path, or no mount. With `size` 0 the buffer may be NULL.
 * Of mounts in each other it is the innermost. HF3FS_USRBIO_DONT_CHECKFS_FOR_MP=yes in the environment takes any file
 * system with a folder 3fs-virt for one.
 */
HF3FS_API int hf3fs_extract_mount_point(char* hf3fs_mount_point, int size, const char* path);

/*
 * Makes shared memory of `size` bytes, zeroed, and publishes it. The pages are there when it returns.
 *   -EINVAL        iov or mount point null, mount point empty or 256 bytes or longer, size 0, block_size above size
 *   -EIO           no shared memory (the log says why: usually /dev/shm is full)
 *   -ENOENT        the mount point is no 3FS
 *   -EREMOTEIO     the agent is gone
 *   -errno         the agent's or the file system's verdict on the publication: -EACCES, -ENOTSUP, -ENOSPC ...
 * numa: node for the pages; -1 any. A node that cannot be had is logged, no error.
 * On failure nothing is left behind and *iov is not changed.
 */
HF3FS_API int hf3fs_iovcreate(struct hf3fs_iov* iov, const char* hf3fs_mount_point, size_t size, size_t block_size,
                              int numa);

/*
 * Maps what another process created; id, size and block_size are those of hf3fs_iovcreate. It stays the creator's:
 * unlinking does nothing, destroying unmaps. Where an agent listens it must have been published to it by a process of
 * the same user, and operations on it are -EACCES from when that process takes it back or ends.
 *   -EINVAL        null, mount point too long, size 0, or the link points elsewhere than into /dev/shm
 *   -ENOENT        no such iov, or its name was unlinked
 *   -EIO           it cannot be mapped, or is smaller than size
 *   -EREMOTEIO     the agent is gone
 *   -errno         of readlink, or the agent's verdict: -ENOENT nobody has published it, -EACCES another user has
 */
HF3FS_API int hf3fs_iovopen(struct hf3fs_iov* iov, const uint8_t id[16], const char* hf3fs_mount_point, size_t size,
                            size_t block_size, int numa);

/*
 * Removes the name of the shared memory: nobody else can open it, and who has it keeps it. The publication stays, I/O
 * goes on. Does nothing for an iov that was opened or wrapped.
 */
HF3FS_API void hf3fs_iovunlink(struct hf3fs_iov* iov);

/*
 * Takes the publication back, removes the name, unmaps the memory and sets iov->base and iov->iovh to NULL. No
 * operation on it may be under way. For an iov that was wrapped it takes back what hf3fs_iovwrap published and leaves
 * the memory. NULL and an iov that was destroyed before are let pass.
 */
HF3FS_API void hf3fs_iovdestroy(struct hf3fs_iov* iov);

/*
 * Describes memory that the caller has mapped from /dev/shm. The caller has made the link
 * <mount>/3fs-virt/iovs/<uuid>[.b<block_size>] to it, and removes it; the memory stays the caller's and must stay
 * mapped. A plain mount does not notice links, so there the library tells the agent about it.
 *   -EINVAL        null, mount point empty or too long, size 0
 *   -errno         the agent's verdict (plain mount with a link)
 */
HF3FS_API int hf3fs_iovwrap(struct hf3fs_iov* iov, void* base, const uint8_t id[16], const char* hf3fs_mount_point,
                            size_t size, size_t block_size, int numa);

/* Bytes of a ring with so many entries; 0 when there is none (entries below 1 or above 16777216). */
HF3FS_API size_t hf3fs_ior_size(int entries);

/* How many operations can be under way in a ring at once; -EINVAL: null or no ring. */
HF3FS_API int hf3fs_io_entries(const struct hf3fs_ior* ior);

/*
 * Makes a ring. The shorter forms have priority, timeout and flags 0; hf3fs_iorcreate4 has priority 0.
 * for_read: the ring reads files; else it writes them.
 * io_depth: > 0: the agent takes exact batches of so many, and what is no full batch stays (waiting for it never ends
 *           without a deadline); 0: it takes what is there; < 0: at most -io_depth at once.
 * timeout:  with io_depth < 0, milliseconds for which the agent holds a batch that is not full; 0: not at all.
 * priority: < 0 high, 0 normal, > 0 low.
 *   -EINVAL        null, mount point empty or too long, entries out of range, timeout < 0, |io_depth| > entries
 *   -ENOENT        the mount point is no 3FS
 *   -EIO           the submit semaphore's link is strange, or no shared memory
 *   -EREMOTEIO     the agent is gone
 *   -errno         of readlink of the link to the submit semaphore, or of opening it, or the verdict on the publication
 * On failure nothing is left behind.
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
 * A ring in memory that the caller has mapped, aligned to 64 bytes, and published by itself. The memory stays the
 * caller's. Codes as hf3fs_iorcreate; -EINVAL too when no ring fits the size or the memory holds no sound ring.
 */
HF3FS_API int hf3fs_iorwrap(struct hf3fs_ior* ior, void* buf, const char* hf3fs_mount_point, size_t size, bool for_read,
                            int io_depth, int priority, int timeout, uint64_t flags);

/* Takes the ring back. What is under way is not waited for: until the agent noticed, its buffers may be written. */
HF3FS_API void hf3fs_iordestroy(struct hf3fs_ior* ior);

/*
 * Makes a file usable in hf3fs_prep_io. The file is remembered by what it is: closing fd does not end the registration,
 * hf3fs_dereg_fd does. flags is reserved: give 0.
 *   <= 0           done; the value is -d, where d is a duplicate that the library holds. fd and -d both name the file.
 *   EBADF          fd is no open file on a 3FS mount
 *   EINVAL         fd is registered already (also when it was closed and the number given out again)
 *   EMFILE, ...    of dup and stat, or the agent's verdict
 *   EREMOTEIO      the agent is gone
 */
HF3FS_API int hf3fs_reg_fd(int fd, uint64_t flags);

/* Ends a registration, by either name. Other numbers are let pass. Operations that were prepared go on. */
HF3FS_API void hf3fs_dereg_fd(int fd);

/*
 * Prepares one operation: len bytes between the file at offset off and the memory at ptr, which lies in the iov. The
 * agent sees it after hf3fs_submit_ios. Makes no system call.
 *   >= 0           its index in the ring, which names it until its completion was returned
 *   -EINVAL        null, read differs from the ring's direction, len 0, [ptr, ptr + len) not inside the iov, off + len
 *                  above 2^63 - 1, a block boundary crossed, fd no possible descriptor
 *   -EBADF         fd is not registered
 *   -EACCES        the file was not opened for that direction
 *   -EAGAIN        the ring is full: wait for completions
 *   -EREMOTEIO     the agent is gone
 * fd: the descriptor that was registered, or what hf3fs_reg_fd returned.
 */
HF3FS_API int hf3fs_prep_io(const struct hf3fs_ior* ior, const struct hf3fs_iov* iov, bool read, void* ptr, int fd,
                            size_t off, uint64_t len, const void* userdata);

/*
 * Hands what was prepared to the agent. Wakes the agent if it sleeps; else it makes no system call.
 *   -EINVAL        null or no ring
 *   -EREMOTEIO     the agent is gone; what was prepared completes with that in hf3fs_wait_for_ios
 */
HF3FS_API int hf3fs_submit_ios(const struct hf3fs_ior* ior);

/*
 * Returns completions, in the order of completion: match them by index or userdata. Waits until there are min_results
 * (0: not at all; more than cqec counts as cqec) or the deadline has passed; NULL waits for as long as it takes.
 *   >= 0           how many cqes were written, up to cqec; fewer than min_results when the deadline passed
 *   -EINVAL        null, cqec <= 0, no ring, a deadline whose tv_nsec is not in [0, 999999999]
 *   -EREMOTEIO     the agent is gone and nothing is under way. (What was under way has come back before, each with
 *                  result -EREMOTEIO.)
 * cqe.result beside byte counts: -EINVAL, -EBADF (file not registered), -EACCES (iov not registered), -ENODATA (a hole,
 * with FORBID_READ_HOLES), -EREMOTEIO (agent or server gone), -ENOSPC, -EIO ...
 */
HF3FS_API int hf3fs_wait_for_ios(const struct hf3fs_ior* ior, struct hf3fs_cqe* cqes, int cqec, int min_results,
                                 const struct timespec* abs_timeout);

/*
 * Makes a second name of a file. 0, or a positive errno: EINVAL (null, empty name), ENAMETOOLONG, EXDEV (two mounts),
 * ENOTTY (no 3FS), EREMOTEIO, and those of link(2).
 */
HF3FS_API int hf3fs_hardlink(const char* target, const char* link_name);

/*
 * Removes n ranges [start[i], end[i]) of a file, which read as holes then. 0, or a positive errno: EINVAL (null, n not
 * in [1, 1000], end before start), EBADF (not open for writing), ENOTTY (no 3FS), EREMOTEIO. After an error some ranges
 * may be gone. flags must be 0.
 */
HF3FS_API int hf3fs_punchhole(int fd, int n, const size_t* start, const size_t* end, size_t flags);

#ifdef __cplusplus
}
#endif

/* Programs of the third generation of the GPU interface include this header alone. */
#include "hf3fs_usrbio_gdr.h"

#endif /* HF3FS_USRBIO_H */
