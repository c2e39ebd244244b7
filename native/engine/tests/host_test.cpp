// Tests of the copy engine with jobs between files and host memory: chunks, ranges, failures, cancellation, many
// callers, and the close of the engine.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>
#include <string>
#include <thread>

#include "engine/tests/fixture.hpp"
#include "tests/threads.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

constexpr Access access_modes[] = {Access::automatic, Access::buffered, Access::direct};

// Returns the number of threads of this process. A joined thread is counted until the kernel has removed it.
std::size_t count_threads() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

std::shared_ptr<File> make_file(const Descriptor& fd) {
    return std::make_shared<File>(duplicate(fd));
}

void check_reads_and_writes(const Folder& folder) {
    Bytes data = pattern(5 * mib + 777, 1);
    const Descriptor fd = create_file(folder.path_of("file"), data);
    Engine engine(small_tuning(), any_node);
    for (const Access access : access_modes) {
        for (const u64 offset : {u64{0}, u64{1}, u64{4096}, mib - 1}) {
            for (const bool is_cold : {false, true}) {
                if (is_cold) {
                    drop_cache(fd, 0, 3 * mib); // The bytes after 3 MiB stay cached.
                }
                const u64 length = data.size() - offset - 5;
                Bytes memory(length);
                CHECK(is_complete(transfer(engine, Direction::read, host_memory, make_file(fd), offset,
                                           address_of(memory), length, access),
                                  length));
                CHECK(memory == sub_range(data, offset, length));
            }
        }
        Bytes new_data = pattern(3 * mib + 3, static_cast<unsigned>(access) + 40);
        CHECK(is_complete(transfer(engine, Direction::write, host_memory, make_file(fd), 12345, address_of(new_data),
                                   new_data.size(), access),
                          new_data.size()));
        std::copy(new_data.begin(), new_data.end(), data.begin() + 12345);
        CHECK(contents(fd) == data);
    }
}

// Ranges of random sizes, some of them empty, arrive in one memory at the right positions.
void check_many_ranges(const Folder& folder, std::mt19937_64& random) {
    const Bytes data = pattern(4 * mib, 9);
    const Descriptor fd = create_file(folder.path_of("ranges"), data);
    Engine engine(small_tuning(), any_node);
    for (int round = 0; round < 8; ++round) {
        std::vector<Extent> extents;
        Bytes expected_data, memory(8 * mib);
        while (expected_data.size() < 6 * mib) {
            const u64 length = random() % 5 == 0 ? random() % mib : random() % 9000;
            const u64 offset = random() % (data.size() - length);
            extents.push_back(Extent{0, offset, address_of(memory) + expected_data.size(), length});
            const Bytes range_data = sub_range(data, offset, length);
            expected_data.insert(expected_data.end(), range_data.begin(), range_data.end());
        }
        const auto job = start_job(engine, Direction::read, host_memory, {make_file(fd)}, extents);
        CHECK(job->wait(-1) && is_complete(job->progress(), expected_data.size()));
        memory.resize(expected_data.size());
        CHECK(memory == expected_data);
        const std::vector<u64> arrived_bytes = job->arrived_bytes();
        for (std::size_t index = 0; index < extents.size(); ++index) {
            CHECK(arrived_bytes[index] == extents[index].length);
        }
    }
    const auto empty_job = start_job(engine, Direction::read, host_memory, {make_file(fd)}, {});
    CHECK(empty_job->wait(0) && is_complete(empty_job->progress(), 0));
}

// If a file is shorter than the requested ranges, all bytes of the file arrive, and the job reports the number for each
// range.
void check_short_file(const Folder& folder) {
    const Bytes data = pattern(2 * mib + 5, 11);
    const Descriptor fd = create_file(folder.path_of("short"), data);
    Engine engine(small_tuning(), any_node);
    Bytes memory(4 * mib);
    const auto job =
        start_job(engine, Direction::read, host_memory, {make_file(fd)},
                  {Extent{0, 0, address_of(memory), 3 * mib}, Extent{0, 9 * mib, address_of(memory) + 3 * mib, mib}});
    CHECK(job->wait(-1) && !job->progress().failure);
    CHECK(job->arrived_bytes() == (std::vector<u64>{data.size(), 0}) && job->progress().bytes == data.size());
    CHECK(sub_range(memory, 0, data.size()) == data);
}

