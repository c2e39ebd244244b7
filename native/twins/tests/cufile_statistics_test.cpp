// Which route a transfer takes, and that the counters say so.
#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

StatsLevel3 statistics() {
    StatsLevel3 found{};
    SAYS(success, "cuFileGetStatsL3", &found);
    return found;
}

void start() {
    SAYS(success, "cuFileSetStatsLevel", 3);
    SAYS(success, "cuFileStatsReset");
    SAYS(success, "cuFileStatsStart");
}

void without_a_plan_everything_goes_through_the_host() {
    const Scene scene;
    start();
    CHECK(read_file(scene.file, scene.memory, 4 * page) == 4 * page);
    CHECK(write_file(scene.file, scene.memory, page, 0) == page);
    const StatsLevel3 found = statistics();
    const GpuStats& gpu = found.gpus[0];
    CHECK(found.gpu_count == 2);
    CHECK(gpu.posix_reads == 1 && gpu.posix_writes == 1 && gpu.p2p_reads == 0 && gpu.nvfs_reads == 0);
    CHECK(gpu.read_bytes == 4 * page && gpu.write_bytes == page && gpu.unaligned_reads == 0);
    CHECK(found.detailed.basic.read_ops.ok == 1 && found.detailed.basic.read_bytes == 4 * page);
    // The fifth bin: 16 to 31 KiB.
    CHECK(found.detailed.read_size_kb[5] == 1);
    CHECK(found.gpus[1].total_reads == 0);
}

void routes_are_told_apart() {
    const Scene scene;
    start();
    plan("cufile.route call=1 route=p2p\ncufile.route call=2 route=nvfs\ncufile.route call=3 route=p2p");
    CHECK(read_file(scene.file, scene.memory, page) == page);
    CHECK(read_file(scene.file, scene.memory, page) == page);
    // What is not aligned takes no direct route, whatever the machine could do.
    CHECK(read_file(scene.file, scene.memory, page, 1) == page);
    const StatsLevel3 found = statistics();
    const GpuStats& gpu = found.gpus[0];
    CHECK(gpu.p2p_reads == 1 && gpu.nvfs_reads == 1 && gpu.posix_reads == 1 && gpu.unaligned_reads == 1);
}

void levels_are_kept() {
    const Scene scene;
    StatsLevel2 second{};
    StatsLevel3 third{};
    SAYS(success, "cuFileSetStatsLevel", 2);
    SAYS(success, "cuFileStatsStart");
    SAYS(success, "cuFileGetStatsL2", &second);
    SAYS(invalid_value, "cuFileGetStatsL3", &third);
    SAYS(invalid_value, "cuFileGetStatsL2", static_cast<StatsLevel2*>(nullptr));
    SAYS(invalid_value, "cuFileSetStatsLevel", 4);
    SAYS(success, "cuFileStatsStop");
    const std::uint64_t before = second.basic.read_ops.ok;
    CHECK(read_file(scene.file, scene.memory, page) == page);
    SAYS(success, "cuFileGetStatsL2", &second);
    CHECK(second.basic.read_ops.ok == before);
}

void without_compat_mode_what_is_not_direct_fails() {
    SAYS(success, "cuFileSetParameterBool", 1, false);
    // Where nothing could go directly, the driver does not even open.
    SAYS(driver_not_initialized, "cuFileDriverOpen");
    {
        plan("cufile.route call=1 route=posix\ncufile.route call=2 route=p2p");
        const Scene scene;
        start();
        CHECK(read_file(scene.file, scene.memory, page) == -io_not_supported);
        CHECK(statistics().gpus[0].read_errors == 1);
        CHECK(read_file(scene.file, scene.memory, page) == page);
    }
    SAYS(success, "cuFileSetParameterBool", 1, true);
}

// How many were submitted, and how; of which route the bytes took only the direct ones are told.
void a_batch_is_counted_by_how_it_was_submitted() {
    const Scene scene;
    start();
    plan("cufile.route call=1 route=p2p");
    std::vector<IoParameters> entries(3);
    for (std::size_t index = 0; index < entries.size(); ++index) {
        entries[index].mode = mode_batch;
        entries[index].batch = {pointer(scene.memory), static_cast<off_t>(index * page),
                                static_cast<off_t>(index * page), page};
        entries[index].file = scene.file;
    }
    BatchHandle batch = nullptr;
    SAYS(success, "cuFileBatchIOSetUp", &batch, 3U);
    SAYS(success, "cuFileBatchIOSubmit", batch, 3U, entries.data(), 0U);
    call<void>("cuFileBatchIODestroy", batch);
    const StatsLevel3 found = statistics();
    const StatsLevel1& basic = found.detailed.basic;
    CHECK(basic.batch_submit_ops.ok == 1 && found.gpus[0].total_reads == 0);
    CHECK(basic.batch_read_bytes == basic.batch_total_submit_ops.ok * page);
    CHECK(basic.batch_total_submit_ops.ok == basic.batch_aio_submit_ops.ok + basic.batch_p2p_submit_ops.ok);
}

void vectors_are_batches_within() {
    const Scene scene;
    start();
    const IoVector pieces[] = {{pointer(scene.memory), page}, {pointer(scene.memory + page), page}};
    CHECK(call<ssize_t>("cuFileReadv", scene.file, static_cast<const IoVector*>(pieces), std::size_t{2}, off_t{0},
                        0U) == 2 * page);
    const StatsLevel3 found = statistics();
    const StatsLevel1& basic = found.detailed.basic;
    CHECK(basic.readv_ops.ok == 1 && basic.readv_bytes == 2 * page && basic.batch_read_bytes == 2 * page);
    CHECK(basic.batch_total_submit_ops.ok == 2 && basic.batch_aio_submit_ops.ok == 2);
    CHECK(found.gpus[0].total_reads == 0 && found.gpus[0].posix_reads == 0);
}

void failures_are_counted_as_such() {
    const Scene scene;
    start();
    CHECK(read_file(scene.file, scene.memory, page, -1) < 0);
    CHECK(statistics().detailed.basic.read_ops.err == 1);
}

} // namespace

int main() {
    without_a_plan_everything_goes_through_the_host();
    routes_are_told_apart();
    levels_are_kept();
    without_compat_mode_what_is_not_direct_fails();
    a_batch_is_counted_by_how_it_was_submitted();
    vectors_are_batches_within();
    failures_are_counted_as_such();
}
