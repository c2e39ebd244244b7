// Tests of the copy engine with jobs between files and device memory: every byte arrives, also with unaligned ends,
// from cached and uncached files, on several devices and for several callers.
#include <algorithm>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "engine/tests/device.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

constexpr Access access_modes[] = {Access::automatic, Access::buffered, Access::direct};

std::shared_ptr<File> make_file(const Descriptor& fd) {
    return std::make_shared<File>(duplicate(fd));
}

// Reads into a part of a DeviceMemory. The bytes before and after the part stay unchanged.
void check_reads(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(5 * mib + 777, 1);
    const Descriptor fd = create_file(folder.path_of("read"), data);
    DeviceMemory memory(0, 6 * mib);
    for (const Access access : access_modes) {
        for (const u64 offset : {u64{0}, u64{4095}, mib + 1}) {
            for (const bool is_cold : {false, true}) {
                if (is_cold) {
                    drop_cache(fd, 0, 3 * mib); // The bytes after 3 MiB stay cached.
                }
                memory.fill();
                const u64 length = data.size() - offset - 5;
                CHECK(is_complete(
                    transfer(engine, Direction::read, 0, make_file(fd), offset, memory.address() + 3, length, access),
                    length));
                CHECK(memory.read(3, length) == sub_range(data, offset, length));
                CHECK(memory.read(0, 3) == Bytes(3, filler));
                CHECK(memory.read(3 + length, 64) == Bytes(64, filler));
            }
        }
    }
    CHECK(get_current_context() == nullptr);
}

void check_writes(const Folder& folder, Engine& engine) {
    Bytes data = pattern(5 * mib, 2);
    const Descriptor fd = create_file(folder.path_of("written"), data);
    DeviceMemory memory(0, 4 * mib);
    for (const Access access : access_modes) {
        for (const u64 offset : {u64{0}, u64{511}, 2 * mib + 5}) {
            const Bytes new_data =
                pattern(4 * mib, static_cast<unsigned>(offset % 251) + static_cast<unsigned>(access));
            memory.write(new_data);
            const u64 length = 3 * mib + 17;
            CHECK(is_complete(
                transfer(engine, Direction::write, 0, make_file(fd), offset, memory.address() + 1, length, access),
                length));
            data.resize(std::max<std::size_t>(data.size(), offset + length));
            std::copy_n(new_data.begin() + 1, length, data.begin() + static_cast<std::ptrdiff_t>(offset));
            CHECK(contents(fd) == data);
        }
    }
}

// Thousands of short ranges arrive at the right positions.
void check_many_ranges(const Folder& folder, Engine& engine) {
    std::mt19937_64 random(3);
    const Bytes data = pattern(2 * mib, 3);
    const Descriptor fd = create_file(folder.path_of("ranges"), data);
    DeviceMemory memory(0, 8 * mib);
    std::vector<Extent> extents;
    Bytes expected_data;
    while (expected_data.size() < 5 * mib) {
        const u64 length = random() % 6 == 0 ? random() % (600 * kib) : random() % 5000;
        const u64 offset = random() % (data.size() - length);
        extents.push_back(Extent{0, offset, memory.address() + expected_data.size(), length});
        const Bytes range_data = sub_range(data, offset, length);
        expected_data.insert(expected_data.end(), range_data.begin(), range_data.end());
    }
    drop_cache(fd, mib);
    const auto job = start_job(engine, Direction::read, 0, {make_file(fd)}, extents);
    CHECK(job->wait(-1) && is_complete(job->progress(), expected_data.size()));
    CHECK(memory.read(0, expected_data.size()) == expected_data);
}

