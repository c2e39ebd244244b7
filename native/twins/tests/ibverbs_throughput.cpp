// A benchmark of the software twin of libibverbs. For comparison, it also measures the kernel in the same run.
//
// - Twin: RDMA WRITE and READ of 4 KiB (64 requests in flight, in lists of 32) and of 1 MiB (4 requests in flight, in
//   lists of 2). The initiator posts the requests. The target, which owns the remote memory, is another process or
//   another queue pair of this process. This memory is host memory and, with the CUDA twin, device memory that is
//   registered by a dma-buf or by its address.
// - Kernel: io_uring reads of 4 KiB with 64 reads in flight, and pread of 1 MiB, both of a file in the page cache.
//
//     ibverbs_throughput [MILLISECONDS] [CUDA_PATH or -] [ROW_NAME]
//
// Each measurement takes MILLISECONDS (default 300). CUDA_PATH is the path of libcuda.so.1 of the CUDA twin. With
// ROW_NAME, the benchmark measures the twin only for the rows with this name in the first column of the output.
//
// Set GDRKIT_TWINS_LATE_US=0 to measure. Else random delays of the completions limit the rate.
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
constexpr std::size_t memory_bytes = 16UL << 20; // size of each memory region and of the file
constexpr unsigned max_list_length = 32;

// The requests of a measurement have `size_bytes` bytes each. At most `depth` requests are in flight, and each call of
// ibv_post_send posts `list_length` requests.
struct RequestShape {
    std::size_t size_bytes;
    unsigned depth, list_length;
};
constexpr RequestShape small_requests{small_bytes, 64, max_list_length}, large_requests{large_bytes, 4, 2};

double measure_time_ms = 300;
std::string selected_row_name; // if not empty, the twin is measured only for the rows with this name

// Call `step`, which returns the number of its completed operations, until the measuring time has passed. Return the
// operations per second.
double measure_operations_per_second(const std::function<unsigned()>& step) {
    step(); // warm-up, not counted
    std::uint64_t operation_count = 0;
    const auto begin_time = Clock::now();
    double elapsed_s = 0;
    do {
        operation_count += step();
        elapsed_s = std::chrono::duration<double>(Clock::now() - begin_time).count();
    } while (elapsed_s * 1000 < measure_time_ms);
    return static_cast<double>(operation_count) / elapsed_s;
}

// ---- the target's memory

struct RemoteBuffer {
    std::uint64_t address;
    std::uint32_t rkey;
};

// The data about the target that the initiator needs. The indices of `buffers` are the memory types below. The rkey is
// 0 if the target has no memory of this type.
struct Target {
    QueuePairAddress qp_address;
    RemoteBuffer buffers[3];
};
// The memory types: host memory, device memory registered by a dma-buf, and device memory registered by its address.
enum : unsigned { host, dmabuf, device, memory_type_count };
constexpr const char* memory_type_names[memory_type_count] = {"host memory", "dma-buf", "device address"};

void* find_symbol(void* library, const char* name) {
    void* const address = dlsym(library, name);
    CHECK(address != nullptr);
    return address;
}

// The target's memory regions: host memory and, with the CUDA twin, device memory. The same device memory is registered
// twice, by a dma-buf (device_mrs[0]) and by its address (device_mrs[1]).
struct Regions {
    Buffer host_memory;
    ibv_mr* device_mrs[2] = {nullptr, nullptr};
    Target target{};

