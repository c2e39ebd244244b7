#include "usrbio/client/gpu_backing.hpp"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "usrbio/client/log.hpp"
#include "usrbio/client/publication.hpp"

namespace gdrkit::usrbio {
GpuIov::GpuIov(const cuda::Driver& driver, int device) : driver(driver), device(device), process_(getpid()) {}

GpuIov::~GpuIov() {
    if (is_of_this_process()) {
        release_memory();
    } else {
        primary.abandon();
    }
}

bool GpuIov::is_of_this_process() const noexcept {
    return process_ == getpid();
}

void GpuIov::unlink(hf3fs_iov&) noexcept {
    if (is_of_this_process()) {
        const std::scoped_lock lock(ending_);
        // Why it failed is in the log, and the name is kept for another try.
        unpublish();
    }
}

bool GpuIov::destroy(hf3fs_iov& iov) noexcept {
    if (is_of_this_process()) {
        const std::scoped_lock lock(ending_);
        if (unpublish() != 0) {
            return false;
        }
        borrowing.end();
        release_memory();
    }
    forget_iov(iov.iovh);
    iov = {};
    return true;
}

void GpuIov::release_memory() noexcept {
    const Memory what = std::exchange(memory, Memory::wrapped);
    if (what == Memory::wrapped) {
        return;
    }
    const CurrentContext current(driver, context);
    if (current.error() != 0) {
        return;
    }
    const bool allocated = what == Memory::allocated;
    if (const cuda::Result result = allocated ? driver.free(base) : driver.ipc_close(base); result != cuda::success) {
        log_line(LogLevel::error, "%s answered %d (%s)", allocated ? "cuMemFree" : "cuIpcCloseMemHandle",
                 static_cast<int>(result), cuda::name_of(driver, result));
    }
}

int GpuIov::unpublish() noexcept {
    if (published.empty()) {
        return 0;
    }
    const int error = usrbio::unpublish(mount.c_str(), published);
    // An agent that has ended has no region any more, and a link that is gone needs no removal.
    if (error != 0 && error != -ENOENT && error != -EREMOTEIO) {
        log_line(LogLevel::error, "the link %s of %s cannot be removed: errno %d", published.c_str(), mount.c_str(),
                 -error);
        return error;
    }
    published.clear();
    return 0;
}

std::shared_ptr<GpuIov> find_gpu_iov(const hf3fs_iov* iov) noexcept {
    if (iov == nullptr || iov->iovh == nullptr) {
        return nullptr;
    }
    auto gpu = std::dynamic_pointer_cast<GpuIov>(find_iov(iov->iovh));
    return gpu && gpu->is_of_this_process() ? gpu : nullptr;
}

} // namespace gdrkit::usrbio