// If two ranges are contiguous in the file and in device memory, but in two allocations, the engine makes two copies,
// because the driver refuses a copy across the end of an allocation.
void check_neighbouring_allocations(const Folder& folder, Engine& engine) {
    constexpr u64 allocation_bytes = 2 * mib, range_bytes = 4 * kib;
    std::vector<std::unique_ptr<DeviceMemory>> memories;
    for (int index = 0; index < 16; ++index) {
        memories.push_back(std::make_unique<DeviceMemory>(0, allocation_bytes));
    }
    std::ranges::sort(memories, {}, &DeviceMemory::address);
    std::vector<Extent> extents;
    int adjacent_pairs_count = 0;
    for (std::size_t index = 0; index + 1 < memories.size(); ++index) {
        const u64 allocation_end = memories[index]->address() + allocation_bytes,
                  next_begin = memories[index + 1]->address();
        adjacent_pairs_count += allocation_end == next_begin ? 1 : 0;
        extents.push_back(Extent{0, extents.size() * range_bytes, allocation_end - range_bytes, range_bytes});
        extents.push_back(Extent{0, extents.size() * range_bytes, next_begin, range_bytes});
    }
    CHECK(adjacent_pairs_count > 0);
    const Bytes data = pattern(extents.size() * range_bytes, 8);
    const Descriptor fd = create_file(folder.path_of("neighbours"), data);
    const auto job = start_job(engine, Direction::read, 0, {make_file(fd)}, extents);
    CHECK(job->wait(-1) && is_complete(job->progress(), data.size()));
    for (std::size_t index = 0; index + 1 < memories.size(); ++index) {
        CHECK(memories[index]->read(allocation_bytes - range_bytes, range_bytes) ==
              sub_range(data, 2 * index * range_bytes, range_bytes));
        CHECK(memories[index + 1]->read(0, range_bytes) == sub_range(data, (2 * index + 1) * range_bytes, range_bytes));
    }
}

// A job reads beyond the end of a file. The memory after the bytes of the file stays unchanged.
void check_a_short_file(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(mib + 5, 4);
    const Descriptor fd = create_file(folder.path_of("short"), data);
    DeviceMemory memory(0, 2 * mib);
    const auto job = start_job(engine, Direction::read, 0, {make_file(fd)}, {Extent{0, 0, memory.address(), 2 * mib}});
    CHECK(job->wait(-1) && !job->progress().failure && job->progress().bytes == data.size());
    CHECK(job->arrived_bytes()[0] == data.size() && memory.read(0, data.size()) == data);
    CHECK(memory.read(data.size(), mib - 5) == Bytes(mib - 5, filler));
}

