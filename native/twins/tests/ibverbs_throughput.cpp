// A benchmark of the verbs twin and, for comparison, of the kernel in the same run: RDMA WRITE and READ of 4 KiB at
// depth 64 in post lists of 32 and of 1 MiB at depth 4, into host memory and (with the CUDA twin) into device memory by
// a dma-buf and by its address, to another process and to a queue pair of this one; io_uring reads of 4 KiB at depth 64
// and pread of 1 MiB of a cached file.
//
//     ibverbs_throughput [milliseconds of each measurement, 300] [path of libcuda.so.1 of the CUDA twin, or -]
//                        [a name from the first output column: run only these]
//
// GDRKIT_TWINS_LATE_US=0 turns off the random delay of completions, which otherwise limits the rate at a given depth.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "model/sockets.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t small_bytes = 4096, large_bytes = 1UL << 20;
constexpr std::size_t memory_bytes = 16UL << 20;
constexpr unsigned max_list = 32;

struct Shape {
    std::size_t bytes;
    unsigned depth, list;
};
constexpr Shape small{small_bytes, 64, max_list}, large{large_bytes, 4, 2};

double measure_ms = 300;
std::string only;

// Run `step` for the measuring time and return operations per second; `step` returns the number of its operations.
double operations_per_second(const std::function<unsigned()>& step) {
    step();
    std::uint64_t done = 0;
    const auto begin = Clock::now();
    double passed_s = 0;
    do {
        done += step();
        passed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (passed_s * 1000 < measure_ms);
    return static_cast<double>(done) / passed_s;
}

// ---- the target's memory

struct RemoteBuffer {
    std::uint64_t address;
    std::uint32_t rkey;
};

struct Target {
    Address address;
    RemoteBuffer buffers[3];
};
enum : unsigned { host, dmabuf, device, place_count };
constexpr const char* place_names[place_count] = {"host memory", "dma-buf", "device address"};

void* symbol(void* library, const char* name) {
    void* const found = dlsym(library, name);
    CHECK(found != nullptr);
    return found;
}

struct Regions {
    Buffer memory;
    ibv_mr* device_mrs[2] = {nullptr, nullptr};
    Target target{};

    Regions(Endpoint* side, const char* cuda) : memory(side->pd, memory_bytes) {
        target.address = side->address();
        target.buffers[host] = {memory.at(), memory.mr->rkey};
        if (cuda == nullptr) {
            return;
        }
        using Handle = void*;
        void* const library = dlopen(cuda, RTLD_NOW);
        CHECK(library != nullptr);
        Handle context = nullptr;
        std::uint64_t address = 0;
        int fd = -1;
        CHECK(reinterpret_cast<int (*)(unsigned)>(symbol(library, "cuInit"))(0) == 0);
        CHECK(reinterpret_cast<int (*)(Handle*, int)>(symbol(library, "cuDevicePrimaryCtxRetain"))(&context, 0) == 0);
        CHECK(reinterpret_cast<int (*)(Handle)>(symbol(library, "cuCtxSetCurrent"))(context) == 0);
        CHECK(reinterpret_cast<int (*)(std::uint64_t*, std::size_t)>(symbol(library, "cuMemAlloc_v2"))(
                  &address, memory_bytes) == 0);
        CHECK(reinterpret_cast<int (*)(void*, std::uint64_t, std::size_t, int, std::uint64_t)>(
                  symbol(library, "cuMemGetHandleForAddressRange"))(&fd, address, memory_bytes, 1, 0) == 0);
        device_mrs[0] = ibv_reg_dmabuf_mr(side->pd, 0, memory_bytes, address, fd, all_access);
        device_mrs[1] = ibv_reg_mr(side->pd, reinterpret_cast<void*>(address), memory_bytes, all_access);
        close(fd);
        for (const unsigned buffer : {dmabuf, device}) {
            CHECK(device_mrs[buffer - 1] != nullptr);
            target.buffers[buffer] = {address, device_mrs[buffer - 1]->rkey};
        }
    }
    ~Regions() {
        for (ibv_mr* const mr : device_mrs) {
            CHECK(mr == nullptr || ibv_dereg_mr(mr) == 0);
        }
    }
};

Settings settings() {
    Settings chosen;
    chosen.send_wr = 128;
    chosen.completions = 256;
    chosen.channel = true;
    return chosen;
}

// ---- the initiator

class Initiator {
public:
    Initiator(Endpoint* side, const Target& target) : side_(side), target_(target), memory_(side->pd, memory_bytes) {
        fill_pattern(memory_.bytes, memory_.size);
    }

    double operations_per_s(ibv_wr_opcode opcode, unsigned buffer, const Shape& shape) {
        at_ = 0;
        const double result = operations_per_second([&] {
            while (in_flight_ + shape.list <= shape.depth) {
                post(opcode, target_.buffers[buffer], shape);
            }
            const unsigned before = in_flight_;
            while (in_flight_ + shape.list > shape.depth) {
                poll_completions();
            }
            return before - in_flight_;
        });
        while (in_flight_ > 0) {
            poll_completions();
        }
        return result;
    }

private:
    void post(ibv_wr_opcode opcode, const RemoteBuffer& buffer, const Shape& shape) {
        ibv_sge sges[max_list];
        ibv_send_wr list[max_list] = {};
        for (unsigned index = 0; index < shape.list; ++index) {
            sges[index] = memory_.part(at_, shape.bytes);
            list[index].opcode = opcode;
            list[index].send_flags = IBV_SEND_SIGNALED;
            list[index].sg_list = &sges[index];
            list[index].num_sge = 1;
            list[index].wr.rdma.remote_addr = buffer.address + at_;
            list[index].wr.rdma.rkey = buffer.rkey;
            list[index].next = index + 1 < shape.list ? &list[index + 1] : nullptr;
            at_ = (at_ + shape.bytes) % (shape.bytes * shape.depth);
        }
        ibv_send_wr* bad = nullptr;
        CHECK(ibv_post_send(side_->qp, list, &bad) == 0);
        in_flight_ += shape.list;
    }

    // Poll at least one completion; sleep on the completion channel while there is none.
    void poll_completions() {
        ibv_wc wc[max_list];
        int count = ibv_poll_cq(side_->cq, max_list, wc);
        if (count == 0) {
            CHECK(ibv_req_notify_cq(side_->cq, 0) == 0);
            count = ibv_poll_cq(side_->cq, max_list, wc);
            if (count == 0) {
                CHECK(readable(side_->channel->fd, 10000));
                wait_event();
                return;
            }
        }
        CHECK(count > 0);
        for (int index = 0; index < count; ++index) {
            CHECK(wc[index].status == IBV_WC_SUCCESS);
        }
        in_flight_ -= static_cast<unsigned>(count);
    }

    void wait_event() {
        ibv_cq* cq = nullptr;
        void* context = nullptr;
        CHECK(ibv_get_cq_event(side_->channel, &cq, &context) == 0);
        ibv_ack_cq_events(cq, 1);
    }

    Endpoint* side_;
    const Target& target_;
    Buffer memory_;
    unsigned in_flight_ = 0;
    std::size_t at_ = 0;
};

// ---- the kernel's reads of a cached file

struct CachedFile {
    Fd fd;
    Buffer* none = nullptr;
    std::unique_ptr<std::uint8_t[]> memory = std::make_unique<std::uint8_t[]>(memory_bytes);

    CachedFile() {
        char path[] = "./ibverbs_throughput.XXXXXX";
        fd = Fd(mkstemp(path));
        CHECK(fd);
        unlink(path);
        std::memset(memory.get(), 1, memory_bytes);
        CHECK(write(fd.get(), memory.get(), memory_bytes) == static_cast<ssize_t>(memory_bytes));
    }
};

double measure_pread(const CachedFile& file) {
    std::size_t at = 0;
    return operations_per_second([&] {
        void* const to = file.memory.get() + at % (large.depth * large_bytes);
        CHECK(pread(file.fd.get(), to, large_bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(large_bytes));
        at = (at + large_bytes) % memory_bytes;
        return 1U;
    });
}

// An io_uring without liburing: the kernel advances the head of the submission queue and the tail of the completion
// queue.
class Ring {
public:
    explicit Ring(unsigned depth) : depth_(depth) {
        io_uring_params params{};
        fd_ = Fd(static_cast<int>(syscall(SYS_io_uring_setup, depth, &params)));
        if (!fd_) {
            return;
        }
        auto* const submission = map(params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
        auto* const completion = map(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        entries_ = reinterpret_cast<io_uring_sqe*>(map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(submission + params.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submission + params.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submission + params.sq_off.array);
        cq_head_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.head);
        cq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completion + params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(completion + params.cq_off.cqes);
    }
    explicit operator bool() const { return static_cast<bool>(fd_); }

    double reads_per_s(const CachedFile& file) {
        std::size_t at = 0;
        return operations_per_second([&] {
            unsigned fresh = 0;
            for (; in_flight_ < depth_; ++in_flight_, ++fresh) {
                add(file, at);
                at = (at + small_bytes) % memory_bytes;
            }
            CHECK(syscall(SYS_io_uring_enter, fd_.get(), fresh, max_list, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0);
            return poll_completions();
        });
    }

private:
    std::uint8_t* map(std::size_t size, off_t offset) const {
        void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), offset);
        CHECK(memory != MAP_FAILED);
        return static_cast<std::uint8_t*>(memory);
    }
    void add(const CachedFile& file, std::size_t at) {
        const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = file.fd.get();
        entry.addr = reinterpret_cast<std::uint64_t>(file.memory.get() + at % (depth_ * small_bytes));
        entry.len = small_bytes;
        entry.off = at;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    unsigned poll_completions() {
        unsigned done = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++done, --in_flight_) {
            CHECK(cqes_[head & cq_mask_].res == static_cast<int>(small_bytes));
        }
        cq_head_->store(head, std::memory_order_release);
        return done;
    }

    const unsigned depth_;
    unsigned in_flight_ = 0;
    Fd fd_;
    io_uring_sqe* entries_ = nullptr;
    std::atomic<unsigned>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

// ---- the runs

struct Peers {
    double reads_per_s, preads_per_s;
};

void print(const char* name, const char* where, double small_per_s, double large_per_s, const Peers& peers) {
    const double gib = static_cast<double>(1UL << 30);
    std::printf("%-16s %-15s %10.0f %6.2f %14.2f %6.2f\n", name, where, small_per_s,
                peers.reads_per_s > 0 ? small_per_s / peers.reads_per_s : 0, large_per_s * large_bytes / gib,
                large_per_s / peers.preads_per_s);
    std::fflush(stdout);
}

void measure(const char* prefix, Endpoint* side, const Target& target, const Peers& peers) {
    Initiator initiator(side, target);
    for (unsigned buffer = 0; buffer < place_count; ++buffer) {
        if (target.buffers[buffer].rkey == 0) {
            continue;
        }
        for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
            const std::string name = std::string(prefix) + (opcode == IBV_WR_RDMA_WRITE ? " WRITE" : " READ");
            if (!only.empty() && only != name) {
                continue;
            }
            print(name.c_str(), place_names[buffer], initiator.operations_per_s(opcode, buffer, small),
                  initiator.operations_per_s(opcode, buffer, large), peers);
        }
    }
}

int run_target(int socket, const char* cuda) {
    Endpoint side(1, settings());
    Regions regions(&side, cuda);
    Address peer{};
    CHECK(send_all(socket, &regions.target, sizeof regions.target) && recv_all(socket, &peer, sizeof peer));
    side.connect(peer);
    char end = 'r';
    CHECK(send_all(socket, &end, 1));
    return recv_all(socket, &end, 1) ? 0 : 1;
}

void two_processes(const char* cuda, const Peers& peers) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const Fd own(ends[0]);
    Fd given(dup(ends[1]));
    close(ends[1]);
    std::string self = "ibverbs_throughput", mode = "target", number = std::to_string(given.get());
    std::string path = cuda == nullptr ? "" : cuda;
    char* arguments[] = {self.data(), mode.data(), number.data(), cuda == nullptr ? nullptr : path.data(), nullptr};
    pid_t pid = 0;
    CHECK(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ) == 0);
    given.reset();
    {
        Endpoint side(0, settings());
        Target target{};
        const Address address = side.address();
        char ready = 0;
        CHECK(recv_all(own.get(), &target, sizeof target) && send_all(own.get(), &address, sizeof address) &&
              recv_all(own.get(), &ready, 1));
        side.connect(target.address);
        measure("process", &side, target, peers);
        CHECK(send_all(own.get(), &ready, 1));
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void one_process(const char* cuda, const Peers& peers) {
    Endpoint side(0, settings()), other(1, settings());
    Regions regions(&other, cuda);
    connect(&side, &other);
    measure("loopback", &side, regions.target, peers);
}

} // namespace

int main(int count, char** arguments) {
    use_own_domain();
    if (count > 2 && std::strcmp(arguments[1], "target") == 0) {
        return run_target(std::atoi(arguments[2]), count > 3 ? arguments[3] : nullptr);
    }
    measure_ms = count > 1 ? std::atof(arguments[1]) : measure_ms;
    const char* const cuda = count > 2 && std::strcmp(arguments[2], "-") != 0 ? arguments[2] : nullptr;
    only = count > 3 ? arguments[3] : "";
    const CachedFile file;
    Ring ring(small.depth);
    const Peers peers{ring ? ring.reads_per_s(file) : 0, measure_pread(file)};
    std::printf("%-16s %-15s %10s %6s %14s %6s\n", "", "", "4 KiB op/s", "x ring", "1 MiB: GiB/s", "x pread");
    print("file", ring ? "io_uring, pread" : "pread", peers.reads_per_s, peers.preads_per_s, peers);
    two_processes(cuda, peers);
    one_process(cuda, peers);
    return 0;
}
