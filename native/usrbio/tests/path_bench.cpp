// Measures the speed of reads through the whole I/O path (ring, agent, server and NIC). In the same run, it measures
// reads of the same cached file by the kernel, for comparison.
//
// Reads of 4 KiB at random offsets with 64 in flight are compared with io_uring. Sequential reads of 1 MiB with
// 8 in flight are compared with pread by one thread. Both kinds of reads are also compared with code that makes only
// the copies of the path (bare_copies.hpp). All variants read into the same amount of memory. The variants take turns,
// round by round, so that other load on the machine affects all of them.
//
// With --points, the program instead compares reads of the given sizes and depths with reads by io_uring, which keeps
// as many reads in flight and waits for as many completions at once. If FILE is on a FUSE mount of the agent,
// --peer-file is the same file in the agent's store, which io_uring reads. Before each point, the program measures the
// round trips of a cache line between the two cores of --cores.
//
// path_bench MOUNT FILE [--kind host|device] [--rounds 5] [--ms 200] [--only TURN] [--cores N,N] [--pid NAME=PID]...
//            [--points BYTES:DEPTH,...] [--peer-file FILE]
//
// --kind is the kind of memory into which the path reads, --rounds the number of rounds, and --ms the time of a turn.
// --only restricts the run to the turns with this name, such as "path_small".
//
// The program prints one line of JSON for each turn. `cpu_s` has the processor time of this process and of the
// processes of --pid. This time shows the cost of an operation even if other programs also use the processors. After
// each turn, the program compares the data of the last reads with the file. The bare copies run on the two cores of
// --cores. Without --cores, the bare copies and the round trips are skipped.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "bare_copies.hpp"
#include "hf3fs_usrbio.h"
#include "path_reads.hpp"
#include "round_trips.hpp"
#include "uring_reads.hpp"

namespace {

using namespace gdrkit::usrbio::bench;
using Clock = std::chrono::steady_clock;

constexpr std::size_t page_bytes = 4096, small_read_bytes = 4096, large_read_bytes = 1UL << 20;
constexpr unsigned small_depth = 64, large_depth = 8;

struct Settings {
    std::string mount_path, file_path, peer_file_path, memory_kind = "host";
    std::string only_turn; // If not empty, only the turns with this name run.
    int round_count = 5;
    double turn_ms = 200;
    std::vector<int> cores;
    std::vector<std::pair<std::size_t, unsigned>> points; // Sizes in bytes, and depths.
    std::vector<std::pair<std::string, int>> named_pids;  // Names and process ids.
};

// Returns the processor time of all current threads of a process, in seconds.
double read_cpu_s(int pid) {
    double seconds = 0;
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", error)) {
        std::uint64_t cpu_ns = 0;
        std::ifstream(task.path() / "schedstat") >> cpu_ns;
        seconds += static_cast<double>(cpu_ns) * 1e-9;
    }
    return seconds;
}

double read_own_cpu_s() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto to_seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return to_seconds(usage.ru_utime) + to_seconds(usage.ru_stime);
}

// Runs one turn of the variant `name`: repeats `run_step` for the time of a turn, and then calls `end_turn`. Both
// functions return the number of operations that they completed. Prints the number of operations, the time, and the
// processor time of each process.
template <typename Step, typename End>
void run_turn(const Settings& settings, const char* name, int round, std::size_t operation_bytes, Step run_step,
              End end_turn) {
    if (!settings.only_turn.empty() && settings.only_turn != name) {
        return;
    }
    run_step(); // Warm up. The operations that this step completes are not counted.
    std::vector<double> process_cpu_s_before;
    for (const auto& [process_name, pid] : settings.named_pids) {
        process_cpu_s_before.push_back(read_cpu_s(pid));
    }
    const double own_cpu_s_before = read_own_cpu_s();
    const auto begin_time = Clock::now();
    std::uint64_t completed_count = 0;
    double elapsed_s = 0;
    do {
        completed_count += run_step();
        elapsed_s = std::chrono::duration<double>(Clock::now() - begin_time).count();
    } while (elapsed_s * 1000 < settings.turn_ms);
    completed_count += end_turn();
    elapsed_s = std::chrono::duration<double>(Clock::now() - begin_time).count();
    std::printf("{\"turn\": \"%s\", \"round\": %d, \"bytes\": %zu, \"operations\": %llu, \"passed_s\": %.6f, "
                "\"cpu_s\": {\"client\": %.6f",
                name, round, operation_bytes, static_cast<unsigned long long>(completed_count), elapsed_s,
                read_own_cpu_s() - own_cpu_s_before);
    for (std::size_t index = 0; index < process_cpu_s_before.size(); ++index) {
        const auto& [process_name, pid] = settings.named_pids[index];
        std::printf(", \"%s\": %.6f", process_name.c_str(), read_cpu_s(pid) - process_cpu_s_before[index]);
    }
    std::printf("}}\n");
    std::fflush(stdout);
}

