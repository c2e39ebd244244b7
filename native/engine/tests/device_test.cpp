// Jobs between files and device memory: every byte, unaligned ends, cached and cold files, several devices and callers.
#include <algorithm>
#include <fstream>
#include <random>
#include <thread>

#include "engine/tests/device.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

constexpr Access access_modes[] = {Access::automatic, Access::buffered, Access::direct};

std::shared_ptr<File> descriptor_file(const Descriptor& fd) {
    return std::make_shared<File>(fd.get());
}

void check_reads(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(5 * mib + 777, 1);
    const Descriptor fd = create_file(folder.at("read"), data);
    Memory memory(0, 6 * mib);
    for (const Access access : access_modes) {
        for (const u64 offset : {u64{0}, u64{4095}, mib + 1}) {
            for (const bool is_cold : {false, true}) {
                if (is_cold) {
                    drop_cache(fd, 0, 3 * mib); // The rest stays cached, so that the range is mixed.
                }
                memory.fill();
                const u64 length = data.size() - offset - 5;
                CHECK(is_complete(transfer(engine, Direction::read, 0, descriptor_file(fd), offset,
                                           memory.address() + 3, length, access),
                                  length));
                CHECK(memory.read(3, length) == sub_range(data, offset, length));
                CHECK(memory.read(0, 3) == Bytes(3, std::byte{0xa5}));
                CHECK(memory.read(3 + length, 64) == Bytes(64, std::byte{0xa5}));
            }
        }
    }
    CHECK(current_context() == nullptr);
}

void check_writes(const Folder& folder, Engine& engine) {
    Bytes data = pattern(5 * mib, 2);
    const Descriptor fd = create_file(folder.at("written"), data);
    Memory memory(0, 4 * mib);
    for (const Access access : access_modes) {
        for (const u64 offset : {u64{0}, u64{511}, 2 * mib + 5}) {
            const Bytes written = pattern(4 * mib, static_cast<unsigned>(offset % 251) + static_cast<unsigned>(access));
            memory.write(written);
            const u64 length = 3 * mib + 17;
            CHECK(is_complete(transfer(engine, Direction::write, 0, descriptor_file(fd), offset, memory.address() + 1,
                                       length, access),
                              length));
            data.resize(std::max<std::size_t>(data.size(), offset + length));
            std::copy_n(written.begin() + 1, length, data.begin() + static_cast<std::ptrdiff_t>(offset));
            CHECK(contents(fd) == data);
        }
    }
}

// Thousands of ranges take a few copies and arrive in the given order.
void check_many_ranges(const Folder& folder, Engine& engine) {
    std::mt19937_64 random(3);
    const Bytes data = pattern(2 * mib, 3);
    const Descriptor fd = create_file(folder.at("ranges"), data);
    Memory memory(0, 8 * mib);
    std::vector<Extent> extents;
    Bytes expected;
    while (expected.size() < 5 * mib) {
        const u64 length = random() % 6 == 0 ? random() % (600 * kib) : random() % 5000;
        const u64 offset = random() % (data.size() - length);
        extents.push_back(Extent{0, offset, memory.address() + expected.size(), length});
        const Bytes chunk = sub_range(data, offset, length);
        expected.insert(expected.end(), chunk.begin(), chunk.end());
    }
    drop_cache(fd, mib);
    const auto job = start_job(engine, Direction::read, 0, {descriptor_file(fd)}, extents);
    CHECK(job->wait(-1) && is_complete(job->progress(), expected.size()));
    CHECK(memory.read(0, expected.size()) == expected);
}

// Bytes that a file does not have leave the memory unchanged.
void check_a_short_file(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(mib + 5, 4);
    const Descriptor fd = create_file(folder.at("short"), data);
    Memory memory(0, 2 * mib);
    const auto job =
        start_job(engine, Direction::read, 0, {descriptor_file(fd)}, {Extent{0, 0, memory.address(), 2 * mib}});
    CHECK(job->wait(-1) && !job->progress().failure && job->progress().bytes == data.size());
    CHECK(job->arrived()[0] == data.size() && memory.read(0, data.size()) == data);
    CHECK(memory.read(data.size(), mib - 5) == Bytes(mib - 5, std::byte{0xa5}));
}

void check_short_transfers(const Folder& folder, Engine& engine) {
    const Bytes data = pattern(mib, 5);
    const Descriptor fd = create_file(folder.at("small"), data);
    std::vector<std::thread> callers;
    for (int number = 0; number < 3; ++number) {
        callers.emplace_back([&, number] {
            const int device = number % 2;
            File file(fd.get());
            Memory memory(device, 64 * kib);
            for (u64 round = 0; round < 40; ++round) {
                const u64 length = 1 + round * 1009, offset = round * 7777 + static_cast<u64>(number);
                const IoResult result =
                    engine.transfer_small(Direction::read, file, offset, memory.address(), length, device);
                CHECK(!result.failure && result.bytes == length &&
                      memory.read(0, length) == sub_range(data, offset, length));
            }
        });
    }
    for (std::thread& each : callers) {
        each.join();
    }
}

