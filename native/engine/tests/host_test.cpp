// Jobs between files and host memory: pieces, ranges, failures, cancellation, many callers, and the close of the
// engine.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
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

constexpr Access ways[] = {Access::automatic, Access::buffered, Access::direct};

// Returns the number of threads. A joined thread is listed until the kernel has removed it.
std::size_t threads_now() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

std::shared_ptr<File> borrowed(const Descriptor& fd) {
    return std::make_shared<File>(fd.get());
}

void check_reads_and_writes(const Folder& folder) {
    Bytes data = pattern(5 * mib + 777, 1);
    const Descriptor fd = file_of(folder.at("file"), data);
    Engine engine(small_tuning(), -1);
    for (const Access access : ways) {
        for (const u64 offset : {u64{0}, u64{1}, u64{4096}, mib - 1}) {
            for (const bool is_cold : {false, true}) {
                if (is_cold) {
                    forget(fd, 0, 3 * mib); // The rest stays cached, so that the range is mixed.
                }
                const u64 length = data.size() - offset - 5;
                Bytes found(length);
                CHECK(whole(moved(engine, Direction::read, host_memory, borrowed(fd), offset, address_of(found), length,
                                  access),
                            length));
                CHECK(found == part(data, offset, length));
            }
        }
        Bytes mine = pattern(3 * mib + 3, static_cast<unsigned>(access) + 40);
        CHECK(whole(
            moved(engine, Direction::write, host_memory, borrowed(fd), 12345, address_of(mine), mine.size(), access),
            mine.size()));
        std::copy(mine.begin(), mine.end(), data.begin() + 12345);
        CHECK(contents(fd) == data);
    }
}

// Ranges of random sizes, some of them empty, arrive in one memory at the right positions.
void check_many_ranges(const Folder& folder, std::mt19937_64& chance) {
    const Bytes data = pattern(4 * mib, 9);
    const Descriptor fd = file_of(folder.at("ranges"), data);
    Engine engine(small_tuning(), -1);
    for (int round = 0; round < 8; ++round) {
        std::vector<Extent> extents;
        Bytes expected, found(8 * mib);
        while (expected.size() < 6 * mib) {
            const u64 length = chance() % 5 == 0 ? chance() % mib : chance() % 9000;
            const u64 offset = chance() % (data.size() - length);
            extents.push_back(Extent{0, offset, address_of(found) + expected.size(), length});
            const Bytes piece = part(data, offset, length);
            expected.insert(expected.end(), piece.begin(), piece.end());
        }
        const auto job = started(engine, Direction::read, host_memory, {borrowed(fd)}, extents);
        CHECK(job->wait(-1) && whole(job->progress(), expected.size()));
        found.resize(expected.size());
        CHECK(found == expected);
        const std::vector<u64> arrived = job->arrived();
        for (std::size_t index = 0; index < extents.size(); ++index) {
            CHECK(arrived[index] == extents[index].length);
        }
    }
    const auto nothing = started(engine, Direction::read, host_memory, {borrowed(fd)}, {});
    CHECK(nothing->wait(0) && whole(nothing->progress(), 0));
}

// The file is shorter than the request: its bytes arrive, and the position of the end is reported.
void check_a_short_file(const Folder& folder) {
    const Bytes data = pattern(2 * mib + 5, 11);
    const Descriptor fd = file_of(folder.at("short"), data);
    Engine engine(small_tuning(), -1);
    Bytes found(4 * mib);
    const auto job =
        started(engine, Direction::read, host_memory, {borrowed(fd)},
                {Extent{0, 0, address_of(found), 3 * mib}, Extent{0, 9 * mib, address_of(found) + 3 * mib, mib}});
    CHECK(job->wait(-1) && !job->progress().failure);
    CHECK(job->arrived() == (std::vector<u64>{data.size(), 0}) && job->progress().bytes == data.size());
    CHECK(part(found, 0, data.size()) == data);
}

// Whole files by path: each is opened and closed, even if one of them is missing.
void check_paths(const Folder& folder) {
    const std::size_t before = open_files();
    std::vector<std::shared_ptr<File>> files;
    std::vector<Extent> extents;
    Bytes expected, found(3 * mib);
    {
        Engine engine(small_tuning(), -1);
        for (unsigned index = 0; index < 40; ++index) {
            const Bytes data = pattern(1 + index * 3001, index);
            file_of(folder.at("part" + std::to_string(index)), data);
            files.push_back(std::make_shared<File>(folder.at("part" + std::to_string(index)), O_RDONLY, 0));
            extents.push_back(Extent{index, 0, address_of(found) + expected.size(), data.size()});
            expected.insert(expected.end(), data.begin(), data.end());
        }
        const auto job = started(engine, Direction::read, host_memory, files, extents);
        CHECK(job->wait(-1) && whole(job->progress(), expected.size()));
        CHECK(part(found, 0, expected.size()) == expected && open_files() == before);
        for (const u64 length : {u64{100}, 2 * mib}) {
            const auto missing = std::make_shared<File>(folder.at("missing"), O_RDONLY, 0);
            const auto refused = started(engine, Direction::read, host_memory, {files[39], missing},
                                         {Extent{0, 0, address_of(found), extents[39].length},
                                          Extent{1, 0, address_of(found) + mib, std::min(length, mib)}});
            CHECK(refused->wait(-1) && refused->progress().failure->number == ENOENT);
            CHECK(refused->progress().failed_extent == 1 && refused->arrived()[1] == 0 && open_files() == before);
        }
    }
}

