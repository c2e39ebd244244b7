// The C functions for rings: hf3fs_ior_size, hf3fs_io_entries, hf3fs_iorcreate to hf3fs_iorcreate4, hf3fs_iorwrap and
// hf3fs_iordestroy.
#include "common/errno_text.hpp"
#include "usrbio/client/host_iov.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/ring_handle.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>

static_assert(sizeof(hf3fs_ior) == 600 && offsetof(hf3fs_ior, iov) == 0 && offsetof(hf3fs_ior, iorh) == 312 &&
              offsetof(hf3fs_ior, mount_point) == 320 && offsetof(hf3fs_ior, for_read) == 576 &&
              offsetof(hf3fs_ior, io_depth) == 580 && offsetof(hf3fs_ior, priority) == 584 &&
              offsetof(hf3fs_ior, timeout) == 588 && offsetof(hf3fs_ior, flags) == 592);

namespace gdrkit::usrbio {

namespace {

// Opens the semaphore that wakes the agent, or the FUSE daemon that serves the ring. Three links in
// <mount>/3fs-virt/iovs point to the semaphores of the three priorities: submit-ios (0), submit-ios.ph (below 0: high)
// and submit-ios.pl (above 0: low).
int open_submit_semaphore(const char* mount, int priority, NamedSemaphore& semaphore) {
    const std::string link_path = make_link_path(mount, priority == 0  ? "submit-ios"
                                                        : priority < 0 ? "submit-ios.ph"
                                                                       : "submit-ios.pl");
    char buffer[PATH_MAX];
    const ssize_t length = readlink(link_path.c_str(), buffer, sizeof(buffer));
    if (length < 0) {
        const int error = errno;
        log_line(LogLevel::error, "readlink(%s) failed: %s. Check the mount point, and that its agent runs",
                 link_path.c_str(), ErrnoText(error).c_str());
        return -error;
    }
    const std::string_view target(buffer, static_cast<std::size_t>(length));
    constexpr std::string_view semaphore_prefix = "/dev/shm/sem.";
    if (!target.starts_with(semaphore_prefix) || target.size() == semaphore_prefix.size() ||
        target.find('/', semaphore_prefix.size()) != std::string_view::npos) {
        log_line(LogLevel::error, "%s does not point to a semaphore in /dev/shm", link_path.c_str());
        return -EIO;
    }
    return semaphore.open(std::string(target).c_str());
}

bool are_attributes_valid(const RingAttributes& attributes, std::size_t entries) noexcept {
    // The absolute value of io_depth is the size of a batch. The sign selects a rule, see AgentRing::attach().
    const auto batch_size = static_cast<std::size_t>(std::abs(static_cast<long>(attributes.io_depth)));
    return entries != 0 && attributes.timeout_ms >= 0 && batch_size <= entries;
}

// Creates a RingHandle, opens the submit semaphore and connects to the agent. create_ring() creates shared memory only
// after these steps, so that their failure leaves no shared memory behind.
int make_ring_handle(const char* mount, const RingAttributes& attributes, std::unique_ptr<RingHandle>& handle) {
    handle = std::make_unique<RingHandle>();
    if (const int status = open_submit_semaphore(mount, attributes.priority, handle->submit_semaphore); status != 0) {
        return status;
    }
    const int status = find_agent_connection(mount, handle->agent);
    return status == -ENOENT ? 0 : status; // -ENOENT: there is no agent's socket, so a FUSE daemon serves the ring.
}

void fill_ior(hf3fs_ior& ior, const hf3fs_iov& iov, RingHandle* handle, const char* mount,
              const RingAttributes& attributes) noexcept {
    ior = {};
    ior.iov = iov;
    ior.iorh = handle;
    std::strcpy(ior.mount_point, mount);
    ior.for_read = attributes.for_read;
    ior.io_depth = attributes.io_depth;
    ior.priority = attributes.priority;
    ior.timeout = attributes.timeout_ms;
    ior.flags = attributes.flags;
}

int create_ring(hf3fs_ior* ior, const char* mount, int entries, int numa, const RingAttributes& attributes) noexcept {
    if (ior == nullptr || !is_valid_mount(mount) || hf3fs_ior_size(entries) == 0 ||
        !are_attributes_valid(attributes, static_cast<std::size_t>(entries))) {
        return -EINVAL;
    }
    try {
        std::unique_ptr<RingHandle> handle;
        if (const int status = make_ring_handle(mount, attributes, handle); status != 0) {
            return status;
        }
        hf3fs_iov iov{};
        const std::size_t size = hf3fs_ior_size(entries);
        if (const int status = create_host_iov(iov, mount, size, 0, numa, &attributes); status != 0) {
            return status;
        }
        if (const int status = ApplicationRing::attach(iov.base, size, handle->ring); status != 0) {
            hf3fs_iovdestroy(&iov);
            return status;
        }
        fill_ior(*ior, iov, handle.release(), mount, attributes);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

size_t hf3fs_ior_size(int entries) {
    return entries < 1 || static_cast<std::size_t>(entries) > ring_entries_max
               ? 0
               : ring_bytes(static_cast<std::size_t>(entries));
}

int hf3fs_io_entries(const hf3fs_ior* ior) {
    const std::size_t entries = ior == nullptr ? 0 : ring_entries(ior->iov.size);
    return entries == 0 ? -EINVAL : static_cast<int>(entries);
}

int hf3fs_iorcreate(hf3fs_ior* ior, const char* mount, int entries, bool for_read, int io_depth, int numa) {
    return hf3fs_iorcreate3(ior, mount, entries, for_read, io_depth, 0, 0, numa);
}

int hf3fs_iorcreate2(hf3fs_ior* ior, const char* mount, int entries, bool for_read, int io_depth, int priority,
                     int numa) {
    return hf3fs_iorcreate3(ior, mount, entries, for_read, io_depth, priority, 0, numa);
}

int hf3fs_iorcreate3(hf3fs_ior* ior, const char* mount, int entries, bool for_read, int io_depth, int priority,
                     int timeout, int numa) {
    return create_ring(ior, mount, entries, numa, {for_read, io_depth, priority, timeout, 0});
}

int hf3fs_iorcreate4(hf3fs_ior* ior, const char* mount, int entries, bool for_read, int io_depth, int timeout, int numa,
                     uint64_t flags) {
    return create_ring(ior, mount, entries, numa, {for_read, io_depth, 0, timeout, flags});
}

int hf3fs_iorwrap(hf3fs_ior* ior, void* buf, const char* mount, size_t size, bool for_read, int io_depth, int priority,
                  int timeout, uint64_t flags) {
    const RingAttributes attributes{for_read, io_depth, priority, timeout, flags};
    if (ior == nullptr || buf == nullptr || !is_valid_mount(mount) ||
        !are_attributes_valid(attributes, ring_entries(size))) {
        return -EINVAL;
    }
    try {
        std::unique_ptr<RingHandle> handle;
        if (const int status = make_ring_handle(mount, attributes, handle); status != 0) {
            return status;
        }
        if (const int status = ApplicationRing::attach(buf, size, handle->ring); status != 0) {
            return status;
        }
        hf3fs_iov iov{};
        iov.base = static_cast<std::uint8_t*>(buf);
        iov.size = size;
        iov.numa = -1;
        std::strcpy(iov.mount_point, mount);
        fill_ior(*ior, iov, handle.release(), mount, attributes);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

void hf3fs_iordestroy(hf3fs_ior* ior) {
    if (ior == nullptr || ior->iorh == nullptr) {
        return;
    }
    const std::unique_ptr<RingHandle> handle(static_cast<RingHandle*>(ior->iorh));
    ior->iorh = nullptr;
    handle->stop_watching_agent();
    // `iovh` is null if hf3fs_iorwrap made the ring. The memory of such a ring belongs to the caller.
    if (ior->iov.iovh != nullptr) {
        hf3fs_iovdestroy(&ior->iov);
    }
}

} // extern "C"