    Regions(Endpoint* endpoint, const char* cuda_path) : host_memory(endpoint->pd, memory_bytes) {
        target.qp_address = endpoint->address();
        target.buffers[host] = {host_memory.address_at(), host_memory.mr->rkey};
        if (cuda_path == nullptr) {
            return;
        }
        using CudaContext = void*;
        void* const cuda_library = dlopen(cuda_path, RTLD_NOW);
        CHECK(cuda_library != nullptr);
        CudaContext context = nullptr;
        std::uint64_t device_address = 0;
        int dmabuf_fd = -1;
        // Each CUDA function returns 0 (CUDA_SUCCESS).
        CHECK(reinterpret_cast<int (*)(unsigned)>(find_symbol(cuda_library, "cuInit"))(0) == 0);
        CHECK(reinterpret_cast<int (*)(CudaContext*, int)>(find_symbol(cuda_library, "cuDevicePrimaryCtxRetain"))(
                  &context, 0) == 0);
        CHECK(reinterpret_cast<int (*)(CudaContext)>(find_symbol(cuda_library, "cuCtxSetCurrent"))(context) == 0);
        CHECK(reinterpret_cast<int (*)(std::uint64_t*, std::size_t)>(find_symbol(cuda_library, "cuMemAlloc_v2"))(
                  &device_address, memory_bytes) == 0);
        constexpr int dmabuf_handle_type = 1; // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        CHECK(reinterpret_cast<int (*)(void*, std::uint64_t, std::size_t, int, std::uint64_t)>(
                  find_symbol(cuda_library, "cuMemGetHandleForAddressRange"))(&dmabuf_fd, device_address, memory_bytes,
                                                                              dmabuf_handle_type, 0) == 0);
        device_mrs[0] = ibv_reg_dmabuf_mr(endpoint->pd, 0, memory_bytes, device_address, dmabuf_fd, read_write_access);
        device_mrs[1] =
            ibv_reg_mr(endpoint->pd, reinterpret_cast<void*>(device_address), memory_bytes, read_write_access);
        close(dmabuf_fd);
        for (const unsigned memory_type : {dmabuf, device}) {
            CHECK(device_mrs[memory_type - 1] != nullptr);
            target.buffers[memory_type] = {device_address, device_mrs[memory_type - 1]->rkey};
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

// Posts the requests of the measurements. A request uses the same offset in the local and in the remote memory.
class Initiator {
public:
    Initiator(Endpoint* endpoint, const Target& target)
        : endpoint_(endpoint), target_(target), local_memory_(endpoint->pd, memory_bytes) {
        fill_pattern(local_memory_.bytes, local_memory_.size_bytes);
    }

    // Return the requests per second. Post lists until `depth` requests are in flight, and wait until one more list
    // fits.
    double measure_rate(ibv_wr_opcode opcode, unsigned memory_type, const RequestShape& shape) {
        offset_ = 0;
        const double operations_per_s = measure_operations_per_second([&] {
            while (in_flight_count_ + shape.list_length <= shape.depth) {
                post(opcode, target_.buffers[memory_type], shape);
            }
            const unsigned in_flight_before = in_flight_count_;
            while (in_flight_count_ + shape.list_length > shape.depth) {
                poll_completions();
            }
            return in_flight_before - in_flight_count_;
        });
        while (in_flight_count_ > 0) {
            poll_completions();
        }
        return operations_per_s;
    }

private:
    void post(ibv_wr_opcode opcode, const RemoteBuffer& remote_buffer, const RequestShape& shape) {
        ibv_sge sges[max_list_length];
        ibv_send_wr requests[max_list_length] = {};
        for (unsigned index = 0; index < shape.list_length; ++index) {
            sges[index] = local_memory_.sge(offset_, shape.size_bytes);
            requests[index].opcode = opcode;
            requests[index].send_flags = IBV_SEND_SIGNALED;
            requests[index].sg_list = &sges[index];
            requests[index].num_sge = 1;
            requests[index].wr.rdma.remote_addr = remote_buffer.address + offset_;
            requests[index].wr.rdma.rkey = remote_buffer.rkey;
            requests[index].next = index + 1 < shape.list_length ? &requests[index + 1] : nullptr;
            offset_ = (offset_ + shape.size_bytes) % (shape.size_bytes * shape.depth);
        }
        ibv_send_wr* bad_wr = nullptr;
        CHECK(ibv_post_send(endpoint_->qp, requests, &bad_wr) == 0);
        in_flight_count_ += shape.list_length;
    }

    // Poll the completions that have arrived. If there are none, request an event of the completion queue, sleep until
    // the event arrives, and return. The caller then polls again.
    void poll_completions() {
        ibv_wc wc[max_list_length];
        int count = ibv_poll_cq(endpoint_->cq, max_list_length, wc);
        if (count == 0) {
            CHECK(ibv_req_notify_cq(endpoint_->cq, 0) == 0);
            // A completion that arrived between the poll and the arming raises no event, so poll again.
            count = ibv_poll_cq(endpoint_->cq, max_list_length, wc);
            if (count == 0) {
                CHECK(is_readable(endpoint_->channel->fd, 10000));
                take_completion_event();
                return;
            }
        }
        CHECK(count > 0);
        for (int index = 0; index < count; ++index) {
            CHECK(wc[index].status == IBV_WC_SUCCESS);
        }
        in_flight_count_ -= static_cast<unsigned>(count);
    }

    void take_completion_event() {
        ibv_cq* cq = nullptr;
        void* cq_context = nullptr;
        CHECK(ibv_get_cq_event(endpoint_->channel, &cq, &cq_context) == 0);
        ibv_ack_cq_events(cq, 1);
    }

    Endpoint* endpoint_;
    const Target& target_;
    Buffer local_memory_;
    unsigned in_flight_count_ = 0; // number of posted requests whose completions are not polled
    std::size_t offset_ = 0;       // offset of the next request in the local and in the remote memory
};

// ---- the kernel's reads of a cached file

// A file that is in the page cache, because it was just written, and the memory into which it is read.
struct CachedFile {
    Fd fd;
    std::unique_ptr<std::uint8_t[]> read_buffer = std::make_unique<std::uint8_t[]>(memory_bytes);

    CachedFile() {
        char path[] = "./ibverbs_throughput.XXXXXX";
        fd = Fd(mkstemp(path));
        CHECK(fd);
        unlink(path);
        std::memset(read_buffer.get(), 1, memory_bytes);
        CHECK(write(fd.get(), read_buffer.get(), memory_bytes) == static_cast<ssize_t>(memory_bytes));
    }
};

// Return the calls of pread per second, each of 1 MiB.
double measure_pread(const CachedFile& file) {
    std::size_t file_offset = 0;
    return measure_operations_per_second([&] {
        void* const destination = file.read_buffer.get() + file_offset % (large_requests.depth * large_bytes);
        CHECK(pread(file.fd.get(), destination, large_bytes, static_cast<off_t>(file_offset)) ==
              static_cast<ssize_t>(large_bytes));
        file_offset = (file_offset + large_bytes) % memory_bytes;
        return 1U;
    });
}

// An io_uring that is used without liburing. This class advances the tail of the submission queue and the head of the
// completion queue; the kernel advances the other two. The conversion to bool gives false if the kernel does not permit
// io_uring.
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
        sqes_ = reinterpret_cast<io_uring_sqe*>(map_ring(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(submission + params.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submission + params.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submission + params.sq_off.array);
        cq_head_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.head);
        cq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completion + params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(completion + params.cq_off.cqes);
    }
    explicit operator bool() const { return static_cast<bool>(fd_); }

    // Return the reads per second, each of 4 KiB.
    double measure_rate(const CachedFile& file) {
        std::size_t file_offset = 0;
        return measure_operations_per_second([&] {
            unsigned new_read_count = 0;
            for (; in_flight_count_ < depth_; ++in_flight_count_, ++new_read_count) {
                add_read(file, file_offset);
                file_offset = (file_offset + small_bytes) % memory_bytes;
            }
            // Submit the new reads, and wait for max_list_length completions.
            CHECK(syscall(SYS_io_uring_enter, fd_.get(), new_read_count, max_list_length, IORING_ENTER_GETEVENTS,
                          nullptr, 0) >= 0);
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
        io_uring_sqe& sqe = sqes_[tail & sq_mask_];
        sqe = {};
        sqe.opcode = IORING_OP_READ;
        sqe.fd = file.fd.get();
        sqe.addr = reinterpret_cast<std::uint64_t>(file.read_buffer.get() + file_offset % (depth_ * small_bytes));
        sqe.len = small_bytes;
        sqe.off = file_offset;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    unsigned poll_completions() {
        unsigned completion_count = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++completion_count, --in_flight_count_) {
            CHECK(cqes_[head & cq_mask_].res == static_cast<int>(small_bytes));
        }
        cq_head_->store(head, std::memory_order_release);
        return completion_count;
    }

    const unsigned depth_;
    unsigned in_flight_count_ = 0;
    Fd fd_;
    io_uring_sqe* sqes_ = nullptr;
    std::atomic<unsigned>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

// ---- the runs

// Operations per second of the kernel, which the output compares with the twin: io_uring reads of 4 KiB (0 if the
// kernel does not permit io_uring) and preads of 1 MiB.
struct KernelRates {
    double io_uring_per_s, pread_per_s;
};

// Print a row of the output. `small_per_s` counts operations of 4 KiB, and `large_per_s` operations of 1 MiB. The ratio
// to io_uring is 0 if the kernel does not permit io_uring.
void print_row(const char* row_name, const char* memory_type, double small_per_s, double large_per_s,
               const KernelRates& kernel_rates) {
    const double bytes_per_gib = static_cast<double>(1UL << 30);
    std::printf("%-16s %-15s %10.0f %10.2f %14.2f %7.2f\n", row_name, memory_type, small_per_s,
                kernel_rates.io_uring_per_s > 0 ? small_per_s / kernel_rates.io_uring_per_s : 0,
                large_per_s * large_bytes / bytes_per_gib, large_per_s / kernel_rates.pread_per_s);
    std::fflush(stdout);
}

// Measure and print one row for each memory type of the target and each opcode.
void measure_and_print(const char* row_prefix, Endpoint* endpoint, const Target& target,
                       const KernelRates& kernel_rates) {
    Initiator initiator(endpoint, target);
    for (unsigned memory_type = 0; memory_type < memory_type_count; ++memory_type) {
        if (target.buffers[memory_type].rkey == 0) {
            continue;
        }
        for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
            const std::string row_name = std::string(row_prefix) + (opcode == IBV_WR_RDMA_WRITE ? " WRITE" : " READ");
            if (!selected_row_name.empty() && selected_row_name != row_name) {
                continue;
            }
            print_row(row_name.c_str(), memory_type_names[memory_type],
                      initiator.measure_rate(opcode, memory_type, small_requests),
                      initiator.measure_rate(opcode, memory_type, large_requests), kernel_rates);
        }
    }
}

// The second process runs this function. Over the socket, it sends the data about its queue pair and memory, and
// receives the address of the initiator's queue pair.
int run_target(int initiator_socket, const char* cuda_path) {
    Endpoint endpoint(1, make_benchmark_settings());
    Regions regions(&endpoint, cuda_path);
    QueuePairAddress peer{};
    CHECK(send_all(initiator_socket, &regions.target, sizeof regions.target) &&
          recv_all(initiator_socket, &peer, sizeof peer));
    endpoint.connect(peer);
    // The initiator waits for this token before it measures, and sends the token back after its last measurement.
    char token = 'r';
    CHECK(send_all(initiator_socket, &token, 1));
    return recv_all(initiator_socket, &token, 1) ? 0 : 1;
}

void measure_two_processes(const char* cuda_path, const KernelRates& kernel_rates) {
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    const Fd parent_socket(sockets[0]);
    Fd child_socket(dup(sockets[1]));
    close(sockets[1]);
    std::string program = "ibverbs_throughput", mode = "target", socket_text = std::to_string(child_socket.get());
    std::string cuda_path_text = cuda_path == nullptr ? "" : cuda_path;
    char* arguments[] = {program.data(), mode.data(), socket_text.data(),
                         cuda_path == nullptr ? nullptr : cuda_path_text.data(), nullptr};
    pid_t pid = 0;
    CHECK(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ) == 0);
    child_socket.reset();
    {
        Endpoint endpoint(0, make_benchmark_settings());
        Target target{};
        const QueuePairAddress own_address = endpoint.address();
        char token = 0;
        CHECK(recv_all(parent_socket.get(), &target, sizeof target) &&
              send_all(parent_socket.get(), &own_address, sizeof own_address) &&
              recv_all(parent_socket.get(), &token, 1));
        endpoint.connect(target.qp_address);
        measure_and_print("process", &endpoint, target, kernel_rates);
        CHECK(send_all(parent_socket.get(), &token, 1));
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void measure_one_process(const char* cuda_path, const KernelRates& kernel_rates) {
    Endpoint endpoint(0, make_benchmark_settings()), target_endpoint(1, make_benchmark_settings());
    Regions regions(&target_endpoint, cuda_path);
    connect(&endpoint, &target_endpoint);
    measure_and_print("loopback", &endpoint, regions.target, kernel_rates);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    // measure_two_processes() starts the second process with these arguments: target SOCKET [CUDA_PATH].
    if (argument_count > 2 && std::strcmp(arguments[1], "target") == 0) {
        return run_target(std::atoi(arguments[2]), argument_count > 3 ? arguments[3] : nullptr);
    }
    measure_time_ms = argument_count > 1 ? std::atof(arguments[1]) : measure_time_ms;
    const char* const cuda_path = argument_count > 2 && std::strcmp(arguments[2], "-") != 0 ? arguments[2] : nullptr;
    selected_row_name = argument_count > 3 ? arguments[3] : "";
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
