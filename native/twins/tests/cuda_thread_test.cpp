// Tests of the software twin of libcuda: concurrent calls by many threads, including the calls that the verbs twin
// makes from its threads.
#include <atomic>
#include <thread>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr int round_count = 40;

void allocate_copy_free(unsigned seed) {
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, seed % 2); // every second thread uses a non-blocking stream
    for (int round = 0; round < round_count; ++round) {
        const u64 length_bytes = 1 + (seed * 977 + static_cast<unsigned>(round) * 131) % 20000;
        const u64 memory = allocate(length_bytes);
        const auto bytes = make_pattern(length_bytes, seed);
        EXPECT_SUCCESS("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(bytes.data()), length_bytes, stream);
        EXPECT_SUCCESS("cuStreamSynchronize", stream);
        CHECK(read_device(memory, length_bytes) == bytes);
        EXPECT_SUCCESS("cuMemsetD8Async", memory, static_cast<unsigned char>(1), length_bytes, stream);
        query_free_memory();
        EXPECT_SUCCESS("cuMemFree_v2", memory);
    }
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

// Make the calls that the verbs twin makes for incoming requests, while the threads of the program run.
void serve_requests(u64 memory, std::atomic<bool>* must_stop) {
    Handle context = 0;
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context, 0);
    EXPECT_SUCCESS("cuCtxSetCurrent", context);
    std::vector<unsigned char> bytes(100);
    while (!*must_stop) {
        u64 base = 0, length_bytes = 0;
        EXPECT_SUCCESS("cuMemGetAddressRange_v2", &base, &length_bytes, memory + 5);
        CHECK(base == memory && length_bytes == 4096 && query_buffer_id(memory) != 0);
        write_device(memory, bytes);
        bytes = read_device(memory, 100);
    }
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
}

} // namespace

int main() {
    const Handle context = use_primary_context();
    const u64 shared_memory = allocate(4096);
    std::atomic<bool> must_stop{false};
    std::thread server_thread(serve_requests, shared_memory, &must_stop);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([=] {
            EXPECT_SUCCESS("cuCtxSetCurrent", context);
            allocate_copy_free(seed);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    must_stop = true;
    server_thread.join();
    EXPECT_SUCCESS("cuMemFree_v2", shared_memory);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
}
