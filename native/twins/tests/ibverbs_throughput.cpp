// A benchmark of the software twin of libibverbs. For comparison, it also measures the kernel in the same run.
//
// - Twin: RDMA WRITE and READ of 4 KiB (depth 64, in lists of 32 requests) and of 1 MiB (depth 4).
//   The target is another process or another queue pair of this process. Its memory is host memory and, with the CUDA
//   twin, device memory that is registered by a dma-buf or by its address.
// - Kernel: io_uring reads of 4 KiB at depth 64, and pread of 1 MiB, both of a cached file.
//
//     ibverbs_throughput [milliseconds of each measurement, 300] [path of libcuda.so.1 of the CUDA twin, or -]
//                        [a name from the first output column: measure only the rows with this name]
//
// GDRKIT_TWINS_LATE_US=0 turns off the random delay of completions, which would limit the rate at a given depth.
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
constexpr unsigned max_list_length = 32;

// Size of the requests, the largest number of requests in flight, and the number of requests per post call.
struct RequestShape {
    std::size_t bytes;
    unsigned depth, list_length;
};
constexpr RequestShape small_requests{small_bytes, 64, max_list_length}, large_requests{large_bytes, 4, 2};

double measure_time_ms = 300;
std::string selected_name; // measure only the rows with this name; empty: all rows

