// Tests of the software twin of libcufile (GPUDirect Storage): which path a transfer takes, and the statistics that
// report it.
#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;

StatsLevel3 read_statistics() {
    StatsLevel3 snapshot{};
    EXPECT_STATUS(success, "cuFileGetStatsL3", &snapshot);
    return snapshot;
}

void start_statistics() {
    EXPECT_STATUS(success, "cuFileSetStatsLevel", 3);
    EXPECT_STATUS(success, "cuFileStatsReset");
    EXPECT_STATUS(success, "cuFileStatsStart");
}

void test_default_path_is_posix() {
    const TestFile test_file;
    start_statistics();
    CHECK(read_file(test_file.file, test_file.memory, 4 * page_bytes) == 4 * page_bytes);
    CHECK(write_file(test_file.file, test_file.memory, page_bytes, 0) == page_bytes);
    const StatsLevel3 snapshot = read_statistics();
    const GpuStats& gpu = snapshot.gpus[0];
    CHECK(snapshot.gpu_count == 2);
    CHECK(gpu.posix_reads == 1 && gpu.posix_writes == 1 && gpu.p2p_reads == 0 && gpu.nvfs_reads == 0);
    CHECK(gpu.read_bytes == 4 * page_bytes && gpu.write_bytes == page_bytes && gpu.unaligned_reads == 0);
    CHECK(snapshot.detailed.basic.read_ops.ok == 1 && snapshot.detailed.basic.read_bytes == 4 * page_bytes);
    // read_size_kb[5] counts the reads of 16 to 31 KiB.
    CHECK(snapshot.detailed.read_size_kb[5] == 1);
    CHECK(snapshot.gpus[1].total_reads == 0);
}

void test_transfers_are_counted_by_path() {
    const TestFile test_file;
    start_statistics();
    set_fault_plan("cufile.route call=1 route=p2p\ncufile.route call=2 route=nvfs\ncufile.route call=3 route=p2p");
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    // An unaligned transfer never takes a direct path, even if the machine supports one.
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, 1) == page_bytes);
    const StatsLevel3 snapshot = read_statistics();
    const GpuStats& gpu = snapshot.gpus[0];
    CHECK(gpu.p2p_reads == 1 && gpu.nvfs_reads == 1 && gpu.posix_reads == 1 && gpu.unaligned_reads == 1);
}

void test_level_limits_statistics() {
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
    const std::uint64_t reads_before = level2.basic.read_ops.ok;
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    EXPECT_STATUS(success, "cuFileGetStatsL2", &level2);
    CHECK(level2.basic.read_ops.ok == reads_before);
}

void test_compat_mode_off_refuses_posix() {
    EXPECT_STATUS(success, "cuFileSetParameterBool", 1, false);
    // The fault plan enables no direct path, so the driver does not open without compat mode.
    EXPECT_STATUS(driver_not_initialized, "cuFileDriverOpen");
    {
        set_fault_plan("cufile.route call=1 route=posix\ncufile.route call=2 route=p2p");
        const TestFile test_file;
        start_statistics();
        CHECK(read_file(test_file.file, test_file.memory, page_bytes) == -io_not_supported);
        CHECK(read_statistics().gpus[0].read_errors == 1);
        CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    }
    EXPECT_STATUS(success, "cuFileSetParameterBool", 1, true);
}

// The batch counters count each transfer of a batch as submitted by aio or by p2p. The counters of a GPU count no
// transfers of batches.
void test_batch_transfers_are_counted_by_submission() {
    const TestFile test_file;
    start_statistics();
    set_fault_plan("cufile.route call=1 route=p2p");
    std::vector<IoParameters> entries(3);
    for (std::size_t index = 0; index < entries.size(); ++index) {
        entries[index].mode = mode_batch;
        entries[index].batch = {to_pointer(test_file.memory), static_cast<off_t>(index * page_bytes),
                                static_cast<off_t>(index * page_bytes), page_bytes};
        entries[index].file = test_file.file;
    }
    BatchHandle batch = nullptr;
    EXPECT_STATUS(success, "cuFileBatchIOSetUp", &batch, 3U);
    EXPECT_STATUS(success, "cuFileBatchIOSubmit", batch, 3U, entries.data(), 0U);
    call<void>("cuFileBatchIODestroy", batch);
    const StatsLevel3 snapshot = read_statistics();
    const StatsLevel1& basic = snapshot.detailed.basic;
    CHECK(basic.batch_submit_ops.ok == 1 && snapshot.gpus[0].total_reads == 0);
    CHECK(basic.batch_read_bytes == basic.batch_total_submit_ops.ok * page_bytes);
    CHECK(basic.batch_total_submit_ops.ok == basic.batch_aio_submit_ops.ok + basic.batch_p2p_submit_ops.ok);
}

void test_vectored_calls_count_as_batches() {
    const TestFile test_file;
    start_statistics();
    const IoVector vectors[] = {{to_pointer(test_file.memory), page_bytes},
                                {to_pointer(test_file.memory + page_bytes), page_bytes}};
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, static_cast<const IoVector*>(vectors), std::size_t{2}, off_t{0},
                        0U) == 2 * page_bytes);
    const StatsLevel3 snapshot = read_statistics();
    const StatsLevel1& basic = snapshot.detailed.basic;
    CHECK(basic.readv_ops.ok == 1 && basic.readv_bytes == 2 * page_bytes && basic.batch_read_bytes == 2 * page_bytes);
    CHECK(basic.batch_total_submit_ops.ok == 2 && basic.batch_aio_submit_ops.ok == 2);
    CHECK(snapshot.gpus[0].total_reads == 0 && snapshot.gpus[0].posix_reads == 0);
}

void test_failed_transfer_is_counted() {
    const TestFile test_file;
    start_statistics();
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, -1) < 0);
    CHECK(read_statistics().detailed.basic.read_ops.err == 1);
}

} // namespace

int main() {
    test_default_path_is_posix();
    test_transfers_are_counted_by_path();
    test_level_limits_statistics();
    test_compat_mode_off_refuses_posix();
    test_batch_transfers_are_counted_by_submission();
    test_vectored_calls_count_as_batches();
    test_failed_transfer_is_counted();
}
