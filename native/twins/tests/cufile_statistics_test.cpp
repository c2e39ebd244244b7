// Tests of the software twin of libcufile (GPUDirect Storage): which path a transfer takes, and the statistics of the
// transfers. The path is posix (compat mode), or a direct path: p2p or nvfs.
#include <cstring>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;
// The parameters are CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE and CUFILE_PARAM_FORCE_COMPAT_MODE.
constexpr int allow_compat_parameter = 1, force_compat_parameter = 2;

StatsLevel3 read_statistics() {
    StatsLevel3 statistics{};
    EXPECT_STATUS(success, "cuFileGetStatsL3", &statistics);
    return statistics;
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
    const StatsLevel3 statistics = read_statistics();
    const GpuStats& gpu_statistics = statistics.gpus[0];
    CHECK(statistics.gpu_count == 2);
    CHECK(gpu_statistics.posix_reads == 1 && gpu_statistics.posix_writes == 1 && gpu_statistics.p2p_reads == 0 &&
          gpu_statistics.nvfs_reads == 0);
    CHECK(gpu_statistics.read_bytes == 4 * page_bytes && gpu_statistics.write_bytes == page_bytes &&
          gpu_statistics.unaligned_reads == 0);
    CHECK(statistics.detailed.basic.read_ops.ok == 1 && statistics.detailed.basic.read_bytes == 4 * page_bytes);
    // read_size_kb_hist[5] counts the reads of 16 to 31 KiB.
    CHECK(statistics.detailed.read_size_kb_hist[5] == 1);
    CHECK(statistics.gpus[1].total_reads == 0);
}

void test_transfers_are_counted_by_path() {
    const TestFile test_file;
    start_statistics();
    set_fault_plan("cufile.route call=1 route=p2p\ncufile.route call=2 route=nvfs\ncufile.route call=3 route=p2p");
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    // An unaligned transfer never takes a direct path, even if the fault plan names one.
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, 1) == page_bytes);
    const StatsLevel3 statistics = read_statistics();
    const GpuStats& gpu_statistics = statistics.gpus[0];
    CHECK(gpu_statistics.p2p_reads == 1 && gpu_statistics.nvfs_reads == 1 && gpu_statistics.posix_reads == 1 &&
          gpu_statistics.unaligned_reads == 1);
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
    EXPECT_STATUS(invalid_value, "cuFileSetStatsLevel", 4); // the levels are 0 to 3
    EXPECT_STATUS(success, "cuFileStatsStop");
    const std::uint64_t reads_before = level2.basic.read_ops.ok;
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    EXPECT_STATUS(success, "cuFileGetStatsL2", &level2);
    CHECK(level2.basic.read_ops.ok == reads_before);
}

void test_compat_mode_off_refuses_posix() {
    EXPECT_STATUS(success, "cuFileSetParameterBool", allow_compat_parameter, false);
    // No fault plan enables a direct path here, so the driver opens only in compat mode.
    EXPECT_STATUS(driver_not_initialized, "cuFileDriverOpen");
    {
        set_fault_plan("cufile.route call=1 route=posix\ncufile.route call=2 route=p2p");
        const TestFile test_file;
        start_statistics();
        CHECK(read_file(test_file.file, test_file.memory, page_bytes) == -io_not_supported);
        CHECK(read_statistics().gpus[0].read_errors == 1);
        CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    }
    EXPECT_STATUS(success, "cuFileSetParameterBool", allow_compat_parameter, true);
}

// cufile.json is JSON with comments in the forms // and /* */. A string may contain these signs, and a string value may
// be equal to a key. Each row has the text of the file, and the expected parameters allow_compat_mode and
// force_compat_mode. libcufile 1.20 finds the same strings and comments.
void test_config_file_is_read() {
    struct Row {
        const char* config_text;
        bool allow_compat, force_compat;
    };
    const Row rows[] = {
        {"{}", true, false},
        {R"({"properties": {"allow_compat_mode": false, "force_compat_mode": true}})", false, true},
        {R"({"name": "/tmp//logs", "properties": {"allow_compat_mode": false}})", false, false},
        {R"({"name": "/tmp/*", "properties": {"force_compat_mode": true} /* */ })", true, true},
        {R"({"name": "\\\"//", "properties": {"force_compat_mode": true}})", true, true},
        {R"({"name": "force_compat_mode", "properties": {"force_compat_mode": true}})", true, true},
        {"{\"properties\": { // \"allow_compat_mode\": false,\n\"force_compat_mode\": true}}", true, true},
        {"{\"properties\": { /* \"allow_compat_mode\":\n false, */ \"force_compat_mode\": true}}", true, true},
        {"{\"properties\": {\r\n\"force_compat_mode\": true\r\n}}\r\n", true, true},
    };
    for (const Row& row : rows) {
        std::string config_path = GDRKIT_DISK "/cufile-json-XXXXXX";
        const int fd = mkstemp(config_path.data());
        const auto length_bytes = static_cast<ssize_t>(std::strlen(row.config_text));
        CHECK(fd >= 0 && write(fd, row.config_text, static_cast<std::size_t>(length_bytes)) == length_bytes &&
              close(fd) == 0);
        // Each row needs a process of its own, because the first cuFileDriverOpen of a process fixes the parameters.
        const int status = cuda::run_in_child([&] {
            CHECK(setenv("CUFILE_ENV_PATH_JSON", config_path.c_str(), 1) == 0);
            cuda::use_primary_context();
            // No fault plan enables a direct path here, so the driver opens only in compat mode.
            EXPECT_STATUS(row.allow_compat ? success : driver_not_initialized, "cuFileDriverOpen");
            bool allow_compat = false, force_compat = false;
            EXPECT_STATUS(success, "cuFileGetParameterBool", allow_compat_parameter, &allow_compat);
            EXPECT_STATUS(success, "cuFileGetParameterBool", force_compat_parameter, &force_compat);
            CHECK(allow_compat == row.allow_compat && force_compat == row.force_compat);
        });
        if (status != 0) {
            std::fprintf(stderr, "this cufile.json is read wrongly: %s\n", row.config_text);
        }
        CHECK(unlink(config_path.c_str()) == 0 && status == 0);
    }
}

// The batch counters count each transfer of a batch as submitted by aio (asynchronous I/O of the kernel) or by p2p. The
// counters of a GPU do not include the transfers of batches.
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
    const StatsLevel3 statistics = read_statistics();
    const StatsLevel1& basic = statistics.detailed.basic;
    CHECK(basic.batch_submit_ops.ok == 1 && statistics.gpus[0].total_reads == 0);
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
    const StatsLevel3 statistics = read_statistics();
    const StatsLevel1& basic = statistics.detailed.basic;
    CHECK(basic.readv_ops.ok == 1 && basic.readv_bytes == 2 * page_bytes && basic.batch_read_bytes == 2 * page_bytes);
    CHECK(basic.batch_total_submit_ops.ok == 2 && basic.batch_aio_submit_ops.ok == 2);
    CHECK(statistics.gpus[0].total_reads == 0 && statistics.gpus[0].posix_reads == 0);
}

void test_failed_transfer_is_counted() {
    const TestFile test_file;
    start_statistics();
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, -1) < 0);
    CHECK(read_statistics().detailed.basic.read_ops.err == 1);
}

} // namespace

int main() {
    test_config_file_is_read();
    test_default_path_is_posix();
    test_transfers_are_counted_by_path();
    test_level_limits_statistics();
    test_compat_mode_off_refuses_posix();
    test_batch_transfers_are_counted_by_submission();
    test_vectored_calls_count_as_batches();
    test_failed_transfer_is_counted();
}