// Call `step` repeatedly for the measuring time. `step` returns the number of its operations. Return the operations per
// second.
double measure_operations_per_second(const std::function<unsigned()>& step) {
    step();
    std::uint64_t operation_count = 0;
    const auto begin = Clock::now();
    double elapsed_s = 0;
    do {
        operation_count += step();
        elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (elapsed_s * 1000 < measure_time_ms);
    return static_cast<double>(operation_count) / elapsed_s;
}

// ---- the target's memory

struct RemoteBuffer {
    std::uint64_t address;
    std::uint32_t rkey;
};

struct Target {
    QueuePairAddress address;
    RemoteBuffer buffers[3];
};
enum : unsigned { host, dmabuf, device, memory_type_count };
constexpr const char* memory_type_names[memory_type_count] = {"host memory", "dma-buf", "device address"};

void* find_symbol(void* library, const char* name) {
    void* const address = dlsym(library, name);
    CHECK(address != nullptr);
    return address;
}

// The target's memory regions: host memory and, with the CUDA twin, device memory. Device memory is registered twice,
// by a dma-buf (device_mrs[0]) and by its address (device_mrs[1]).
struct Regions {
    Buffer memory;
    ibv_mr* device_mrs[2] = {nullptr, nullptr};
    Target target{};

    Regions(Endpoint* endpoint, const char* cuda_path) : memory(endpoint->pd, memory_bytes) {
        target.address = endpoint->address();
        target.buffers[host] = {memory.address_at(), memory.mr->rkey};
        if (cuda_path == nullptr) {
            return;
        }
        using Handle = void*;
        void* const library = dlopen(cuda_path, RTLD_NOW);
        CHECK(library != nullptr);
        Handle context = nullptr;
        std::uint64_t address = 0;
        int fd = -1;
        CHECK(reinterpret_cast<int (*)(unsigned)>(find_symbol(library, "cuInit"))(0) == 0);
        CHECK(reinterpret_cast<int (*)(Handle*, int)>(find_symbol(library, "cuDevicePrimaryCtxRetain"))(&context, 0) ==
              0);
        CHECK(reinterpret_cast<int (*)(Handle)>(find_symbol(library, "cuCtxSetCurrent"))(context) == 0);
        CHECK(reinterpret_cast<int (*)(std::uint64_t*, std::size_t)>(find_symbol(library, "cuMemAlloc_v2"))(
                  &address, memory_bytes) == 0);
        CHECK(reinterpret_cast<int (*)(void*, std::uint64_t, std::size_t, int, std::uint64_t)>(find_symbol(
                  library, "cuMemGetHandleForAddressRange"))(&fd, address, memory_bytes, 1, 0) == 0); // 1: a dma-buf
        device_mrs[0] = ibv_reg_dmabuf_mr(endpoint->pd, 0, memory_bytes, address, fd, read_write_access);
        device_mrs[1] = ibv_reg_mr(endpoint->pd, reinterpret_cast<void*>(address), memory_bytes, read_write_access);
        close(fd);
        for (const unsigned memory_type : {dmabuf, device}) {
            CHECK(device_mrs[memory_type - 1] != nullptr);
            target.buffers[memory_type] = {address, device_mrs[memory_type - 1]->rkey};
        }
    }
    ~Regions() {
        for (ibv_mr* const mr : device_mrs) {
            CHECK(mr == nullptr || ibv_dereg_mr(mr) == 0);
        }
    }
};

EndpointSettings make_benchmark_settings() {
    EndpointSettings settings;
    settings.max_send_wr = 128;
    settings.cq_entries = 256;
    settings.has_channel = true;
    return settings;
}

// ---- the initiator

class Initiator {
public:
    Initiator(Endpoint* endpoint, const Target& target)
        : endpoint_(endpoint), target_(target), memory_(endpoint->pd, memory_bytes) {
        fill_pattern(memory_.bytes, memory_.size_bytes);
    }

    double measure_rate(ibv_wr_opcode opcode, unsigned memory_type, const RequestShape& shape) {
        offset_ = 0;
        const double operations_per_s = measure_operations_per_second([&] {
            while (in_flight_ + shape.list_length <= shape.depth) {
                post(opcode, target_.buffers[memory_type], shape);
            }
            const unsigned in_flight_before = in_flight_;
            while (in_flight_ + shape.list_length > shape.depth) {
                poll_completions();
            }
            return in_flight_before - in_flight_;
        });
        while (in_flight_ > 0) {
            poll_completions();
        }
        return operations_per_s;
    }

private:
    void post(ibv_wr_opcode opcode, const RemoteBuffer& buffer, const RequestShape& shape) {
        ibv_sge sges[max_list_length];
        ibv_send_wr list[max_list_length] = {};
        for (unsigned index = 0; index < shape.list_length; ++index) {
            sges[index] = memory_.sge(offset_, shape.bytes);
            list[index].opcode = opcode;
            list[index].send_flags = IBV_SEND_SIGNALED;
            list[index].sg_list = &sges[index];
            list[index].num_sge = 1;
            list[index].wr.rdma.remote_addr = buffer.address + offset_;
            list[index].wr.rdma.rkey = buffer.rkey;
            list[index].next = index + 1 < shape.list_length ? &list[index + 1] : nullptr;
            offset_ = (offset_ + shape.bytes) % (shape.bytes * shape.depth);
        }
        ibv_send_wr* bad_wr = nullptr;
        CHECK(ibv_post_send(endpoint_->qp, list, &bad_wr) == 0);
        in_flight_ += shape.list_length;
    }

    // Poll the completions that have arrived. If there are none, arm the queue, sleep until its next event and return.
    // The caller then polls again.
    void poll_completions() {
        ibv_wc wc[max_list_length];
        int count = ibv_poll_cq(endpoint_->cq, max_list_length, wc);
        if (count == 0) {
            CHECK(ibv_req_notify_cq(endpoint_->cq, 0) == 0);
            count = ibv_poll_cq(endpoint_->cq, max_list_length, wc);
            if (count == 0) {
                CHECK(is_readable(endpoint_->channel->fd, 10000));
                take_event();
                return;
            }
        }
        CHECK(count > 0);
        for (int index = 0; index < count; ++index) {
            CHECK(wc[index].status == IBV_WC_SUCCESS);
        }
        in_flight_ -= static_cast<unsigned>(count);
    }

    void take_event() {
        ibv_cq* cq = nullptr;
        void* context = nullptr;
        CHECK(ibv_get_cq_event(endpoint_->channel, &cq, &context) == 0);
        ibv_ack_cq_events(cq, 1);
    }

    Endpoint* endpoint_;
    const Target& target_;
    Buffer memory_;
    unsigned in_flight_ = 0;
    std::size_t offset_ = 0;
};

// ---- the kernel's reads of a cached file

struct CachedFile {
    Fd fd;
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
    std::size_t file_offset = 0;
    return measure_operations_per_second([&] {
        void* const to = file.memory.get() + file_offset % (large_requests.depth * large_bytes);
        CHECK(pread(file.fd.get(), to, large_bytes, static_cast<off_t>(file_offset)) ==
              static_cast<ssize_t>(large_bytes));
        file_offset = (file_offset + large_bytes) % memory_bytes;
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
        auto* const submission =
            map_ring(params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
        auto* const completion =
            map_ring(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        entries_ = reinterpret_cast<io_uring_sqe*>(map_ring(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(submission + params.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submission + params.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submission + params.sq_off.array);
        cq_head_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.head);
        cq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completion + params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(completion + params.cq_off.cqes);
    }
    explicit operator bool() const { return static_cast<bool>(fd_); }

    double measure_rate(const CachedFile& file) {
        std::size_t file_offset = 0;
        return measure_operations_per_second([&] {
            unsigned new_count = 0;
            for (; in_flight_ < depth_; ++in_flight_, ++new_count) {
                add_read(file, file_offset);
                file_offset = (file_offset + small_bytes) % memory_bytes;
            }
            CHECK(syscall(SYS_io_uring_enter, fd_.get(), new_count, max_list_length, IORING_ENTER_GETEVENTS, nullptr,
                          0) >= 0);
            return poll_completions();
        });
    }

private:
    std::uint8_t* map_ring(std::size_t size_bytes, off_t offset) const {
        void* const memory =
            mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), offset);
        CHECK(memory != MAP_FAILED);
        return static_cast<std::uint8_t*>(memory);
    }
    void add_read(const CachedFile& file, std::size_t file_offset) {
        const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = file.fd.get();
        entry.addr = reinterpret_cast<std::uint64_t>(file.memory.get() + file_offset % (depth_ * small_bytes));
        entry.len = small_bytes;
        entry.off = file_offset;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    unsigned poll_completions() {
        unsigned completion_count = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++completion_count, --in_flight_) {
            CHECK(cqes_[head & cq_mask_].res == static_cast<int>(small_bytes));
        }
        cq_head_->store(head, std::memory_order_release);
        return completion_count;
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

// The rates of the kernel. The output compares the twin with them.
struct KernelRates {
    double io_uring_per_s, pread_per_s;
};

void print_row(const char* name, const char* memory_type, double small_per_s, double large_per_s,
               const KernelRates& kernel_rates) {
    const double gib = static_cast<double>(1UL << 30);
    std::printf("%-16s %-15s %10.0f %10.2f %14.2f %7.2f\n", name, memory_type, small_per_s,
                kernel_rates.io_uring_per_s > 0 ? small_per_s / kernel_rates.io_uring_per_s : 0,
                large_per_s * large_bytes / gib, large_per_s / kernel_rates.pread_per_s);
    std::fflush(stdout);
}

void measure(const char* prefix, Endpoint* endpoint, const Target& target, const KernelRates& kernel_rates) {
    Initiator initiator(endpoint, target);
    for (unsigned memory_type = 0; memory_type < memory_type_count; ++memory_type) {
        if (target.buffers[memory_type].rkey == 0) {
            continue;
        }
        for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
            const std::string name = std::string(prefix) + (opcode == IBV_WR_RDMA_WRITE ? " WRITE" : " READ");
            if (!selected_name.empty() && selected_name != name) {
                continue;
            }
            print_row(name.c_str(), memory_type_names[memory_type],
                      initiator.measure_rate(opcode, memory_type, small_requests),
                      initiator.measure_rate(opcode, memory_type, large_requests), kernel_rates);
        }
    }
}

int run_target(int socket, const char* cuda_path) {
    Endpoint endpoint(1, make_benchmark_settings());
    Regions regions(&endpoint, cuda_path);
    QueuePairAddress peer{};
    CHECK(send_all(socket, &regions.target, sizeof regions.target) && recv_all(socket, &peer, sizeof peer));
    endpoint.connect(peer);
    // The initiator waits for this token before it measures, and sends the token back when it has ended.
    char token = 'r';
    CHECK(send_all(socket, &token, 1));
    return recv_all(socket, &token, 1) ? 0 : 1;
}

void measure_two_processes(const char* cuda_path, const KernelRates& kernel_rates) {
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    const Fd parent_socket(sockets[0]);
    Fd child_socket(dup(sockets[1]));
    close(sockets[1]);
    std::string program = "ibverbs_throughput", mode = "target", socket_text = std::to_string(child_socket.get());
    std::string path = cuda_path == nullptr ? "" : cuda_path;
    char* arguments[] = {program.data(), mode.data(), socket_text.data(), cuda_path == nullptr ? nullptr : path.data(),
                         nullptr};
    pid_t pid = 0;
    CHECK(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ) == 0);
    child_socket.reset();
    {
        Endpoint endpoint(0, make_benchmark_settings());
        Target target{};
        const QueuePairAddress address = endpoint.address();
        char token = 0;
        CHECK(recv_all(parent_socket.get(), &target, sizeof target) &&
              send_all(parent_socket.get(), &address, sizeof address) && recv_all(parent_socket.get(), &token, 1));
        endpoint.connect(target.address);
        measure("process", &endpoint, target, kernel_rates);
        CHECK(send_all(parent_socket.get(), &token, 1));
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void measure_one_process(const char* cuda_path, const KernelRates& kernel_rates) {
    Endpoint endpoint(0, make_benchmark_settings()), target_endpoint(1, make_benchmark_settings());
    Regions regions(&target_endpoint, cuda_path);
    connect(&endpoint, &target_endpoint);
    measure("loopback", &endpoint, regions.target, kernel_rates);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 2 && std::strcmp(arguments[1], "target") == 0) {
        return run_target(std::atoi(arguments[2]), argument_count > 3 ? arguments[3] : nullptr);
    }
    measure_time_ms = argument_count > 1 ? std::atof(arguments[1]) : measure_time_ms;
    const char* const cuda_path = argument_count > 2 && std::strcmp(arguments[2], "-") != 0 ? arguments[2] : nullptr;
    selected_name = argument_count > 3 ? arguments[3] : "";
    const CachedFile file;
    Ring ring(small_requests.depth);
    const KernelRates kernel_rates{ring ? ring.measure_rate(file) : 0, measure_pread(file)};
    std::printf("%-16s %-15s %10s %10s %14s %7s\n", "", "", "4 KiB op/s", "x io_uring", "1 MiB: GiB/s", "x pread");
    print_row("file", ring ? "io_uring, pread" : "pread", kernel_rates.io_uring_per_s, kernel_rates.pread_per_s,
              kernel_rates);
    measure_two_processes(cuda_path, kernel_rates);
    measure_one_process(cuda_path, kernel_rates);
    return 0;
}
