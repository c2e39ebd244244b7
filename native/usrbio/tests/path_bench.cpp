// Measures the speed of reads through the whole I/O path (ring, agent, server and NIC). In the same run, it measures
// reads of the same cached file by the kernel, for comparison.
//
// Reads of 4 KiB at random offsets with 64 in flight are compared with io_uring. Sequential reads of 1 MiB with 8 in
// flight are compared with pread by one thread. Both are also compared with the copies of the path alone
// (bare_copies.hpp). All variants read into the same amount of memory. The variants take turns, round by round, so that
// other load on the machine affects all of them.
//
// With --points, the program instead compares reads of the given sizes and depths with reads by io_uring, which keeps
// as many reads in flight and waits for as many completions at once. In FUSE mode, --peer-file is the file in the
// store. Before each point, it measures the round trips of a cache line between the two cores of --cores.
//
// path_bench MOUNT FILE [--kind host|device] [--rounds 5] [--ms 200] [--only TURN] [--cores N,N] [--pid NAME=PID]...
//            [--points BYTES:DEPTH,...] [--peer-file FILE]
//
// The program prints one line of JSON for each turn. `cpu_s` has the processor time of this process and of the
// processes of --pid. It shows the cost of an operation even if other programs also use the processors. After each
// turn, the program compares the data of the last reads with the file. The copies alone run on the two cores of
// --cores. Without --cores, they are skipped, and the round trips too.
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

constexpr std::size_t page_bytes = 4096, small_bytes = 4096, large_bytes = 1UL << 20;
constexpr unsigned small_depth = 64, large_depth = 8;

struct Settings {
    std::string mount, file, peer_file, kind = "host", only;
    int rounds = 5;
    double turn_ms = 200;
    std::vector<int> cores;
    std::vector<std::pair<std::size_t, unsigned>> points; // Sizes in bytes, and depths.
    std::vector<std::pair<std::string, int>> processes;
};

// Returns the processor time of all current threads of a process, in seconds.
double read_cpu_s(int process) {
    double seconds = 0;
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", error)) {
        std::uint64_t cpu_ns = 0;
        std::ifstream(task.path() / "schedstat") >> cpu_ns;
        seconds += static_cast<double>(cpu_ns) * 1e-9;
    }
    return seconds;
}

double read_process_cpu_s() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto to_seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return to_seconds(used.ru_utime) + to_seconds(used.ru_stime);
}