// Several callers make small transfers on two devices at the same time.
void check_small_transfers(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(mib, 5);
    const Descriptor fd = create_file(folder.path_of("small"), data);
    std::vector<std::thread> callers;
    for (int caller_index = 0; caller_index < 3; ++caller_index) {
        callers.emplace_back([&, caller_index] {
            const int device = caller_index % 2;
            File file(duplicate(fd));
            DeviceMemory memory(device, 64 * kib);
            for (u64 round = 0; round < 40; ++round) {
                const u64 length = 1 + round * 1009, offset = round * 7777 + static_cast<u64>(caller_index);
                const IoResult result =
                    engine.transfer_small(Direction::read, file, offset, memory.address(), length, device);
                CHECK(!result.failure && result.bytes == length &&
                      memory.read(0, length) == sub_range(data, offset, length));
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

// Several callers use two devices at the same time, and each cancels one of its jobs.
void check_many_callers(const Folder& folder, Engine& engine) {
    std::vector<std::thread> callers;
    for (int caller_index = 0; caller_index < 4; ++caller_index) {
        callers.emplace_back([&, caller_index] {
            const Bytes data = pattern(2 * mib, 50 + static_cast<unsigned>(caller_index));
            const Descriptor fd = create_file(folder.path_of("caller" + std::to_string(caller_index)), data);
            const auto source_file = make_file(fd);
            const Descriptor copy_fd = open_file(folder.path_of("copy" + std::to_string(caller_index)));
            DeviceMemory memory(caller_index % 2, data.size());
            for (int round = 0; round < 4; ++round) {
                memory.fill();
                const auto job = start_job(engine, Direction::read, memory.device(), {source_file},
                                           {Extent{0, 0, memory.address(), data.size()}});
                if (round == 2) {
                    job->cancel();
                }
                CHECK(job->wait(-1));
                const u64 arrived_bytes = job->arrived_bytes()[0];
                CHECK(arrived_bytes == data.size() || job->progress().is_cancelled);
                CHECK(memory.read(0, arrived_bytes) == sub_range(data, 0, arrived_bytes));
            }
            CHECK(is_complete(transfer(engine, Direction::write, memory.device(), make_file(copy_fd), 0,
                                       memory.address(), data.size()),
                              data.size()));
            CHECK(contents(copy_fd) == data);
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

// A job for a device that does not exist fails. A later job for another device works.
void check_missing_device(const Folder& folder, Engine& engine) {
    const Descriptor fd = create_file(folder.path_of("nowhere"), pattern(mib, 6));
    constexpr int missing_device = 77;
    const Progress progress = transfer(engine, Direction::read, missing_device, make_file(fd), 0, 4096, mib);
    CHECK(progress.failure && progress.failure->api == Api::cuda &&
          progress.failure->number == gdrkit::cuda::invalid_device && progress.bytes == 0);
    DeviceMemory memory(1, mib);
    CHECK(is_complete(transfer(engine, Direction::read, 1, make_file(fd), 0, memory.address(), mib), mib));
}

// Returns the number of bytes that each thread of an engine has read, largest first. Returns an empty list if the
// kernel does not count the bytes.
std::vector<u64> list_bytes_by_thread() {
    std::vector<u64> read_bytes_by_thread;
    for (const auto& thread_folder : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string thread_name;
        std::ifstream(thread_folder.path() / "comm") >> thread_name;
        std::string counter_name; // The file begins with the line "rchar: <bytes>".
        u64 bytes = 0;
        if (std::ifstream counters(thread_folder.path() / "io");
            thread_name == "gdrkit-engine" && counters >> counter_name >> bytes) {
            read_bytes_by_thread.push_back(bytes);
        }
    }
    std::sort(read_bytes_by_thread.rbegin(), read_bytes_by_thread.rend());
    return read_bytes_by_thread;
}

// The settings allow two concurrent O_DIRECT reads of a job. A thread needs a reservation to read, and keeps it after a
// read. So the same two threads do most of the reads from the disk.
void check_direct_readers(const Folder& folder) {
    Tuning tuning = small_tuning();
    tuning.workers_count = 8;
    tuning.direct_readers_count = 2;
    tuning.direct_read_bytes = tuning.direct_min_bytes = 64U << 10U;
    Engine engine(tuning, any_node);
    const Bytes data = pattern(16 * mib, 8);
    const Descriptor fd = create_file(folder.path_of("disk"), data);
    DeviceMemory memory(0, data.size());
    const Progress progress =
        transfer(engine, Direction::read, 0, make_file(fd), 0, memory.address(), data.size(), Access::direct);
    CHECK(is_complete(progress, data.size()) && memory.read(0, data.size()) == data);
    const std::vector<u64> bytes_by_thread = list_bytes_by_thread();
    if (progress.direct_bytes == data.size() && !bytes_by_thread.empty()) {
        // Half of the bytes is enough, because another thread may take over if one of the two threads wakes up late.
        CHECK(bytes_by_thread[0] + bytes_by_thread[1] > data.size() / 2);
    }
}

} // namespace

int main() {
    const Folder folder;
    // This check is the first, because it would also count the reads of the threads of an earlier engine.
    check_direct_readers(folder);
    std::size_t open_files_count_before = 0;
    for (int round = 0; round < 2; ++round) {
        {
            Engine engine(small_tuning(), any_node);
            check_reads(folder, engine);
            check_writes(folder, engine);
            check_many_ranges(folder, engine);
            check_neighbouring_allocations(folder, engine);
            check_a_short_file(folder, engine);
            check_small_transfers(folder, engine);
            check_many_callers(folder, engine);
            check_missing_device(folder, engine);
        }
        // The driver keeps some files open after the first round.
        CHECK(round == 0 || count_open_files() == open_files_count_before);
        open_files_count_before = count_open_files();
    }
}
