// Tests of the path that a transfer takes and of the statistics that report it.
#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

StatsLevel3 statistics() {
    StatsLevel3 snapshot{};
    EXPECT_STATUS(success, "cuFileGetStatsL3", &snapshot);
    return snapshot;
}

void start() {
    EXPECT_STATUS(success, "cuFileSetStatsLevel", 3);
    EXPECT_STATUS(success, "cuFileStatsReset");
    EXPECT_STATUS(success, "cuFileStatsStart");
}

void test_default_path_is_posix() {
    const TestFile test_file;
    start();
    CHECK(read_file(test_file.file, test_file.memory, 4 * page) == 4 * page);
    CHECK(write_file(test_file.file, test_file.memory, page, 0) == page);
    const StatsLevel3 snapshot = statistics();
    const GpuStats& gpu = snapshot.gpus[0];
    CHECK(snapshot.gpu_count == 2);
    CHECK(gpu.posix_reads == 1 && gpu.posix_writes == 1 && gpu.p2p_reads == 0 && gpu.nvfs_reads == 0);
    CHECK(gpu.read_bytes == 4 * page && gpu.write_bytes == page && gpu.unaligned_reads == 0);
    CHECK(snapshot.detailed.basic.read_ops.ok == 1 && snapshot.detailed.basic.read_bytes == 4 * page);
    // read_size_kb[5] counts the reads of 16 to 31 KiB.
    CHECK(snapshot.detailed.read_size_kb[5] == 1);
    CHECK(snapshot.gpus[1].total_reads == 0);
}

void test_counters_by_path() {
    const TestFile test_file;
    start();
    set_fault_plan("cufile.route call=1 route=p2p\ncufile.route call=2 route=nvfs\ncufile.route call=3 route=p2p");
    CHECK(read_file(test_file.file, test_file.memory, page) == page);
    CHECK(read_file(test_file.file, test_file.memory, page) == page);
    // Unaligned transfers take no direct path, whatever the machine supports.
    CHECK(read_file(test_file.file, test_file.memory, page, 1) == page);
    const StatsLevel3 snapshot = statistics();
    const GpuStats& gpu = snapshot.gpus[0];
    CHECK(gpu.p2p_reads == 1 && gpu.nvfs_reads == 1 && gpu.posix_reads == 1 && gpu.unaligned_reads == 1);
}

void test_levels() {
    const TestFile test_file;
    StatsLevel2 level2{};
    StatsLevel3 level3{};
    EXPECT_STATUS(success, "cuFileSetStatsLevel", 2);
    EXPECT_STATUS(success, "cuFileStatsStart");
    EXPECT_STATUS(success, "cuFileGetStatsL2", &level2);
    EXPECT_STATUS(invalid_value, "cuFileGetStatsL3", &level3);
    EXPECT_STATUS(invalid_value, "cuFileGetStatsL2", static_cast<StatsLevel2*>(nullptr));
    EXPECT_STATUS(invalid_value, "cuFileSetStatsLevel", 4);
    EXPECT_STATUS(success, "cuFileStatsStop");
    const std::uint64_t before = level2.basic.read_ops.ok;
    CHECK(read_file(test_file.file, test_file.memory, page) == page);
    EXPECT_STATUS(success, "cuFileGetStatsL2", &level2);
    CHECK(level2.basic.read_ops.ok == before);
}

void test_compat_mode_off_refuses_posix() {
    EXPECT_STATUS(success, "cuFileSetParameterBool", 1, false);
    // If no direct path is possible, the driver does not open.
    EXPECT_STATUS(driver_not_initialized, "cuFileDriverOpen");
    {
        set_fault_plan("cufile.route call=1 route=posix\ncufile.route call=2 route=p2p");
        const TestFile test_file;
        start();
        CHECK(read_file(test_file.file, test_file.memory, page) == -io_not_supported);
        CHECK(statistics().gpus[0].read_errors == 1);
        CHECK(read_file(test_file.file, test_file.memory, page) == page);
    }
    EXPECT_STATUS(success, "cuFileSetParameterBool", 1, true);
}

// The batch counters count the submitted transfers by submission type. The counters by path count only transfers that
// are not in a batch.
void test_batch_counters() {
    const TestFile test_file;
    start();
    set_fault_plan("cufile.route call=1 route=p2p");
    std::vector<IoParameters> entries(3);
    for (std::size_t index = 0; index < entries.size(); ++index) {
        entries[index].mode = mode_batch;
        entries[index].batch = {pointer(test_file.memory), static_cast<off_t>(index * page),
                                static_cast<off_t>(index * page), page};
        entries[index].file = test_file.file;
    }
    BatchHandle batch = nullptr;
    EXPECT_STATUS(success, "cuFileBatchIOSetUp", &batch, 3U);
    EXPECT_STATUS(success, "cuFileBatchIOSubmit", batch, 3U, entries.data(), 0U);
    call<void>("cuFileBatchIODestroy", batch);
    const StatsLevel3 snapshot = statistics();
    const StatsLevel1& basic = snapshot.detailed.basic;
    CHECK(basic.batch_submit_ops.ok == 1 && snapshot.gpus[0].total_reads == 0);
    CHECK(basic.batch_read_bytes == basic.batch_total_submit_ops.ok * page);
    CHECK(basic.batch_total_submit_ops.ok == basic.batch_aio_submit_ops.ok + basic.batch_p2p_submit_ops.ok);
}

void test_vectored_calls_count_as_batches() {
    const TestFile test_file;
    start();
    const IoVector vectors[] = {{pointer(test_file.memory), page}, {pointer(test_file.memory + page), page}};
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, static_cast<const IoVector*>(vectors), std::size_t{2}, off_t{0},
                        0U) == 2 * page);
    const StatsLevel3 snapshot = statistics();
    const StatsLevel1& basic = snapshot.detailed.basic;
    CHECK(basic.readv_ops.ok == 1 && basic.readv_bytes == 2 * page && basic.batch_read_bytes == 2 * page);
    CHECK(basic.batch_total_submit_ops.ok == 2 && basic.batch_aio_submit_ops.ok == 2);
    CHECK(snapshot.gpus[0].total_reads == 0 && snapshot.gpus[0].posix_reads == 0);
}

void test_failure_counters() {
    const TestFile test_file;
    start();
    CHECK(read_file(test_file.file, test_file.memory, page, -1) < 0);
    CHECK(statistics().detailed.basic.read_ops.err == 1);
}

} // namespace

int main() {
    test_default_path_is_posix();
    test_counters_by_path();
    test_levels();
    test_compat_mode_off_refuses_posix();
    test_batch_counters();
    test_vectored_calls_count_as_batches();
    test_failure_counters();
}