// Runs one turn of the variant `name`: repeats `run_step` for the time of a turn, and then calls `end_turn`. Both
// return a number of completed operations. Prints the number of operations, the time, and the processor time of each
// process.
template <typename Step, typename End>
void run_turn(const Settings& settings, const char* name, int round, std::size_t bytes, Step run_step, End end_turn) {
    if (!settings.only.empty() && settings.only != name) {
        return;
    }
    run_step(); // Warm up.
    std::vector<double> process_cpu_before;
    for (const auto& [process_name, process] : settings.processes) {
        process_cpu_before.push_back(read_cpu_s(process));
    }
    const double cpu_before = read_process_cpu_s();
    const auto begin = Clock::now();
    std::uint64_t completed_count = 0;
    double elapsed_s = 0;
    do {
        completed_count += run_step();
        elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (elapsed_s * 1000 < settings.turn_ms);
    completed_count += end_turn();
    elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("{\"turn\": \"%s\", \"round\": %d, \"bytes\": %zu, \"operations\": %llu, \"passed_s\": %.6f, "
                "\"cpu_s\": {\"client\": %.6f",
                name, round, bytes, static_cast<unsigned long long>(completed_count), elapsed_s,
                read_process_cpu_s() - cpu_before);
    for (std::size_t index = 0; index < process_cpu_before.size(); ++index) {
        const auto& [process_name, process] = settings.processes[index];
        std::printf(", \"%s\": %.6f", process_name.c_str(), read_cpu_s(process) - process_cpu_before[index]);
    }
    std::printf("}}\n");
    std::fflush(stdout);
}

// Measures reads of each size and depth through the path, and the same reads by io_uring, in alternating turns.
void measure_points(const Settings& settings, const Cuda* cuda, int file, int peer_file, std::uint64_t size) {
    std::minstd_rand random(1);
    for (const auto& [bytes, depth] : settings.points) {
        UsrbioReads path(settings.mount, cuda, file, depth, bytes);
        UringReads uring(peer_file, depth, bytes);
        std::uniform_int_distribution<std::uint64_t> blocks(0, size / bytes - 1);
        const auto next_offset = [&, bytes = bytes] { return blocks(random) * bytes; };
        const std::string point = std::to_string(bytes) + "_" + std::to_string(depth);
        const unsigned batch = std::max(depth / 2, 1U);
        if (settings.cores.size() > 1 && settings.cores.front() != settings.cores.back()) {
            RoundTrips round_trips(settings.cores);
            run_turn(
                settings, "round_trip", 0, sizeof(std::uint32_t), [&] { return round_trips.run_step(); },
                [] { return 0U; });
        }
        for (int round = 0; round < settings.rounds; ++round) {
            if (uring.is_available()) {
                run_turn(
                    settings, ("io_uring_" + point).c_str(), round, bytes,
                    [&] { return uring.run_step(batch, next_offset); }, [&] { return uring.drain(); });
            }
            run_turn(
                settings, ("usrbio_" + point).c_str(), round, bytes, [&] { return path.run_step(batch, next_offset); },
                [&] { return path.drain(); });
            path.compare();
        }
    }
}

// Opens a file for reading, and returns its descriptor and its size.
std::pair<int, std::uint64_t> open_file(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat attributes {};
    if (file < 0 || fstat(file, &attributes) != 0) {
        exit_with_errno(path.c_str());
    }
    return {file, static_cast<std::uint64_t>(attributes.st_size)};
}

// Parses BYTES:DEPTH,...
std::vector<std::pair<std::size_t, unsigned>> parse_points(const std::string& text) {
    std::vector<std::pair<std::size_t, unsigned>> points;
    for (const char* position = text.c_str(); *position != 0;) {
        std::size_t bytes = 0;
        unsigned depth = 0;
        int length = 0;
        if (std::sscanf(position, "%zu:%u%n", &bytes, &depth, &length) != 2 || bytes == 0 || depth == 0) {
            std::fprintf(stderr, "path_bench: --points must be BYTES:DEPTH,... such as 4096:1,4096:8, not %s\n",
                         text.c_str());
            std::exit(2);
        }
        points.emplace_back(bytes, depth);
        position += length;
        position += *position == ',' ? 1 : 0;
    }
    return points;
}

void measure(const Settings& settings, int file, std::uint64_t size) {
    std::unique_ptr<Cuda> cuda;
    if (settings.kind == "device") {
        cuda = std::make_unique<Cuda>();
    }
    if (!settings.points.empty()) {
        const int peer_file = settings.peer_file.empty() ? file : open_file(settings.peer_file).first;
        measure_points(settings, cuda.get(), file, peer_file, size);
        return;
    }
    UsrbioReads small(settings.mount, cuda.get(), file, small_depth, small_bytes);
    UsrbioReads large(settings.mount, cuda.get(), file, large_depth, large_bytes);
    UringReads uring(file, small_depth, small_bytes);
    BareCopies bare_small(file, small_depth, small_bytes, settings.cores);
    BareCopies bare_large(file, large_depth, large_bytes, settings.cores);
    // Align to a page, because `rep movsb` of some processors is several times slower if only one side is aligned.
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(page_bytes, large_depth * large_bytes),
                                                             &std::free);
    unsigned buffer_index = 0;
    std::minstd_rand random(1);
    std::uniform_int_distribution<std::uint64_t> blocks(0, size / small_bytes - 1);
    std::uint64_t next_offset = 0;
    const auto random_offset = [&] { return blocks(random) * small_bytes; };
    const auto sequential_offset = [&] {
        return std::exchange(next_offset, next_offset + 2 * large_bytes > size ? 0 : next_offset + large_bytes);
    };
    const auto end_at_once = [] { return 0U; };
    for (int round = 0; round < settings.rounds; ++round) {
        const auto pread_step = [&] {
            auto* const destination =
                static_cast<std::uint8_t*>(memory.get()) + buffer_index++ % large_depth * large_bytes;
            if (pread(file, destination, large_bytes, static_cast<off_t>(sequential_offset())) !=
                ssize_t{large_bytes}) {
                exit_with_errno("pread");
            }
            return 1U;
        };
        run_turn(settings, "pread", round, large_bytes, pread_step, end_at_once);
        run_turn(
            settings, "path_large", round, large_bytes,
            [&] { return large.run_step(large_depth / 2, sequential_offset); }, [&] { return large.drain(); });
        large.compare();
        if (bare_large.is_available()) {
            run_turn(
                settings, "bare_large", round, large_bytes, [&] { return bare_large.run_step(sequential_offset); },
                [&] { return bare_large.end_turn(); });
            bare_large.compare();
        }
        if (uring.is_available()) {
            run_turn(
                settings, "io_uring", round, small_bytes,
                [&] { return uring.run_step(small_depth / 2, random_offset); }, [&] { return uring.drain(); });
        }
        run_turn(
            settings, "path_small", round, small_bytes, [&] { return small.run_step(small_depth / 2, random_offset); },
            [&] { return small.drain(); });
        small.compare();
        if (bare_small.is_available()) {
            run_turn(
                settings, "bare_small", round, small_bytes, [&] { return bare_small.run_step(random_offset); },
                [&] { return bare_small.end_turn(); });
            bare_small.compare();
        }
    }
}

} // namespace

