// Implements GpuView: creates the GPU's views of memory, and updates them when a program flushes the writes of NICs.
#include "cuda/gpu_view.hpp"

#include <sys/mman.h>

#include <cstring>
#include <set>

#include "model/config.hpp"

namespace gdrkit::twin::cuda {
namespace {

// CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: with this ordering, or a larger value, the GPU that owns the memory needs
// no flush.
constexpr int ordering_owner = 100;

struct Views {
    std::mutex mutex;
    std::set<GpuView*> all_views;
};

// The object is never destroyed, because a thread of a stream may copy while the process exits.
Views& views() {
    static auto* const instance = new Views;
    return *instance;
}

} // namespace

GpuView::GpuView(std::byte* memory, std::uint64_t length_bytes) : memory_(memory), length_bytes_(length_bytes) {
    if (config().writes_ordering >= ordering_owner) {
        return;
    }
    void* const pages = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) {
        view_ = static_cast<std::byte*>(pages);
        std::lock_guard lock(views().mutex);
        views().all_views.insert(this);
    }
}

GpuView::~GpuView() {
    if (view_ != nullptr) {
        std::lock_guard lock(views().mutex);
        views().all_views.erase(this);
        munmap(view_, length_bytes_);
    }
}

std::unique_lock<std::mutex> lock_views() {
    return config().writes_ordering >= ordering_owner ? std::unique_lock<std::mutex>()
                                                      : std::unique_lock(views().mutex);
}

void update_view(const ViewedBytes& written_bytes) {
    std::memcpy(written_bytes.view, written_bytes.bytes.data(), written_bytes.bytes.size());
}

void flush_remote_writes() {
    const auto lock = lock_views();
    for (const GpuView* const view : views().all_views) {
        std::memcpy(view->view_, view->memory_, view->length_bytes_);
    }
}

} // namespace gdrkit::twin::cuda