// A job opens and closes the files that are given by path, even if one of them is missing.
void check_paths(const Folder& folder) {
    const std::size_t open_files_count_before = count_open_files();
    std::vector<std::shared_ptr<File>> files;
    std::vector<Extent> extents;
    Bytes expected_data, memory(3 * mib);
    {
        Engine engine(small_tuning(), any_node);
        for (unsigned index = 0; index < 40; ++index) {
            const Bytes data = pattern(1 + index * 3001, index);
            create_file(folder.path_of("part" + std::to_string(index)), data);
            files.push_back(std::make_shared<File>(folder.path_of("part" + std::to_string(index)), O_RDONLY, 0));
            extents.push_back(Extent{index, 0, address_of(memory) + expected_data.size(), data.size()});
            expected_data.insert(expected_data.end(), data.begin(), data.end());
        }
        const auto job = start_job(engine, Direction::read, host_memory, files, extents);
        CHECK(job->wait(-1) && is_complete(job->progress(), expected_data.size()));
        CHECK(sub_range(memory, 0, expected_data.size()) == expected_data &&
              count_open_files() == open_files_count_before);
        for (const u64 length : {u64{100}, 2 * mib}) {
            const auto missing_file = std::make_shared<File>(folder.path_of("missing"), O_RDONLY, 0);
            const auto failed_job = start_job(engine, Direction::read, host_memory, {files[39], missing_file},
                                              {Extent{0, 0, address_of(memory), extents[39].length},
                                               Extent{1, 0, address_of(memory) + mib, std::min(length, mib)}});
            CHECK(failed_job->wait(-1) && failed_job->progress().failure->number == ENOENT);
            CHECK(failed_job->progress().failed_extent == 1 && failed_job->arrived_bytes()[1] == 0);
            CHECK(count_open_files() == open_files_count_before);
        }
    }
}

// A write to a file that is open only for reading reports the errno of the first failure, and no bytes as arrived.
void check_failed_write(const Folder& folder) {
    Bytes data = pattern(2 * mib, 12);
    create_file(folder.path_of("read-only"), data);
    const Descriptor fd = open_file(folder.path_of("read-only"), O_RDONLY);
    Engine engine(small_tuning(), any_node);
    const Progress progress =
        transfer(engine, Direction::write, host_memory, make_file(fd), 0, address_of(data), data.size());
    CHECK(progress.failure && progress.failure->number == EBADF && progress.bytes == 0);
    CHECK(std::string(progress.failure->operation) == "pwrite");
}

// wait(0) returns at once whether a job is over, and does not sleep. A system call with a timeout of 0 would sleep for
// the timer slack of 50 us.
void check_query_does_not_sleep(const Folder& folder) {
    const Descriptor fd = create_file(folder.path_of("query"), pattern(kib, 13));
    Bytes memory(kib);
    Job job(Direction::read, Access::automatic, host_memory, {make_file(fd)}, {Extent{0, 0, address_of(memory), kib}},
            small_tuning());
    constexpr int queries_count = 100;
    auto shortest_round_time = std::chrono::nanoseconds::max();
    for (int round = 0; round < 10; ++round) {
        const auto begin_time = std::chrono::steady_clock::now();
        for (int query = 0; query < queries_count; ++query) {
            CHECK(!job.wait(0));
        }
        shortest_round_time =
            std::min<std::chrono::nanoseconds>(shortest_round_time, std::chrono::steady_clock::now() - begin_time);
    }
    // The limit is half of the timer slack for each query.
    CHECK(shortest_round_time < queries_count * std::chrono::microseconds(25));
}

