#include "usrbio/client/gpu_backing.hpp"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/errno_text.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/publication.hpp"

namespace gdrkit::usrbio {
GpuIov::GpuIov(const cuda::Driver& driver, int device) : driver(driver), device(device), process_(getpid()) {}

GpuIov::~GpuIov() {
    if (belongs_to_this_process()) {
        release_memory();
    } else {
        primary.disown();
    }
}

bool GpuIov::belongs_to_this_process() const noexcept {
    return process_ == getpid();
}

void GpuIov::unlink(hf3fs_iov&) noexcept {
    if (belongs_to_this_process()) {
        const std::scoped_lock lock(end_mutex_);
        // The log has the reason of a failure, and the name stays for another attempt.
        unpublish();
    }
}

bool GpuIov::destroy(hf3fs_iov& iov) noexcept {
    if (belongs_to_this_process()) {
        const std::scoped_lock lock(end_mutex_);
        if (unpublish() != 0) {
            return false;
        }
        borrowed.end();
        release_memory();
    }
    unregister_iov(iov.iovh);
    iov = {};
    return true;
}

void GpuIov::release_memory() noexcept {
    const Memory kind = std::exchange(memory, Memory::wrapped);
    if (kind == Memory::wrapped) {
        return;
    }
    const CurrentContext current(driver, context);
    if (current.error() != 0) {
        return;
    }
    const bool allocated = kind == Memory::allocated;
    if (const cuda::Result result = allocated ? driver.free(base) : driver.ipc_close(base); result != cuda::success) {
        log_line(LogLevel::error, "%s() failed: %s (%d)", allocated ? "cuMemFree" : "cuIpcCloseMemHandle",
                 cuda::result_name(driver, result), result);
    }
}

int GpuIov::unpublish() noexcept {
    if (publication_name.empty()) {
        return 0;
    }
    const int error = usrbio::unpublish(mount.c_str(), publication_name);
    // An agent that has ended has no memory region any more, and a link that does not exist needs no removal.
    if (error != 0 && error != -ENOENT && error != -EREMOTEIO) {
        log_line(LogLevel::error, "unpublish %s of %s failed: %s", publication_name.c_str(), mount.c_str(),
                 ErrnoText(-error).c_str());
        return error;
    }
    publication_name.clear();
    return 0;
}

std::shared_ptr<GpuIov> find_gpu_iov(const hf3fs_iov* iov) noexcept {
    if (iov == nullptr || iov->iovh == nullptr) {
        return nullptr;
    }
    auto gpu = std::dynamic_pointer_cast<GpuIov>(find_iov(iov->iovh));
    return gpu && gpu->belongs_to_this_process() ? gpu : nullptr;
}

} // namespace gdrkit::usrbio
