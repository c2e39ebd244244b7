// How fast reads go through ring, agent, server and NIC, beside what the kernel does with the same cached file in the
// same run: 4 KiB at random places at depth 64 beside io_uring, 1 MiB in a row at depth 8 beside one thread's pread,
// and both beside the copies of the path alone. All of them read into as much memory as the path does.
// They take turns, round by round, so that what else the machine does meets all.
//
//     path_bench MOUNT FILE [--kind host|device] [--rounds 5] [--ms 200] [--only TURN]
//                [--cores N,N] [--pid NAME=PID]...
//
// Each turn is a line of JSON on standard output. `cpu_s` is the processor time of this process and of those that were
// named: it says what an operation costs also where others use the processors. What the last reads of each turn brought
// is compared with the file, every byte. The copies alone have two threads, which run on the cores that are named;
// without these there is no such turn.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "bare_copies.hpp"
#include "hf3fs_usrbio.h"
#include "path_peers.hpp"

namespace {

using namespace gdrkit::usrbio::bench;
using Clock = std::chrono::steady_clock;

constexpr std::size_t page_bytes = 4096, small_bytes = 4096, large_bytes = 1UL << 20;
constexpr unsigned small_depth = 64, large_depth = 8;
// Twice what is in flight: completions may overtake each other, and then a place is free later than its operation ends.
constexpr int ring_entries = 128;

struct Asked {
    std::string mount, file, kind = "host", only;
    int rounds = 5;
    double turn_ms = 200;
    std::vector<int> cores;
    std::vector<std::pair<std::string, int>> processes;
};

void check(const char* what, long result) {
    if (result != 0) {
        errno = static_cast<int>(result < 0 ? -result : result);
        give_up(what);
    }
}

// The CUDA driver, of which this needs two functions; device memory is read back by them.
struct Cuda {
    int (*copy)(void*, std::uint64_t, std::size_t) = nullptr;

    Cuda() {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        copy = library == nullptr
                   ? nullptr
                   : reinterpret_cast<int (*)(void*, std::uint64_t, std::size_t)>(dlsym(library, "cuMemcpyDtoH_v2"));
        const auto init = library == nullptr ? nullptr : reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
        const auto retain = library == nullptr
                                ? nullptr
                                : reinterpret_cast<int (*)(void**, int)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
        const auto set =
            library == nullptr ? nullptr : reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
        void* context = nullptr;
        if (copy == nullptr || init == nullptr || retain == nullptr || set == nullptr || init(0) != 0 ||
            retain(&context, 0) != 0 || set(context) != 0) {
            std::fprintf(stderr, "path_bench: no CUDA driver, or no device\n");
            std::exit(1);
        }
    }
};

// Of all threads that the process has now, in seconds.
double cpu_of(int process) {
    double seconds = 0;
    std::error_code gone;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", gone)) {
        std::uint64_t ran_ns = 0;
        std::ifstream(task.path() / "schedstat") >> ran_ns;
        seconds += static_cast<double>(ran_ns) * 1e-9;
    }
    return seconds;
}

double own_cpu() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto of = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return of(used.ru_utime) + of(used.ru_stime);
}