// A write is divided among the few workers that may write at the same time, a read among all workers.
void check_chunks_of_a_write(const Folder& folder) {
    const Descriptor fd = create_file(folder.path_of("chunks"), {});
    Tuning tuning;
    tuning.workers_count = 16;
    const auto count_chunks = [&](Direction direction) {
        return Job(direction, Access::automatic, host_memory, {make_file(fd)}, {Extent{0, 0, 4096, mib}}, tuning)
            .chunks_count();
    };
    // A short job has about two chunks for each worker that may take part in it.
    CHECK(count_chunks(Direction::read) > 2 * tuning.buffered_writers_count + 1);
    CHECK(count_chunks(Direction::write) <= 2 * tuning.buffered_writers_count + 1);
}

// Several callers start more jobs at once than the queue of the engine holds, each with its own file.
void check_many_callers(const Folder& folder) {
    Engine engine(small_tuning(), any_node);
    std::vector<std::thread> callers;
    for (unsigned caller_index = 0; caller_index < 4; ++caller_index) {
        callers.emplace_back([&, caller_index] {
            const Bytes data = pattern(mib + caller_index, 20 + caller_index);
            const Descriptor fd = create_file(folder.path_of("caller" + std::to_string(caller_index)), data);
            const auto file = make_file(fd);
            std::vector<Bytes> memories(120, Bytes(64 * kib));
            std::vector<std::shared_ptr<Job>> jobs;
            for (std::size_t index = 0; index < memories.size(); ++index) {
                jobs.push_back(
                    start_job(engine, Direction::read, host_memory, {file},
                              {Extent{0, index * 8192, address_of(memories[index]), memories[index].size()}}));
                if (index % 7 == 0) {
                    jobs.back()->cancel();
                }
            }
            for (std::size_t index = 0; index < memories.size(); ++index) {
                CHECK(jobs[index]->wait(-1));
                const u64 arrived_bytes = jobs[index]->arrived_bytes()[0];
                CHECK(arrived_bytes == memories[index].size() || jobs[index]->progress().is_cancelled);
                CHECK(sub_range(memories[index], 0, arrived_bytes) == sub_range(data, index * 8192, arrived_bytes));
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

// A worker without work spins for a short time, then it sleeps. Short jobs are executed in both states, and at the
// change between them.
void check_short_jobs_after_pauses(const Folder& folder, std::mt19937_64& random) {
    const Bytes data = pattern(64 * kib, 27);
    const Descriptor fd = create_file(folder.path_of("pauses"), data);
    const auto file = make_file(fd);
    Engine engine(small_tuning(), any_node);
    for (int round = 0; round < 2000; ++round) {
        Bytes memory(2 * kib);
        const u64 offset = random() % (data.size() - memory.size());
        const auto job = start_job(engine, Direction::read, host_memory, {file},
                                   {Extent{0, offset, address_of(memory), memory.size()}});
        CHECK(job->wait(20'000'000)); // 20 s
        CHECK(memory == sub_range(data, offset, memory.size()));
        const auto pause_end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 100);
        while (std::chrono::steady_clock::now() < pause_end) {
        }
    }
}

// After a cancellation in the middle of a job, the bytes that are reported as arrived have arrived.
void check_cancellation(const Folder& folder) {
    const Bytes data = pattern(8 * mib, 30);
    const Descriptor fd = create_file(folder.path_of("cancelled"), data);
    Engine engine(small_tuning(), any_node);
    Bytes memory(data.size());
    const auto job = start_job(engine, Direction::read, host_memory, {make_file(fd)},
                               {Extent{0, 0, address_of(memory), data.size()}});
    while (job->progress().bytes == 0 && !job->is_over()) {
        std::this_thread::yield();
    }
    job->cancel();
    CHECK(job->wait(-1));
    const Progress progress = job->progress();
    CHECK(!progress.failure && progress.bytes == job->arrived_bytes()[0]);
    CHECK(progress.is_cancelled == (progress.bytes < data.size()));
    CHECK(sub_range(memory, 0, progress.bytes) == sub_range(data, 0, progress.bytes));
    job->cancel(); // Cancelling a finished job does nothing.
    CHECK(job->progress().is_cancelled == progress.is_cancelled);
    const auto unsubmitted_job =
        std::make_shared<Job>(Direction::read, Access::automatic, host_memory, std::vector{make_file(fd)},
                              std::vector{Extent{0, 0, address_of(memory), mib}}, engine.tuning());
    unsubmitted_job->cancel(); // A job that is cancelled before it is queued is over at once.
    engine.submit(unsubmitted_job);
    CHECK(unsubmitted_job->wait(-1) && unsubmitted_job->progress().is_cancelled &&
          unsubmitted_job->progress().bytes == 0);
}

// close() completes the queued jobs before the threads end. Afterwards submit() fails, and nothing is leaked.
void check_close(const Folder& folder) {
    const Bytes data = pattern(2 * mib, 31);
    const Descriptor fd = create_file(folder.path_of("last"), data);
    while (gdrkit::test::has_thread("gdrkit-engine")) {
        std::this_thread::yield(); // The threads of the previous engine must be gone before they are counted below.
    }
    const std::size_t open_files_count_before = count_open_files(), threads_count_before = count_threads();
    Bytes memory(data.size());
    {
        Engine engine(small_tuning(), any_node);
        CHECK(count_threads() == threads_count_before); // The engine starts no threads before the first job.
        const auto job = start_job(engine, Direction::read, host_memory, {make_file(fd)},
                                   {Extent{0, 0, address_of(memory), data.size()}});
        engine.close();
        CHECK(job->is_over() && is_complete(job->progress(), data.size()) && memory == data);
        try {
            engine.submit(job);
            CHECK(false);
        } catch (const Error& error) {
            CHECK(error.failure().number == ESHUTDOWN);
        }
        engine.close();
    }
    while (count_threads() > threads_count_before) {
        std::this_thread::yield();
    }
    CHECK(count_open_files() == open_files_count_before && count_threads() == threads_count_before);
}

// If the thread that closes the engine gives up while a job is in progress, the engine stays open. Several threads may
// close the engine at the same time.
void check_given_up_close(const Folder& folder) {
    const std::string path = folder.path_of("fifo");
    CHECK(mkfifo(path.c_str(), 0600) == 0);
    const Descriptor fd = create_file(folder.path_of("other"), pattern(kib, 37));
    Engine engine(small_tuning(), any_node);
    Bytes memory(kib);
    // The open of a FIFO waits for a writer. Then the read fails, because a FIFO has no offsets.
    const auto fifo_job = start_job(engine, Direction::read, host_memory, {std::make_shared<File>(path, O_RDONLY, 0)},
                                    {Extent{0, 0, address_of(memory), kib}});
    const auto start_regular_job = [&] {
        return start_job(engine, Direction::read, host_memory, {make_file(fd)},
                         {Extent{0, 0, address_of(memory), kib}});
    };
    {
        const EngineClosing closing(engine);
        CHECK(!engine.wait_until_idle(std::chrono::milliseconds(20)));
        try {
            start_regular_job();
            CHECK(false);
        } catch (const Error& error) {
            CHECK(error.failure().number == ESHUTDOWN);
        }
    }
    const auto regular_job = start_regular_job();
    CHECK(regular_job->wait(-1) && is_complete(regular_job->progress(), kib) && !fifo_job->is_over());
    std::thread first_closer([&] { engine.close(); });
    std::thread second_closer([&] { engine.close(); });
    const Descriptor fifo_writer(open(path.c_str(), O_WRONLY | O_CLOEXEC));
    first_closer.join();
    second_closer.join();
    CHECK(fifo_job->is_over() && fifo_job->progress().failure->number == ESPIPE && engine.wait_until_idle({}));
}

bool is_readable(int fd) {
    pollfd descriptor{.fd = fd, .events = POLLIN, .revents = 0};
    return poll(&descriptor, 1, 0) == 1;
}

// A queue gets each token of notify() once, whether notify() was called before or after the end of the job. The eventfd
// of the queue is readable while the queue has tokens.
void check_notifications(const Folder& folder) {
    constexpr u64 jobs_count = 100;
    const Bytes data = pattern(jobs_count * kib, 33);
    const Descriptor fd = create_file(folder.path_of("notify"), data);
    Engine engine(small_tuning(), any_node);
    Bytes memory(data.size());
    const auto queue = std::make_shared<CompletionQueue>(true);
    CHECK(!is_readable(queue->event_fd()) && queue->take().empty());
    std::vector<u64> tokens;
    std::shared_ptr<Job> last_job;
    for (u64 index = 0; index < jobs_count; ++index) {
        last_job = start_job(engine, Direction::read, host_memory, {make_file(fd)},
                             {Extent{0, index * kib, address_of(memory) + index * kib, kib}});
        last_job->notify(queue, index);
    }
    while (tokens.size() < jobs_count) {
        pollfd descriptor{.fd = queue->event_fd(), .events = POLLIN, .revents = 0};
        CHECK(poll(&descriptor, 1, 10000) == 1);
        for (const u64 token : queue->take()) {
            tokens.push_back(token);
        }
    }
    CHECK(memory == data && last_job->is_over());
    std::sort(tokens.begin(), tokens.end());
    for (u64 index = 0; index < jobs_count; ++index) {
        CHECK(tokens[index] == index);
    }
    last_job->notify(queue, 7);
    last_job->notify(queue, 8);
    CHECK(is_readable(queue->event_fd()) && queue->take() == (std::vector<u64>{7, 8}));
    CHECK(!is_readable(queue->event_fd()) && queue->take().empty());
    const auto abandoned_queue = std::make_shared<CompletionQueue>(false);
    last_job->notify(abandoned_queue, 9); // The destructor of the queue frees the entry.
    // A forked child shares the eventfd of the queue with its parent, so the destructor of the queue must not read it.
    auto dropped_queue = std::make_shared<CompletionQueue>(true);
    const Descriptor shared_event_fd(fcntl(dropped_queue->event_fd(), F_DUPFD_CLOEXEC, 0));
    last_job->notify(dropped_queue, 10);
    dropped_queue.reset();
    CHECK(is_readable(shared_event_fd.get()));
}

// Totals count each job and each small transfer once, with the bytes that arrived.
void check_totals(const Folder& folder) {
    const Descriptor fd = create_file(folder.path_of("totals"), pattern(kib, 34));
    Engine engine(small_tuning(), any_node);
    Bytes memory(2 * kib);
    const u64 transfers_count_before = totals.transfers_count, arrived_bytes_before = totals.arrived_bytes;
    transfer(engine, Direction::read, host_memory, make_file(fd), 0, address_of(memory), 2 * kib);
    engine.transfer_small(Direction::read, *make_file(fd), 1, address_of(memory), 2 * kib, host_memory);
    // The job reads all bytes of the file, and the small transfer all but the first.
    CHECK(totals.transfers_count - transfers_count_before == 2 &&
          totals.arrived_bytes - arrived_bytes_before == 2 * kib - 1);
}

// A signal is delivered to a thread of the program, not to a thread of the engine.
void check_signals(const Folder& folder) {
    static std::atomic<pthread_t> signal_thread;
    const Descriptor fd = create_file(folder.path_of("signal"), pattern(mib, 32));
    Engine engine(small_tuning(), any_node);
    Bytes memory(mib);
    CHECK(is_complete(transfer(engine, Direction::read, host_memory, make_file(fd), 0, address_of(memory), mib), mib));
    std::signal(SIGUSR1, [](int) { signal_thread = pthread_self(); });
    CHECK(kill(getpid(), SIGUSR1) == 0);
    CHECK(signal_thread.load() == pthread_self());
}

} // namespace

int main() {
    const Folder folder;
    std::mt19937_64 random(1);
    check_reads_and_writes(folder);
    check_many_ranges(folder, random);
    check_short_file(folder);
    check_paths(folder);
    check_failed_write(folder);
    check_query_does_not_sleep(folder);
    check_chunks_of_a_write(folder);
    check_many_callers(folder);
    check_short_jobs_after_pauses(folder, random);
    check_cancellation(folder);
    check_close(folder);
    check_given_up_close(folder);
    check_signals(folder);
    check_notifications(folder);
    check_totals(folder);
}
