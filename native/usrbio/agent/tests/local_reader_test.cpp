// Tests of batches of local reads, with and without io_uring, and of the second thread.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <thread>
#include <vector>

#include "tests/threads.hpp"
#include "usrbio/agent/tests/store_folder.hpp"

using namespace gdrkit::storage;
using namespace gdrkit::test;
using namespace gdrkit::usrbio::agent;
using namespace gdrkit::usrbio::agent::tests;

namespace {

constexpr std::size_t long_file_bytes = std::size_t{1024} * 1024;

// Reads `count` ranges of `length` bytes in one batch, and compares their bytes. `is_descending`: the destinations of
// later reads have lower addresses. Returns the number of reads without a result.
std::size_t read_batch(const StoreFolder& folder, LocalFile& local_file, LocalReader& reader, std::size_t count,
                       std::size_t length, bool is_descending = false) {
    std::vector<std::byte> memory(count * length);
    const auto destination_of = [&](std::size_t index) {
        return memory.data() + (is_descending ? count - 1 - index : index) * length;
    };
    const auto offset_of = [&](std::size_t index) { return index * 7 * chunk_bytes % (folder.bytes.size() - length); };
    reader.clear();
    for (std::size_t index = 0; index < count; ++index)
        CHECK(reader.add(local_file, offset_of(index), {destination_of(index), length}));
    CHECK(reader.requested_bytes() == count * length);
    const std::uint64_t copied_bytes = reader.run(no_application_processor);
    CHECK(copied_bytes <= count * length);
    std::size_t failed_count = 0;
    for (std::size_t index = 0; index < count; ++index) {
        const auto result = reader.result(index);
        if (!result) {
            ++failed_count;
            continue;
        }
        CHECK(*result == static_cast<std::int64_t>(length));
        CHECK(std::memcmp(destination_of(index), folder.bytes.data() + offset_of(index), length) == 0);
    }
    CHECK(failed_count != 0 || copied_bytes == count * length);
    return failed_count;
}

void test_batches_of_every_size() {
    const StoreFolder folder(long_file_bytes);
    const auto local_file = folder.open_local_file();
    LocalReader reader;
    // The larger batches are read by two threads, and have more reads than the queues of io_uring hold.
    for (const std::size_t count : {1, 2, 31, 32, 64, 65, 300})
        for (const std::size_t length :
             {std::size_t{1}, std::size_t{100}, std::size_t{chunk_bytes}, 3 * chunk_bytes + 5UL})
            for (const bool is_descending : {false, true})
                CHECK(read_batch(folder, *local_file, reader, count, length, is_descending) == 0);
}

void test_reads_of_two_files_in_one_batch() {
    const StoreFolder first_folder, second_folder;
    const auto first_file = first_folder.open_local_file(), second_file = second_folder.open_local_file();
    LocalReader reader;
    std::array<std::byte, 2 * chunk_bytes> memory;
    CHECK(reader.add(*first_file, chunk_bytes, std::span(memory).first(chunk_bytes)));
    CHECK(reader.add(*second_file, file_bytes - 10, std::span(memory).last(chunk_bytes)));
    CHECK(reader.run(no_application_processor) == chunk_bytes + 10);
    CHECK(reader.result(0) == chunk_bytes && reader.result(1) == 10);
    CHECK(std::memcmp(memory.data(), first_folder.bytes.data() + chunk_bytes, chunk_bytes) == 0);
    CHECK(std::memcmp(memory.data() + chunk_bytes, second_folder.bytes.data() + file_bytes - 10, 10) == 0);
}

// The helper reads the last pieces first. If the file then grows, the read must not end where the file ended before.
void test_file_that_grows_during_a_long_read_is_left_to_the_server() {
    const StoreFolder folder(long_file_bytes);
    const auto local_file = folder.open_local_file();
    LocalReader reader;
    std::vector<std::byte> memory(long_file_bytes);
    CHECK(reader.add(*local_file, long_file_bytes / 2, memory));
    reader.run(no_application_processor);
    CHECK(reader.result(0) == static_cast<std::int64_t>(long_file_bytes / 2));
    CHECK(ftruncate(folder.file.get(), 2 * long_file_bytes) == 0);
    CHECK(!reader.result(0));
}

// A failed read does not change the results of the other reads.
void test_corrupt_chunk_fails_only_its_read() {
    StoreFolder folder;
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    LocalReader reader;
    std::vector<std::byte> memory(folder.bytes.size());
    const std::byte flipped_byte = folder.bytes[3 * chunk_bytes] ^ std::byte{1};
    CHECK(pwrite(folder.file.get(), &flipped_byte, 1, 3 * chunk_bytes) == 1);
    for (std::size_t chunk = 0; chunk < 64; ++chunk)
        CHECK(reader.add(*local_file, chunk * chunk_bytes, {memory.data() + chunk * chunk_bytes, chunk_bytes}));
    CHECK(reader.run(no_application_processor) == 64 * chunk_bytes);
    for (std::size_t chunk = 0; chunk < 64; ++chunk)
        CHECK(reader.result(chunk).has_value() == (chunk != 3));
}

// A fault in one destination, as after the truncation of shared memory, does not change the results of the other reads.
void test_lost_memory_fails_only_its_read() {
    const StoreFolder folder;
    const auto local_file = folder.open_local_file();
    LocalReader reader;
    void* const lost_memory = mmap(nullptr, chunk_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(lost_memory != MAP_FAILED);
    std::vector<std::byte> memory(chunk_bytes);
    CHECK(reader.add(*local_file, 0, {static_cast<std::byte*>(lost_memory), chunk_bytes}));
    CHECK(reader.add(*local_file, 0, memory));
    CHECK(reader.run(no_application_processor) == chunk_bytes && !reader.result(0) && reader.result(1) == chunk_bytes);
    munmap(lost_memory, chunk_bytes);
}

// Installs a seccomp filter for this process: `system_call` fails with EPERM, as in a container that forbids it.
void forbid_system_call(unsigned system_call) {
    const std::array<sock_filter, 4> filter{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, system_call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog program{filter.size(), const_cast<sock_filter*>(filter.data())};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

// Reads batches in a process that may not use io_uring. `is_forbidden_later`: io_uring is forbidden only after the
// first batch, so that io_uring_enter fails instead of io_uring_setup.
void check_reads_without_io_uring(bool is_forbidden_later) {
    const StoreFolder folder(long_file_bytes);
    const auto local_file = folder.open_local_file();
    LocalReader reader;
    if (is_forbidden_later)
        CHECK(read_batch(folder, *local_file, reader, 16, chunk_bytes) == 0);
    forbid_system_call(is_forbidden_later ? SYS_io_uring_enter : SYS_io_uring_setup);
    std::array<CachedRead, 1> reads;
    ReadRing ring;
    CHECK(!ring.read(reads));
    CHECK(read_batch(folder, *local_file, reader, 16, chunk_bytes) == 0);
    CHECK(read_batch(folder, *local_file, reader, 300, chunk_bytes) == 0);
}

// A later read of the batch finds that the sums cannot be opened again. The earlier read must not count as verified.
void test_lost_sums_fail_the_earlier_reads_of_a_batch() {
    StoreFolder folder;
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    std::vector<std::byte> memory(2 * chunk_bytes);
    const std::byte wrong_byte = folder.bytes[0] ^ std::byte{1};
    CHECK(pwrite(folder.file.get(), &wrong_byte, 1, 0) == 1);
    LocalReader reader;
    CHECK(reader.add(*local_file, 0, {memory.data(), chunk_bytes}));
    folder.generation.advance();
    rlimit limit_before{};
    CHECK(getrlimit(RLIMIT_NOFILE, &limit_before) == 0);
    rlimit low_limit = limit_before;
    low_limit.rlim_cur = 3; // No further descriptor can be opened.
    CHECK(setrlimit(RLIMIT_NOFILE, &low_limit) == 0);
    CHECK(!reader.add(*local_file, chunk_bytes, {memory.data() + chunk_bytes, chunk_bytes}));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit_before) == 0);
    reader.run(no_application_processor);
    CHECK(!reader.result(0));
}

void test_reads_where_io_uring_is_forbidden() {
    for (const bool is_forbidden_later : {false, true}) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            check_reads_without_io_uring(is_forbidden_later);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

void test_helper_executes_each_index_once() {
    ReadHelper helper;
    std::size_t helped_jobs_count = 0;
    for (std::size_t job = 0; job < 2000; ++job) {
        std::vector<std::atomic<int>> call_counts(1 + job % 40);
        std::atomic<bool> has_helped{false};
        const auto caller_id = std::this_thread::get_id();
        std::size_t next_index = 0, next_helper_index = call_counts.size() - 1;
        helper.run(call_counts.size(), no_application_processor, [&](std::size_t index, bool is_helper) {
            ++call_counts[index];
            CHECK(index == (is_helper ? next_helper_index-- : next_index++));
            CHECK(is_helper == (std::this_thread::get_id() != caller_id));
            if (is_helper)
                has_helped = true;
            // Give the helper time to begin in some jobs. After it has missed several jobs, only each 65th job is
            // shared.
            if (job % 7 == 3)
                std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
        for (const auto& call_count : call_counts)
            CHECK(call_count == 1);
        helped_jobs_count += has_helped ? 1 : 0;
    }
    CHECK(helped_jobs_count != 0);
}

// If the helper gets a processor too late, the next job is not shared, so that the loop does not wait for the helper in
// every batch.
void test_job_after_a_late_helper_is_not_shared() {
    ReadHelper helper;
    std::atomic<bool> has_helped{false};
    const auto share_job = [&] {
        has_helped = false;
        helper.run(2, no_application_processor, [&](std::size_t, bool is_helper) {
            if (is_helper)
                has_helped = true;
            std::this_thread::sleep_for(std::chrono::milliseconds(is_helper ? 200 : 1));
        });
        return has_helped.load();
    };
    for (int attempt = 0; attempt < 1000 && !has_helped; ++attempt)
        share_job();
    CHECK(has_helped && !share_job());
}

void test_helper_avoids_the_processor_of_its_caller() {
    cpu_set_t allowed_processors;
    CHECK(sched_getaffinity(0, sizeof allowed_processors, &allowed_processors) == 0);
    if (CPU_COUNT(&allowed_processors) < 2)
        return;
    ReadHelper helper;
    cpu_set_t helper_processors{};
    const std::vector<int> processors = list_processors();
    for (const int& processor : processors) {
        // This thread moves to the processor, and may run on all of them again when it shares the job.
        restrict_thread({&processor, 1});
        restrict_thread(processors);
        std::atomic<bool> has_helped{false};
        for (int attempt = 0; attempt < 1000 && !has_helped; ++attempt)
            helper.run(2, no_application_processor, [&](std::size_t, bool is_helper) {
                cpu_set_t own_processors;
                CHECK(sched_getaffinity(0, sizeof own_processors, &own_processors) == 0);
                CHECK(CPU_COUNT(&own_processors) == CPU_COUNT(&allowed_processors) - (is_helper ? 1 : 0));
                if (is_helper) {
                    helper_processors = own_processors;
                    has_helped = true;
                } else {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            });
        CHECK(has_helped);
    }
    // If this thread may use only the processor that the helper avoids, the helper keeps its processors.
    cpu_set_t avoided_processors;
    CPU_XOR(&avoided_processors, &allowed_processors, &helper_processors);
    CHECK(sched_setaffinity(0, sizeof avoided_processors, &avoided_processors) == 0);
    std::atomic<int> helped_count{0};
    for (int job = 0; job < 1000 && helped_count < 3; ++job)
        helper.run(2, no_application_processor, [&](std::size_t, bool is_helper) {
            cpu_set_t own_processors;
            CHECK(sched_getaffinity(0, sizeof own_processors, &own_processors) == 0);
            CHECK(CPU_EQUAL(&own_processors, is_helper ? &helper_processors : &avoided_processors));
            // The helper is late for its first job, so run() then sets the helper's processors again.
            const bool is_late = is_helper && helped_count++ == 0;
            std::this_thread::sleep_for(std::chrono::milliseconds(is_late ? 200 : 1));
        });
    CHECK(helped_count >= 3);
    CHECK(sched_setaffinity(0, sizeof allowed_processors, &allowed_processors) == 0);
}

// With two processors, the application shares one of them with this thread or with the helper. Without the move, it
// would share the helper's processor in half of all runs, and the cache lines of the ring would travel between the
// processors.
void test_caller_with_two_processors_follows_the_application() {
    const std::vector<int> all_processors = list_processors();
    if (all_processors.size() < 2)
        return;
    const std::span<const int> processors = std::span(all_processors).first(2);
    restrict_thread(processors);
    ReadHelper helper;
    const auto run_job = [&](int application_processor) {
        int own_processor = -1;
        helper.run(2, application_processor, [&](std::size_t, bool is_helper) {
            if (!is_helper && own_processor < 0)
                own_processor = sched_getcpu();
            std::this_thread::sleep_for(std::chrono::milliseconds(2)); // Each thread executes one index.
        });
        cpu_set_t own_processors;
        CHECK(sched_getaffinity(0, sizeof own_processors, &own_processors) == 0 && CPU_COUNT(&own_processors) == 2);
        return own_processor;
    };
    run_job(no_application_processor); // The first shared job counts the processors.
    // A move on a busy machine takes long, and is followed by a pause. Also, not every job is shared. So the test makes
    // up to 500 attempts.
    int followed_count = 0;
    for (std::size_t job = 0; job < 500 && followed_count < 5; ++job) {
        const std::size_t start_index = job % 2, target_index = 1 - start_index;
        restrict_thread({&processors[start_index], 1});
        restrict_thread(processors);
        if (run_job(processors[target_index]) == processors[target_index])
            ++followed_count;
        else
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK(followed_count == 5);
    restrict_thread(all_processors);
}

} // namespace

int main() {
    test_reads_where_io_uring_is_forbidden(); // First, because it forks, which is unsafe once there are other threads.
    test_batches_of_every_size();
    test_reads_of_two_files_in_one_batch();
    test_file_that_grows_during_a_long_read_is_left_to_the_server();
    test_corrupt_chunk_fails_only_its_read();
    test_lost_memory_fails_only_its_read();
    test_lost_sums_fail_the_earlier_reads_of_a_batch();
    test_helper_executes_each_index_once();
    test_job_after_a_late_helper_is_not_shared();
    test_helper_avoids_the_processor_of_its_caller();
    test_caller_with_two_processors_follows_the_application();
    std::puts("ok");
    return 0;
}
