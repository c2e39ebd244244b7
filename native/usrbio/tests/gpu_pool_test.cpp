// Tests of the GPU pool without a device: sizes of blocks, limits, and the environment variable with the limit.
#include <cstdlib>

#include "tests/check.hpp"
#include "usrbio/client/gpu_pool.hpp"

namespace {

using namespace gdrkit::usrbio;

constexpr std::size_t kib = 1024, mib = 1 << 20;

void test_blocks_are_powers_of_two_or_three_halves_of_them() {
    CHECK_EQUAL(choose_pool_block_bytes(1), 64 * kib);
    CHECK_EQUAL(choose_pool_block_bytes(64 * kib), 64 * kib);
    CHECK_EQUAL(choose_pool_block_bytes(64 * kib + 1), 128 * kib);
    CHECK_EQUAL(choose_pool_block_bytes(600 * kib), mib);
    CHECK_EQUAL(choose_pool_block_bytes(mib), mib);
    CHECK_EQUAL(choose_pool_block_bytes(mib + 1), 3 * mib / 2);
    CHECK_EQUAL(choose_pool_block_bytes(3 * mib / 2), 3 * mib / 2);
    CHECK_EQUAL(choose_pool_block_bytes(3 * mib / 2 + 1), 2 * mib);
    for (std::size_t size = mib + 1; size < 64 * mib; size += 333'333) {
        const std::size_t block_bytes = choose_pool_block_bytes(size);
        CHECK(block_bytes >= size && block_bytes - size <= block_bytes / 3 && block_bytes % (64 * kib) == 0);
    }
}

void test_pool_admits_blocks_up_to_its_limit() {
    CHECK_EQUAL(get_gpu_pool_statistics().idle_bytes_max, 3 * mib);
    CHECK(may_use_gpu_pool(3 * mib) && !may_use_gpu_pool(3 * mib + 1) && !may_use_gpu_pool(SIZE_MAX));
    set_gpu_pool_limits(0, 1);
    CHECK(!may_use_gpu_pool(1));
    set_gpu_pool_limits(64 * kib, 1);
    CHECK(may_use_gpu_pool(64 * kib) && !may_use_gpu_pool(64 * kib + 1));
}

} // namespace

int main(int argc, char**) {
    // CTest starts the program a second time, with an argument, for the default without GDRKIT_USRBIO_GPU_POOL_BYTES: a
    // process reads that variable only once.
    if (argc > 1) {
        CHECK_EQUAL(get_gpu_pool_statistics().idle_bytes_max, 256 * mib);
        return 0;
    }
    setenv("GDRKIT_USRBIO_GPU_POOL_BYTES", "3145728", 1); // 3 MiB
    test_blocks_are_powers_of_two_or_three_halves_of_them();
    test_pool_admits_blocks_up_to_its_limit();
}