int main(int count, char** arguments) {
    if (count < 3 || count % 2 == 0) {
        std::fprintf(stderr,
                     "usage: path_bench MOUNT FILE [--kind host|device] [--rounds N] [--ms N] "
                     "[--only TURN] [--cores N,N] [--pid NAME=PID]... [--points BYTES:DEPTH,...] [--peer-file FILE]\n");
        return 2;
    }
    Settings settings;
    settings.mount = arguments[1];
    settings.file = arguments[2];
    for (int index = 3; index < count; index += 2) {
        const std::string option = arguments[index], value = arguments[index + 1];
        if (option == "--kind") {
            settings.kind = value;
        } else if (option == "--rounds") {
            settings.rounds = std::atoi(value.c_str());
        } else if (option == "--ms") {
            settings.turn_ms = std::atof(value.c_str());
        } else if (option == "--only") {
            settings.only = value;
        } else if (option == "--points") {
            settings.points = parse_points(value);
        } else if (option == "--peer-file") {
            settings.peer_file = value;
        } else if (option == "--cores") {
            const std::size_t separator = value.find(',');
            if (separator == std::string::npos) {
                std::fprintf(stderr, "path_bench: --cores must be two numbers such as 0,1, not %s\n", value.c_str());
                return 2;
            }
            settings.cores = {std::atoi(value.c_str()), std::atoi(value.c_str() + separator + 1)};
        } else if (option == "--pid") {
            const std::size_t separator = value.find('=');
            settings.processes.emplace_back(value.substr(0, separator), std::atoi(value.c_str() + separator + 1));
        } else {
            std::fprintf(stderr, "path_bench: unknown option %s\n", option.c_str());
            return 2;
        }
    }
    const auto [file, size] = open_file(settings.file);
    if (size < large_bytes * large_depth) {
        std::fprintf(stderr, "path_bench: %s must have at least %zu bytes, the size of the reads in flight\n",
                     settings.file.c_str(), large_bytes * large_depth);
        return 1;
    }
    check_result("hf3fs_reg_fd", std::max(hf3fs_reg_fd(file, 0), 0));
    measure(settings, file, size);
    hf3fs_dereg_fd(file);
    return 0;
}
