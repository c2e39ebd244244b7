// Tests of the software twin of libcufile (GPUDirect Storage) with programs that were built for cuFile 1.15, whose
// statistics structures are shorter. The header of 1.15 has no vectored calls and no counters for them.
#include <algorithm>
#include <cstring>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;
constexpr unsigned char untouched_byte = 0xee;
// The sizes and offsets are from cufile.h of version 1.15, in bytes.
constexpr std::size_t level1_bytes = 512, level2_bytes = 1024, level3_bytes = 5000;
constexpr std::size_t read_histogram_offset = 512, gpu_count_offset = 1024, gpus_offset = 1032;

// Call a function that stores statistics, and check that it writes exactly the `size_bytes` bytes of the structure.
// Return the bytes.
std::vector<unsigned char> query_statistics(const char* symbol, std::size_t size_bytes) {
    std::vector<unsigned char> bytes(level3_bytes + page_bytes, untouched_byte);
    EXPECT_STATUS(success, symbol, static_cast<void*>(bytes.data()));
    CHECK(bytes[size_bytes - 1] != untouched_byte);
    CHECK(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(size_bytes), bytes.end(),
                      [](unsigned char byte) { return byte == untouched_byte; }));
    return bytes;
}

template <typename Value> Value read_value(const std::vector<unsigned char>& bytes, std::size_t offset) {
    Value value{};
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
}

void test_statistics_have_the_layout_of_the_version() {
    const TestFile test_file;
    EXPECT_STATUS(success, "cuFileSetStatsLevel", 3);
    EXPECT_STATUS(success, "cuFileStatsStart");
    CHECK(read_file(test_file.file, test_file.memory, 4 * page_bytes) == 4 * page_bytes);
    const auto level1 = query_statistics("cuFileGetStatsL1", level1_bytes),
               level2 = query_statistics("cuFileGetStatsL2", level2_bytes),
               level3 = query_statistics("cuFileGetStatsL3", level3_bytes);
    for (const auto& statistics_bytes : {level1, level2, level3}) {
        CHECK(read_value<u64>(statistics_bytes, offsetof(StatsLevel1, read_ops)) == 1);
    }
    // The sixth counter of a histogram counts the reads of 16 to 31 KiB.
    CHECK(read_value<u64>(level2, read_histogram_offset + 5 * sizeof(u64)) == 1);
    CHECK(read_value<std::uint32_t>(level3, gpu_count_offset) == 2);
    CHECK(read_value<GpuStats>(level3, gpus_offset).posix_reads == 1);
}

void test_functions_of_later_versions_fail() {
    const TestFile test_file;
    const IoVector vector{to_pointer(test_file.memory), page_bytes};
    for (const char* const symbol : {"cuFileReadv", "cuFileWritev"}) {
        CHECK(call<ssize_t>(symbol, test_file.file, &vector, std::size_t{1}, off_t{0}, 0U) == -platform_not_supported);
    }
    int version = 0;
    EXPECT_STATUS(success, "cuFileGetVersion", &version);
    CHECK(version == 1150);
}

} // namespace

int main() {
    CHECK(setenv("GDRKIT_TWINS_CUFILE", "1.15", 1) == 0);
    test_statistics_have_the_layout_of_the_version();
    test_functions_of_later_versions_fail();
}