// Measures reads of each size and depth through the path, and the same reads by io_uring, in alternating turns.
void measure_points(const Settings& settings, const Cuda* cuda, int file_fd, int peer_file_fd,
                    std::uint64_t file_bytes) {
    std::minstd_rand random_engine(1);
    for (const auto& [read_bytes, depth] : settings.points) {
        UsrbioReads path_reads(settings.mount_path, cuda, file_fd, depth, read_bytes);
        UringReads uring_reads(peer_file_fd, depth, read_bytes);
        std::uniform_int_distribution<std::uint64_t> random_block_index(0, file_bytes / read_bytes - 1);
        const auto next_offset = [&, read_bytes = read_bytes] {
            return random_block_index(random_engine) * read_bytes;
        };
        const std::string point_name = std::to_string(read_bytes) + "_" + std::to_string(depth);
        // Each wait returns at least this number of completions.
        const unsigned completions_min = std::max(depth / 2, 1U);
        if (settings.cores.size() > 1 && settings.cores.front() != settings.cores.back()) {
            RoundTrips round_trips(settings.cores);
            run_turn(
                settings, "round_trip", 0, sizeof(std::uint32_t), [&] { return round_trips.run_step(); },
                [] { return 0U; });
        }
        for (int round = 0; round < settings.round_count; ++round) {
            if (uring_reads.is_available()) {
                run_turn(
                    settings, ("io_uring_" + point_name).c_str(), round, read_bytes,
                    [&] { return uring_reads.run_step(completions_min, next_offset); },
                    [&] { return uring_reads.drain(); });
            }
            run_turn(
                settings, ("usrbio_" + point_name).c_str(), round, read_bytes,
                [&] { return path_reads.run_step(completions_min, next_offset); }, [&] { return path_reads.drain(); });
            path_reads.compare();
        }
    }
}

// Opens a file for reading, and returns its descriptor and its size.
std::pair<int, std::uint64_t> open_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat attributes {};
    if (fd < 0 || fstat(fd, &attributes) != 0) {
        exit_with_errno(path.c_str());
    }
    return {fd, static_cast<std::uint64_t>(attributes.st_size)};
}

// Parses BYTES:DEPTH,...
std::vector<std::pair<std::size_t, unsigned>> parse_points(const std::string& text) {
    std::vector<std::pair<std::size_t, unsigned>> points;
    for (const char* remaining_text = text.c_str(); *remaining_text != 0;) {
        std::size_t bytes = 0;
        unsigned depth = 0;
        int point_length = 0;
        if (std::sscanf(remaining_text, "%zu:%u%n", &bytes, &depth, &point_length) != 2 || bytes == 0 || depth == 0) {
            std::fprintf(stderr, "path_bench: --points must be BYTES:DEPTH,... such as 4096:1,4096:8, not %s\n",
                         text.c_str());
            std::exit(2);
        }
        points.emplace_back(bytes, depth);
        remaining_text += point_length;
        remaining_text += *remaining_text == ',' ? 1 : 0;
    }
    return points;
}