// The same threads serve two devices and the host at the same time; some callers cancel.
void check_many_callers(const Folder& folder, Engine& engine) {
    std::vector<std::thread> callers;
    for (int number = 0; number < 4; ++number) {
        callers.emplace_back([&, number] {
            const Bytes data = pattern(2 * mib, 50 + static_cast<unsigned>(number));
            const Descriptor fd = create_file(folder.at("caller" + std::to_string(number)), data);
            const auto source = descriptor_file(fd);
            const Descriptor copy = open_file(folder.at("copy" + std::to_string(number)));
            Memory memory(number % 2, data.size());
            for (int round = 0; round < 4; ++round) {
                memory.fill();
                const auto job = start_job(engine, Direction::read, memory.device(), {source},
                                           {Extent{0, 0, memory.address(), data.size()}});
                if (round == 2) {
                    job->cancel();
                }
                CHECK(job->wait(-1));
                const u64 arrived = job->arrived()[0];
                CHECK(arrived == data.size() || job->progress().cancelled);
                CHECK(memory.read(0, arrived) == sub_range(data, 0, arrived));
            }
            CHECK(is_complete(transfer(engine, Direction::write, memory.device(), descriptor_file(copy), 0,
                                       memory.address(), data.size()),
                              data.size()));
            CHECK(contents(copy) == data);
        });
    }
    for (std::thread& each : callers) {
        each.join();
    }
}

// A device that does not exist fails only its own job.
void check_no_such_device(const Folder& folder, Engine& engine) {
    const Descriptor fd = create_file(folder.at("nowhere"), pattern(mib, 6));
    const Progress refused = transfer(engine, Direction::read, 77, descriptor_file(fd), 0, 4096, mib);
    CHECK(refused.failure && refused.failure->api == Api::cuda && refused.failure->number == 101 && refused.bytes == 0);
    Memory memory(1, mib);
    CHECK(is_complete(transfer(engine, Direction::read, 1, descriptor_file(fd), 0, memory.address(), mib), mib));
}

// Returns the bytes that each thread of an engine has read, the largest first; empty if the kernel does not count them.
std::vector<u64> bytes_by_thread() {
    std::vector<u64> bytes_read;
    for (const auto& each : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::ifstream(each.path() / "comm") >> name;
        std::string word;
        u64 bytes = 0;
        if (std::ifstream counters(each.path() / "io"); name == "gdrkit-engine" && counters >> word >> bytes) {
            bytes_read.push_back(bytes);
        }
    }
    std::sort(bytes_read.rbegin(), bytes_read.rend());
    return bytes_read;
}

// Two threads read from the disk, as configured. The threads do not take turns, because each has its own memory.
void check_direct_readers(const Folder& folder) {
    Tuning tuning = small_tuning();
    tuning.workers_count = 8;
    tuning.direct_readers_count = 2;
    tuning.direct_read_bytes = tuning.direct_min_bytes = 64U << 10U;
    Engine engine(tuning, -1);
    const Bytes data = pattern(16 * mib, 8);
    const Descriptor fd = create_file(folder.at("disk"), data);
    Memory memory(0, data.size());
    const Progress read =
        transfer(engine, Direction::read, 0, descriptor_file(fd), 0, memory.address(), data.size(), Access::direct);
    CHECK(is_complete(read, data.size()) && memory.read(0, data.size()) == data);
    const std::vector<u64> bytes = bytes_by_thread();
    if (read.direct_bytes == data.size() && !bytes.empty()) {
        CHECK(bytes[0] + bytes[1] > data.size() / 2); // A thread that wakes up late may have taken over.
    }
}

} // namespace

int main() {
    const Folder folder;
    check_direct_readers(folder); // This must run while no other engine has threads.
    std::size_t before = 0;
    for (int round = 0; round < 2; ++round) {
        {
            Engine engine(small_tuning(), -1);
            check_reads(folder, engine);
            check_writes(folder, engine);
            check_many_ranges(folder, engine);
            check_a_short_file(folder, engine);
            check_short_transfers(folder, engine);
            check_many_callers(folder, engine);
            check_no_such_device(folder, engine);
        }
        CHECK(round == 0 || open_files() == before);
        before = open_files(); // The driver keeps some files open after the first round.
    }
}
