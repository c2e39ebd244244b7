// The destruction of a GPU iov: withdraws its publication, then frees the memory, unmaps it or gives it to the pool.
#include "usrbio/client/gpu_backing.hpp"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/errno_text.hpp"
#include "usrbio/client/gpu_pool.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/publication.hpp"

namespace gdrkit::usrbio {
GpuIov::GpuIov(const cuda::Driver& driver, int device) : driver(driver), device(device), creator_pid_(getpid()) {}

GpuIov::~GpuIov() {
    if (belongs_to_this_process()) {
        release_memory();
    } else {
        primary_context.disown();
    }
}

bool GpuIov::belongs_to_this_process() const noexcept {
    return creator_pid_ == getpid();
}

void GpuIov::unlink(hf3fs_iov&) noexcept {
    if (belongs_to_this_process()) {
        const std::scoped_lock lock(destruction_mutex_);
        // unpublish() logs a failure, and keeps publication_name, so that destroy() tries again.
        unpublish();
    }
}

bool GpuIov::destroy(hf3fs_iov& iov) noexcept {
    if (belongs_to_this_process()) {
        const std::scoped_lock lock(destruction_mutex_);
        std::shared_ptr<AgentConnection> keeping_agent;
        // The pool may keep the block only if the application has exported no handle of its memory.
        if (unpublish(origin == Origin::pooled && !is_exported ? &keeping_agent : nullptr) != 0) {
            return false;
        }
        borrowed_publication.end_borrow();
        if (keeping_agent != nullptr) {
            origin = Origin::wrapped; // The pool owns the memory now, so release_memory() does nothing.
            keep_block(std::move(block), std::move(keeping_agent));
        } else if (origin == Origin::pooled) {
            count_refused_block();
        }
        release_memory();
    }
    context_to_flush.reset();
    unregister_iov(iov.iovh);
    log_line(LogLevel::info, "destroyed GPU iov at 0x%llx on device %d", static_cast<unsigned long long>(pointer),
             device);
    iov = {};
    return true;
}

void GpuIov::release_memory() noexcept {
    const Origin previous_origin = std::exchange(origin, Origin::wrapped);
    if (previous_origin == Origin::wrapped) {
        return;
    }
    if (previous_origin == Origin::pooled) {
        block.reset();
        return;
    }
    const CurrentContext current_context(driver, context);
    if (current_context.error() != 0) {
        return;
    }
    const bool is_allocated = previous_origin == Origin::allocated;
    if (const cuda::Result result = is_allocated ? driver.free(owned_address) : driver.ipc_close(owned_address);
        result != cuda::success) {
        log_line(LogLevel::error, "%s() failed: %s (%d)", is_allocated ? "cuMemFree" : "cuIpcCloseMemHandle",
                 cuda::result_name(driver, result), result);
    }
}

int GpuIov::unpublish(std::shared_ptr<AgentConnection>* keeping_agent) noexcept {
    if (publication_name.empty()) {
        return 0;
    }
    const int error = keeping_agent == nullptr ? usrbio::unpublish(mount.c_str(), publication_name)
                                               : unpublish_and_keep(mount.c_str(), publication_name, keeping_agent);
    // -EREMOTEIO: the agent has ended, so the memory is no longer registered. -ENOENT: there is no link to remove.
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
    auto gpu_iov = std::dynamic_pointer_cast<GpuIov>(find_iov(iov->iovh));
    return gpu_iov && gpu_iov->belongs_to_this_process() ? gpu_iov : nullptr;
}

} // namespace gdrkit::usrbio