// One turn: what was done again and again, how often, for how long, and what that cost whom.
template <typename Step, typename End>
void turn(const Asked& asked, const char* name, int round, std::size_t bytes, Step step, End end) {
    if (!asked.only.empty() && asked.only != name) {
        return;
    }
    step();
    std::vector<double> before;
    for (const auto& [who, process] : asked.processes) {
        before.push_back(cpu_of(process));
    }
    const double own = own_cpu();
    const auto begin = Clock::now();
    std::uint64_t done = 0;
    double passed_s = 0;
    do {
        done += step();
        passed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (passed_s * 1000 < asked.turn_ms);
    done += end();
    passed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("{\"turn\": \"%s\", \"round\": %d, \"bytes\": %zu, \"operations\": %llu, \"passed_s\": %.6f, "
                "\"cpu_s\": {\"client\": %.6f",
                name, round, bytes, static_cast<unsigned long long>(done), passed_s, own_cpu() - own);
    for (std::size_t index = 0; index < before.size(); ++index) {
        const auto& [who, process] = asked.processes[index];
        std::printf(", \"%s\": %.6f", who.c_str(), cpu_of(process) - before[index]);
    }
    std::printf("}}\n");
    std::fflush(stdout);
}

// Reads of one size through the path.
class PathReads {
public:
    PathReads(const Asked& asked, const Cuda* cuda, int file, unsigned depth, std::size_t bytes)
        : cuda_(cuda), file_(file), depth_(depth), bytes_(bytes), offsets_(depth) {
        const char* const mount = asked.mount.c_str();
        check("make the iov", cuda != nullptr ? hf3fs_iovcreate_gpu(&iov_, mount, depth * bytes, 0, 0)
                                              : hf3fs_iovcreate(&iov_, mount, depth * bytes, 0, -1));
        check("hf3fs_iorcreate", hf3fs_iorcreate(&ior_, mount, ring_entries, true, 0, -1));
        for (unsigned slot = 0; slot < depth; ++slot) {
            free_.push_back(slot);
        }
    }
    ~PathReads() {
        hf3fs_iordestroy(&ior_);
        cuda_ != nullptr ? hf3fs_iovdestroy_gpu(&iov_) : hf3fs_iovdestroy(&iov_);
    }
    PathReads(const PathReads&) = delete;
    PathReads& operator=(const PathReads&) = delete;

    template <typename Next> unsigned step(unsigned least, Next next) {
        began_ = true;
        while (!free_.empty()) {
            const unsigned slot = free_.back();
            free_.pop_back();
            offsets_[slot] = next();
            const int index = hf3fs_prep_io(&ior_, &iov_, true, iov_.base + slot * bytes_, file_, offsets_[slot],
                                            bytes_, reinterpret_cast<const void*>(std::uintptr_t{slot}));
            check("hf3fs_prep_io", std::min(index, 0));
        }
        check("hf3fs_submit_ios", hf3fs_submit_ios(&ior_));
        return reap(least);
    }
    unsigned drain() {
        unsigned done = 0;
        while (free_.size() != depth_) {
            done += reap(static_cast<unsigned>(depth_ - free_.size()));
        }
        return done;
    }
    // The last read of every slot.
    void compare() const {
        if (!began_) {
            return;
        }
        std::vector<std::uint8_t> here(bytes_), there(bytes_);
        for (unsigned slot = 0; slot < depth_; ++slot) {
            const std::uint8_t* got = iov_.base + slot * bytes_;
            if (cuda_ != nullptr) {
                check("cuMemcpyDtoH", cuda_->copy(here.data(), reinterpret_cast<std::uintptr_t>(got), bytes_));
                got = here.data();
            }
            const auto count =
                static_cast<std::size_t>(pread(file_, there.data(), bytes_, static_cast<off_t>(offsets_[slot])));
            if (count != bytes_ || std::memcmp(got, there.data(), bytes_) != 0) {
                std::fprintf(stderr, "path_bench: a read brought other bytes than the file has\n");
                std::exit(1);
            }
        }
    }

private:
    unsigned reap(unsigned least) {
        hf3fs_cqe cqes[ring_entries];
        const int count = hf3fs_wait_for_ios(&ior_, cqes, ring_entries, static_cast<int>(least), nullptr);
        check("hf3fs_wait_for_ios", std::min(count, 0));
        for (int index = 0; index < count; ++index) {
            if (cqes[index].result != static_cast<std::int64_t>(bytes_)) {
                std::fprintf(stderr, "path_bench: a read answered %lld\n", static_cast<long long>(cqes[index].result));
                std::exit(1);
            }
            free_.push_back(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(cqes[index].userdata)));
        }
        return static_cast<unsigned>(count);
    }

    const Cuda* const cuda_;
    const int file_;
    const unsigned depth_;
    const std::size_t bytes_;
    std::vector<std::uint64_t> offsets_;
    std::vector<unsigned> free_;
    hf3fs_iov iov_{};
    hf3fs_ior ior_{};
    bool began_ = false;
};