// The file is not writable: the first errno is kept, and no bytes are reported as arrived.
void check_a_refusal(const Folder& folder) {
    Bytes data = pattern(2 * mib, 12);
    file_of(folder.at("read-only"), data);
    const Descriptor fd = opened(folder.at("read-only"), O_RDONLY);
    Engine engine(small_tuning(), -1);
    const Progress found = moved(engine, Direction::write, host_memory, borrowed(fd), 0, address_of(data), data.size());
    CHECK(found.failure && found.failure->number == EBADF && found.bytes == 0);
    CHECK(std::string(found.failure->operation) == "pwrite");
}

// Many callers at once, each with its own file, and more jobs than the queue of the engine holds.
void check_many_callers(const Folder& folder) {
    Engine engine(small_tuning(), -1);
    std::vector<std::thread> callers;
    for (unsigned number = 0; number < 4; ++number) {
        callers.emplace_back([&, number] {
            const Bytes data = pattern(mib + number, 20 + number);
            const Descriptor fd = file_of(folder.at("caller" + std::to_string(number)), data);
            const auto file = borrowed(fd);
            std::vector<Bytes> found(120, Bytes(64 * kib));
            std::vector<std::shared_ptr<Job>> jobs;
            for (std::size_t index = 0; index < found.size(); ++index) {
                jobs.push_back(started(engine, Direction::read, host_memory, {file},
                                       {Extent{0, index * 8192, address_of(found[index]), found[index].size()}}));
                if (index % 7 == 0) {
                    jobs.back()->cancel();
                }
            }
            for (std::size_t index = 0; index < found.size(); ++index) {
                CHECK(jobs[index]->wait(-1));
                const u64 arrived = jobs[index]->arrived()[0];
                CHECK(arrived == found[index].size() || jobs[index]->progress().cancelled);
                CHECK(part(found[index], 0, arrived) == part(data, index * 8192, arrived));
            }
        });
    }
    for (std::thread& each : callers) {
        each.join();
    }
}

// Cancellation half-way: all reported bytes have arrived, and nothing behind them was started.
void check_cancellation(const Folder& folder) {
    const Bytes data = pattern(8 * mib, 30);
    const Descriptor fd = file_of(folder.at("cancelled"), data);
    Engine engine(small_tuning(), -1);
    Bytes found(data.size());
    const auto job =
        started(engine, Direction::read, host_memory, {borrowed(fd)}, {Extent{0, 0, address_of(found), data.size()}});
    while (job->progress().bytes == 0 && !job->is_over()) {
        std::this_thread::yield();
    }
    job->cancel();
    CHECK(job->wait(-1));
    const Progress progress = job->progress();
    CHECK(!progress.failure && progress.bytes == job->arrived()[0]);
    CHECK(progress.cancelled == (progress.bytes < data.size()));
    CHECK(part(found, 0, progress.bytes) == part(data, 0, progress.bytes));
    job->cancel(); // Cancelling a finished job does nothing.
    CHECK(job->progress().cancelled == progress.cancelled);
    const auto early = std::make_shared<Job>(Direction::read, Access::automatic, host_memory, std::vector{borrowed(fd)},
                                             std::vector{Extent{0, 0, address_of(found), mib}}, engine.tuning());
    early->cancel(); // The job is cancelled before it is queued and is over at once.
    engine.submit(early);
    CHECK(early->wait(-1) && early->progress().cancelled && early->progress().bytes == 0);
}

// Queued jobs complete before the threads end. Afterwards jobs are refused, and nothing is leaked.
void check_the_end(const Folder& folder) {
    const Bytes data = pattern(2 * mib, 31);
    const Descriptor fd = file_of(folder.at("last"), data);
    while (gdrkit::test::has_thread("gdrkit-engine")) {
        std::this_thread::yield(); // The threads of the previous engine must be gone before they are counted below.
    }
    const std::size_t files = open_files(), threads = threads_now();
    Bytes found(data.size());
    {
        Engine engine(small_tuning(), -1);
        CHECK(threads_now() == threads); // There are no threads before the first job.
        const auto job = started(engine, Direction::read, host_memory, {borrowed(fd)},
                                 {Extent{0, 0, address_of(found), data.size()}});
        engine.close();
        CHECK(job->is_over() && whole(job->progress(), data.size()) && found == data);
        try {
            engine.submit(job);
            CHECK(false);
        } catch (const Error& error) {
            CHECK(error.failure().number == ESHUTDOWN);
        }
        engine.close();
    }
    while (threads_now() > threads) {
        std::this_thread::yield();
    }
    CHECK(open_files() == files && threads_now() == threads);
}

// A signal is delivered to the threads of the program.
void check_signals(const Folder& folder) {
    static std::atomic<pthread_t> taken;
    const Descriptor fd = file_of(folder.at("signal"), pattern(mib, 32));
    Engine engine(small_tuning(), -1);
    Bytes found(mib);
    CHECK(whole(moved(engine, Direction::read, host_memory, borrowed(fd), 0, address_of(found), mib), mib));
    std::signal(SIGUSR1, [](int) { taken = pthread_self(); });
    CHECK(kill(getpid(), SIGUSR1) == 0);
    CHECK(taken.load() == pthread_self());
}

} // namespace

int main() {
    const Folder folder;
    std::mt19937_64 chance(1);
    check_reads_and_writes(folder);
    check_many_ranges(folder, chance);
    check_a_short_file(folder);
    check_paths(folder);
    check_a_refusal(folder);
    check_many_callers(folder);
    check_cancellation(folder);
    check_the_end(folder);
    check_signals(folder);
}