// Measures the points of --points, or else the variants that the head of this file lists, in alternating turns.
void measure(const Settings& settings, int file_fd, std::uint64_t file_bytes) {
    std::unique_ptr<Cuda> cuda;
    if (settings.memory_kind == "device") {
        cuda = std::make_unique<Cuda>();
    }
    if (!settings.points.empty()) {
        const int peer_file_fd = settings.peer_file_path.empty() ? file_fd : open_file(settings.peer_file_path).first;
        measure_points(settings, cuda.get(), file_fd, peer_file_fd, file_bytes);
        return;
    }
    UsrbioReads small_reads(settings.mount_path, cuda.get(), file_fd, small_depth, small_read_bytes);
    UsrbioReads large_reads(settings.mount_path, cuda.get(), file_fd, large_depth, large_read_bytes);
    UringReads uring_reads(file_fd, small_depth, small_read_bytes);
    BareCopies small_bare_copies(file_fd, small_depth, small_read_bytes, settings.cores);
    BareCopies large_bare_copies(file_fd, large_depth, large_read_bytes, settings.cores);
    // Align the destination of pread to a page: the kernel copies by `rep movsb`, which on some processors is several
    // times slower if only one side is aligned.
    const std::unique_ptr<void, decltype(&std::free)> pread_buffers(
        std::aligned_alloc(page_bytes, large_depth * large_read_bytes), &std::free);
    unsigned buffer_index = 0;
    std::minstd_rand random_engine(1);
    std::uniform_int_distribution<std::uint64_t> random_block_index(0, file_bytes / small_read_bytes - 1);
    std::uint64_t next_sequential_offset = 0;
    const auto next_random_offset = [&] { return random_block_index(random_engine) * small_read_bytes; };
    const auto advance_sequential_offset = [&] {
        return std::exchange(next_sequential_offset, next_sequential_offset + 2 * large_read_bytes > file_bytes
                                                         ? 0
                                                         : next_sequential_offset + large_read_bytes);
    };
    const auto end_without_wait = [] { return 0U; };
    for (int round = 0; round < settings.round_count; ++round) {
        const auto pread_step = [&] {
            auto* const destination =
                static_cast<std::uint8_t*>(pread_buffers.get()) + buffer_index++ % large_depth * large_read_bytes;
            if (pread(file_fd, destination, large_read_bytes, static_cast<off_t>(advance_sequential_offset())) !=
                ssize_t{large_read_bytes}) {
                exit_with_errno("pread");
            }
            return 1U;
        };
        run_turn(settings, "pread", round, large_read_bytes, pread_step, end_without_wait);
        run_turn(
            settings, "path_large", round, large_read_bytes,
            [&] { return large_reads.run_step(large_depth / 2, advance_sequential_offset); },
            [&] { return large_reads.drain(); });
        large_reads.compare();
        if (large_bare_copies.is_available()) {
            run_turn(
                settings, "bare_large", round, large_read_bytes,
                [&] { return large_bare_copies.run_step(advance_sequential_offset); },
                [&] { return large_bare_copies.end_turn(); });
            large_bare_copies.compare();
        }
        if (uring_reads.is_available()) {
            run_turn(
                settings, "io_uring", round, small_read_bytes,
                [&] { return uring_reads.run_step(small_depth / 2, next_random_offset); },
                [&] { return uring_reads.drain(); });
        }
        run_turn(
            settings, "path_small", round, small_read_bytes,
            [&] { return small_reads.run_step(small_depth / 2, next_random_offset); },
            [&] { return small_reads.drain(); });
        small_reads.compare();
        if (small_bare_copies.is_available()) {
            run_turn(
                settings, "bare_small", round, small_read_bytes,
                [&] { return small_bare_copies.run_step(next_random_offset); },
                [&] { return small_bare_copies.end_turn(); });
            small_bare_copies.compare();
        }
    }
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count < 3 || argument_count % 2 == 0) {
        std::fprintf(stderr,
                     "usage: path_bench MOUNT FILE [--kind host|device] [--rounds N] [--ms N] "
                     "[--only TURN] [--cores N,N] [--pid NAME=PID]... [--points BYTES:DEPTH,...] [--peer-file FILE]\n");
        return 2;
    }
    Settings settings;
    settings.mount_path = arguments[1];
    settings.file_path = arguments[2];
    for (int index = 3; index < argument_count; index += 2) {
        const std::string option = arguments[index], value = arguments[index + 1];
        if (option == "--kind") {
            settings.memory_kind = value;
        } else if (option == "--rounds") {
            settings.round_count = std::atoi(value.c_str());
        } else if (option == "--ms") {
            settings.turn_ms = std::atof(value.c_str());
        } else if (option == "--only") {
            settings.only_turn = value;
        } else if (option == "--points") {
            settings.points = parse_points(value);
        } else if (option == "--peer-file") {
            settings.peer_file_path = value;
        } else if (option == "--cores") {
            const std::size_t separator = value.find(',');
            if (separator == std::string::npos) {
                std::fprintf(stderr, "path_bench: --cores must be two numbers such as 0,1, not %s\n", value.c_str());
                return 2;
            }
            settings.cores = {std::atoi(value.c_str()), std::atoi(value.c_str() + separator + 1)};
        } else if (option == "--pid") {
            const std::size_t separator = value.find('=');
            settings.named_pids.emplace_back(value.substr(0, separator), std::atoi(value.c_str() + separator + 1));
        } else {
            std::fprintf(stderr, "path_bench: unknown option %s\n", option.c_str());
            return 2;
        }
    }
    const auto [file_fd, file_bytes] = open_file(settings.file_path);
    if (file_bytes < large_read_bytes * large_depth) {
        std::fprintf(stderr, "path_bench: %s must have at least %zu bytes, the size of the reads in flight\n",
                     settings.file_path.c_str(), large_read_bytes * large_depth);
        return 1;
    }
    check_result("hf3fs_reg_fd", std::max(hf3fs_reg_fd(file_fd, 0), 0));
    measure(settings, file_fd, file_bytes);
    hf3fs_dereg_fd(file_fd);
    return 0;
}