void measure(const Asked& asked, int file, std::uint64_t size) {
    std::unique_ptr<Cuda> cuda;
    if (asked.kind == "device") {
        cuda = std::make_unique<Cuda>();
    }
    PathReads small(asked, cuda.get(), file, small_depth, small_bytes);
    PathReads large(asked, cuda.get(), file, large_depth, large_bytes);
    UringReads uring(file, small_depth, small_bytes);
    BareCopies bare_small(file, small_depth, small_bytes, asked.cores);
    BareCopies bare_large(file, large_depth, large_bytes, asked.cores);
    // On a page: some processors' `rep movsb` is several times slower where only one side lies on one.
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(page_bytes, large_depth * large_bytes),
                                                             &std::free);
    unsigned place = 0;
    std::minstd_rand chance(1);
    std::uniform_int_distribution<std::uint64_t> places(0, size / small_bytes - 1);
    std::uint64_t at = 0;
    const auto anywhere = [&] { return places(chance) * small_bytes; };
    const auto in_a_row = [&] { return std::exchange(at, at + 2 * large_bytes > size ? 0 : at + large_bytes); };
    const auto nothing = [] { return 0U; };
    for (int round = 0; round < asked.rounds; ++round) {
        const auto preads = [&] {
            auto* const into = static_cast<std::uint8_t*>(memory.get()) + place++ % large_depth * large_bytes;
            if (pread(file, into, large_bytes, static_cast<off_t>(in_a_row())) != ssize_t{large_bytes}) {
                give_up("pread");
            }
            return 1U;
        };
        turn(asked, "pread", round, large_bytes, preads, nothing);
        turn(
            asked, "path_large", round, large_bytes, [&] { return large.step(large_depth / 2, in_a_row); },
            [&] { return large.drain(); });
        large.compare();
        if (bare_large.is_there()) {
            turn(
                asked, "bare_large", round, large_bytes, [&] { return bare_large.step(in_a_row); },
                [&] { return bare_large.end(); });
            bare_large.compare();
        }
        if (uring.is_there()) {
            turn(
                asked, "io_uring", round, small_bytes, [&] { return uring.step(small_depth / 2, anywhere); },
                [&] { return uring.drain(); });
        }
        turn(
            asked, "path_small", round, small_bytes, [&] { return small.step(small_depth / 2, anywhere); },
            [&] { return small.drain(); });
        small.compare();
        if (bare_small.is_there()) {
            turn(
                asked, "bare_small", round, small_bytes, [&] { return bare_small.step(anywhere); },
                [&] { return bare_small.end(); });
            bare_small.compare();
        }
    }
}

} // namespace

int main(int count, char** arguments) {
    if (count < 3 || count % 2 == 0) {
        std::fprintf(stderr, "usage: path_bench MOUNT FILE [--kind host|device] [--rounds N] [--ms N] "
                             "[--only TURN] [--cores N,N] [--pid NAME=PID]...\n");
        return 2;
    }
    Asked asked;
    asked.mount = arguments[1];
    asked.file = arguments[2];
    for (int index = 3; index < count; index += 2) {
        const std::string option = arguments[index], value = arguments[index + 1];
        if (option == "--kind") {
            asked.kind = value;
        } else if (option == "--rounds") {
            asked.rounds = std::atoi(value.c_str());
        } else if (option == "--ms") {
            asked.turn_ms = std::atof(value.c_str());
        } else if (option == "--only") {
            asked.only = value;
        } else if (option == "--cores") {
            const std::size_t middle = value.find(',');
            if (middle == std::string::npos) {
                std::fprintf(stderr, "path_bench: --cores wants two numbers, as 0,1\n");
                return 2;
            }
            asked.cores = {std::atoi(value.c_str()), std::atoi(value.c_str() + middle + 1)};
        } else if (option == "--pid") {
            const std::size_t middle = value.find('=');
            asked.processes.emplace_back(value.substr(0, middle), std::atoi(value.c_str() + middle + 1));
        } else {
            std::fprintf(stderr, "path_bench: there is no option %s\n", option.c_str());
            return 2;
        }
    }
    const int file = open(asked.file.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found {};
    if (file < 0 || fstat(file, &found) != 0) {
        give_up(asked.file.c_str());
    }
    if (static_cast<std::size_t>(found.st_size) < large_bytes * large_depth) {
        std::fprintf(stderr, "path_bench: %s has fewer bytes than are in flight\n", asked.file.c_str());
        return 1;
    }
    check("hf3fs_reg_fd", std::max(hf3fs_reg_fd(file, 0), 0));
    measure(asked, file, static_cast<std::uint64_t>(found.st_size));
    hf3fs_dereg_fd(file);
    return 0;
}
