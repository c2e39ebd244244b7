// Many threads at once: the driver, and the calls that the verbs twin makes from threads of its own.
#include <atomic>
#include <thread>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr int rounds = 40;

void allocate_copy_free(unsigned seed) {
    Handle stream = 0;
    WORKS("cuStreamCreate", &stream, seed % 2);
    for (int round = 0; round < rounds; ++round) {
        const u64 size = 1 + (seed * 977 + static_cast<unsigned>(round) * 131) % 20000;
        const u64 memory = allocate(size);
        const auto bytes = pattern(size, seed);
        WORKS("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(bytes.data()), size, stream);
        WORKS("cuStreamSynchronize", stream);
        CHECK(read_device(memory, size) == bytes);
        WORKS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), size, stream);
        free_memory();
        WORKS("cuMemFree_v2", memory);
    }
    WORKS("cuStreamDestroy_v2", stream);
}

// What the verbs twin does for an inbound request, beside the program's own threads.
void serve_requests(u64 memory, std::atomic<bool>* stop) {
    Handle context = 0;
    WORKS("cuDevicePrimaryCtxRetain", &context, 0);
    WORKS("cuCtxSetCurrent", context);
    std::vector<unsigned char> bytes(100);
    while (!*stop) {
        u64 base = 0, length = 0;
        WORKS("cuMemGetAddressRange_v2", &base, &length, memory + 5);
        CHECK(base == memory && length == 4096 && buffer_id(memory) != 0);
        write_device(memory, bytes);
        bytes = read_device(memory, 100);
    }
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
}

} // namespace

int main() {
    const Handle context = begin();
    const u64 shared = allocate(4096);
    std::atomic<bool> stop{false};
    std::thread server(serve_requests, shared, &stop);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([=] {
            WORKS("cuCtxSetCurrent", context);
            allocate_copy_free(seed);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    stop = true;
    server.join();
    WORKS("cuMemFree_v2", shared);
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
}
