// Measures the processor time that an operation costs the application: prepare, submit and reap, in batches of 32
// operations without data.
//
// The variants take turns in one run: the C library with an agent in this process, io_uring's NOP, and a minimal loop
// that uses the memory and the two semaphores of a ring by the protocol of 3FS. For each variant, the program prints
// one JSON object in a line: the CPU time of the client's thread (CLOCK_THREAD_CPUTIME_ID) for an operation, as the
// median of the rounds.
#include "common/spin.hpp"
#include "test_mount.hpp"
#include "tests/check.hpp"
#include "usrbio/client/file_table.hpp"
#include "usrbio/include/hf3fs_usrbio.h"
#include "usrbio/ring/application_side.hpp"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

using namespace gdrkit::usrbio;

namespace {

// Returns the semaphore as a glibc semaphore. 3FS calls the functions of glibc for it.
sem_t* as_glibc(Semaphore* semaphore) {
    return reinterpret_cast<sem_t*>(semaphore);
}

constexpr unsigned batch_size = 32; // Operations in a batch.
constexpr std::size_t ring_entry_count = 127;
constexpr int fake_fd = 12345; // Not an open file, because the agent of this program reads no file.

double read_thread_cpu_s() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::int64_t read_monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

// One of the programs that are compared. run() executes `batch_count` batches.
class Variant {
public:
    virtual ~Variant() = default;
    virtual void run(unsigned batch_count) = 0;
};

// Batches of the io_uring operation IORING_OP_NOP, which does nothing.
class UringNop final : public Variant {
public:
    UringNop() {
        io_uring_params parameters{};
        ring_fd_ = static_cast<int>(syscall(SYS_io_uring_setup, 2 * batch_size, &parameters));
        CHECK(ring_fd_ >= 0);
        const auto map_ring_area = [&](std::size_t bytes, off_t offset) {
            void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd_, offset);
            CHECK(memory != MAP_FAILED);
            mappings_.push_back({memory, bytes});
            return static_cast<std::byte*>(memory);
        };
        std::byte* sq_ring =
            map_ring_area(parameters.sq_off.array + parameters.sq_entries * sizeof(std::uint32_t), IORING_OFF_SQ_RING);
        std::byte* cq_ring =
            map_ring_area(parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        sqes_ = reinterpret_cast<io_uring_sqe*>(
            map_ring_area(parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::uint32_t*>(sq_ring + parameters.sq_off.tail);
        sq_mask_ = *reinterpret_cast<std::uint32_t*>(sq_ring + parameters.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<std::uint32_t*>(sq_ring + parameters.sq_off.array);
        cq_head_ = reinterpret_cast<std::uint32_t*>(cq_ring + parameters.cq_off.head);
        cq_tail_ = reinterpret_cast<std::uint32_t*>(cq_ring + parameters.cq_off.tail);
        cq_mask_ = *reinterpret_cast<std::uint32_t*>(cq_ring + parameters.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(cq_ring + parameters.cq_off.cqes);
    }
    ~UringNop() override {
        for (const auto& [memory, bytes] : mappings_) {
            munmap(memory, bytes);
        }
        close(ring_fd_);
    }
    static bool is_available() {
        io_uring_params parameters{};
        const long fd = syscall(SYS_io_uring_setup, 1, &parameters);
        if (fd >= 0) {
            close(static_cast<int>(fd));
        }
        return fd >= 0;
    }
    void run(unsigned batch_count) override {
        for (unsigned batch_index = 0; batch_index < batch_count; ++batch_index) {
            std::uint32_t tail = *sq_tail_;
            for (unsigned i = 0; i < batch_size; ++i, ++tail) {
                io_uring_sqe& sqe = sqes_[tail & sq_mask_];
                std::memset(&sqe, 0, sizeof(sqe));
                sqe.opcode = IORING_OP_NOP;
                sqe.user_data = i;
                sq_array_[tail & sq_mask_] = tail & sq_mask_;
            }
            __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
            CHECK_EQUAL(
                syscall(SYS_io_uring_enter, ring_fd_, batch_size, batch_size, IORING_ENTER_GETEVENTS, nullptr, 0),
                long{batch_size});
            std::uint32_t head = *cq_head_;
            const std::uint32_t cq_tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
            CHECK_EQUAL(cq_tail - head, batch_size);
            for (; head != cq_tail; ++head) {
                userdata_sum_ += cqes_[head & cq_mask_].user_data;
            }
            __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
        }
    }

private:
    int ring_fd_ = -1;
    std::vector<std::pair<void*, std::size_t>> mappings_;
    io_uring_sqe* sqes_ = nullptr;
    std::uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    std::uint32_t sq_mask_ = 0, cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    std::uint64_t userdata_sum_ = 0; // Sum of the user data, so that each completion is read.
};

// Shared memory of a ring with ring_entry_count entries.
struct RingMemory {
    RingMemory() : size_bytes(ring_bytes(ring_entry_count)) {
        data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        CHECK(data != MAP_FAILED);
        CHECK_EQUAL(RingView::bind(data, size_bytes, view), 0);
    }
    ~RingMemory() { munmap(data, size_bytes); }
    void* data = nullptr;
    std::size_t size_bytes;
    RingView view;
};

// A client and an agent with the protocol of 3FS, but without a library: no table of operations, no checks, one wake-up
// per batch.
class BareLoop final : public Variant {
public:
    // Uses the semaphore of high priority, because the class Library uses the semaphore of normal priority.
    explicit BareLoop(test::Mount& mount) : submit_semaphore_(mount.submit_semaphore(0)) {
        sem_init(as_glibc(memory_.view.completion_semaphore), 1, 0);
        agent_thread_ = std::thread([this] { serve(); });
    }
    ~BareLoop() override {
        is_stopping_ = true;
        sem_post(submit_semaphore_);
        agent_thread_.join();
    }
    void run(unsigned batch_count) override {
        RingView& view = memory_.view;
        for (unsigned batch_index = 0; batch_index < batch_count; ++batch_index) {
            for (unsigned i = 0; i < batch_size; ++i) {
                // Buffer id, buffer offset, inode, file offset, length, user data.
                view.arguments[i] = {{}, i, 1, i, 1, i};
                view.submissions[submission_head_] = {static_cast<std::int32_t>(i), 0, i};
                submission_head_ = view.next(submission_head_);
            }
            view.indices->submission_head.store(static_cast<std::int32_t>(submission_head_), std::memory_order_release);
            sem_post(submit_semaphore_);
            for (unsigned reaped_count = 0; reaped_count < batch_size;) {
                while (sem_wait(as_glibc(view.completion_semaphore)) != 0) {
                }
                const auto completion_head =
                    static_cast<std::uint32_t>(view.indices->completion_head.load(std::memory_order_acquire));
                for (; completion_tail_ != completion_head;
                     completion_tail_ = view.next(completion_tail_), ++reaped_count) {
                    userdata_sum_ += view.completions[completion_tail_].userdata;
                }
                view.indices->completion_tail.store(static_cast<std::int32_t>(completion_tail_),
                                                    std::memory_order_release);
            }
        }
    }

private:
    void serve() {
        RingView& view = memory_.view;
        std::uint32_t submission_tail = 0;
        std::uint32_t completion_head = 0;
        for (;;) {
            while (sem_wait(submit_semaphore_) != 0) {
            }
            if (is_stopping_) {
                return;
            }
            const auto submission_head =
                static_cast<std::uint32_t>(view.indices->submission_head.load(std::memory_order_acquire));
            for (; submission_tail != submission_head;
                 submission_tail = view.next(submission_tail), completion_head = view.next(completion_head)) {
                const Submission& submission = view.submissions[submission_tail];
                view.completions[completion_head] = {submission.index, 0,
                                                     static_cast<std::int64_t>(view.arguments[submission.index].length),
                                                     submission.userdata};
            }
            view.indices->submission_tail.store(static_cast<std::int32_t>(submission_tail), std::memory_order_release);
            view.indices->completion_head.store(static_cast<std::int32_t>(completion_head), std::memory_order_release);
            sem_post(as_glibc(view.completion_semaphore));
        }
    }

    RingMemory memory_;
    sem_t* submit_semaphore_;
    std::atomic<bool> is_stopping_{false};
    std::uint32_t submission_head_ = 0;
    std::uint32_t completion_tail_ = 0;
    std::uint64_t userdata_sum_ = 0; // Sum of the user data, so that each completion is read.
    std::thread agent_thread_;
};

// The C library. Its agent completes each operation at once, and spins for `spin_ns` before it sleeps.
class Library final : public Variant {
public:
    Library(test::Mount& mount, std::int64_t spin_ns, unsigned batches_in_flight)
        : mount_(mount), spin_ns_(spin_ns), batches_in_flight_(batches_in_flight) {
        CHECK_EQUAL(hf3fs_iovcreate(&iov_, mount.path(), 1 << 20, 0, -1), 0);
        CHECK_EQUAL(AgentRing::attach(memory_.data, memory_.size_bytes, 0, 0, agent_ring_), 0);
        CHECK_EQUAL(hf3fs_iorwrap(&ior_, memory_.data, mount.path(), memory_.size_bytes, true, 0, 0, 0, 0), 0);
        CHECK(file_table().set(fake_fd, {.inode = 1, .access = FileAccess::both}));
        agent_thread_ = std::thread([this] { serve(); });
    }
    ~Library() override {
        is_stopping_ = true;
        sem_post(mount_.submit_semaphore(1));
        agent_thread_.join();
        hf3fs_iordestroy(&ior_);
        hf3fs_iovdestroy(&iov_);
    }
    void run(unsigned batch_count) override {
        const unsigned initial_batch_count = std::min(batches_in_flight_, batch_count);
        for (unsigned batch_index = 0; batch_index < initial_batch_count; ++batch_index) {
            submit();
        }
        for (unsigned batch_index = initial_batch_count; batch_index < batch_count; ++batch_index) {
            reap();
            submit();
        }
        for (unsigned batch_index = 0; batch_index < initial_batch_count; ++batch_index) {
            reap();
        }
    }

private:
    void submit() {
        for (std::uintptr_t i = 0; i < batch_size; ++i) {
            const int prepare_result = hf3fs_prep_io(&ior_, &iov_, true, iov_.base + 4096 * i, fake_fd, 4096 * i, 4096,
                                                     reinterpret_cast<const void*>(i));
            if (prepare_result < 0) {
                CHECK_EQUAL(prepare_result, 0);
            }
        }
        CHECK_EQUAL(hf3fs_submit_ios(&ior_), 0);
    }
    void reap() {
        CHECK_EQUAL(hf3fs_wait_for_ios(&ior_, cqes_.data(), batch_size, batch_size, nullptr),
                    static_cast<int>(batch_size));
        for (const hf3fs_cqe& cqe : cqes_) {
            userdata_sum_ += reinterpret_cast<std::uintptr_t>(cqe.userdata);
        }
    }
    void serve() {
        std::array<ClaimedOperation, 64> claimed_operations;
        std::int64_t idle_since_ns = read_monotonic_ns();
        for (unsigned idle_check_count = 0; !is_stopping_;) {
            const std::size_t claimed_count = agent_ring_->claim(claimed_operations, 0);
            if (claimed_count != 0) {
                for (std::size_t i = 0; i < claimed_count; ++i) {
                    agent_ring_->complete(claimed_operations[i].position,
                                          static_cast<std::int64_t>(claimed_operations[i].arguments.length));
                }
                agent_ring_->flush();
                idle_check_count = 0;
                continue;
            }
            // Spin for `spin_ns_`, and read the clock only at every 16th check of the ring.
            if (spin_ns_ != 0) {
                gdrkit::pause_processor();
                if (idle_check_count == 0) {
                    idle_since_ns = read_monotonic_ns();
                }
                if (++idle_check_count % 16 != 0 || read_monotonic_ns() - idle_since_ns < spin_ns_) {
                    continue;
                }
            }
            if (agent_ring_->prepare_to_sleep()) {
                while (sem_wait(mount_.submit_semaphore(1)) != 0) {
                }
                agent_ring_->end_sleep();
            }
            idle_check_count = 0;
        }
    }

    test::Mount& mount_;
    std::int64_t spin_ns_;
    unsigned batches_in_flight_;
    std::array<hf3fs_cqe, batch_size> cqes_;
    RingMemory memory_;
    hf3fs_iov iov_{};
    hf3fs_ior ior_{};
    std::unique_ptr<AgentRing> agent_ring_;
    std::atomic<bool> is_stopping_{false};
    std::uint64_t userdata_sum_ = 0; // Sum of the user data, so that each completion is read.
    std::thread agent_thread_;
};

struct Measurement {
    const char* name;
    std::function<std::unique_ptr<Variant>()> make_variant;
    // Nanoseconds for an operation, one element for each round: processor time of the client's thread, and wall time.
    std::vector<double> cpu_ns = {};
    std::vector<double> wall_ns = {};
};

double compute_median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Runs one round of the variant, and adds the times of this round to `measurement`.
void measure(Measurement& measurement, unsigned batch_count) {
    const std::unique_ptr<Variant> variant = measurement.make_variant();
    variant->run(batch_count / 10 + 1); // Warm up the caches, the branch prediction and the library's spin limit.
    const std::int64_t begin_ns = read_monotonic_ns();
    const double cpu_begin_s = read_thread_cpu_s();
    variant->run(batch_count);
    measurement.cpu_ns.push_back((read_thread_cpu_s() - cpu_begin_s) * 1e9 / batch_count / batch_size);
    measurement.wall_ns.push_back(static_cast<double>(read_monotonic_ns() - begin_ns) / batch_count / batch_size);
}

void print_measurement(const Measurement& measurement) {
    std::printf("{\"name\": \"%s\", \"batch\": %u, \"rounds\": %zu, \"client_cpu_ns_per_operation\": %.2f, "
                "\"client_cpu_ns_per_operation_min\": %.2f, \"wall_ns_per_operation\": %.2f}\n",
                measurement.name, batch_size, measurement.cpu_ns.size(), compute_median(measurement.cpu_ns),
                *std::min_element(measurement.cpu_ns.begin(), measurement.cpu_ns.end()),
                compute_median(measurement.wall_ns));
}

// Prints the median ratio of the processor times of `usrbio` and `reference`, and whether it is at most `ratio_max`.
void print_ratio(const char* name, const Measurement& usrbio, const Measurement& reference, double ratio_max) {
    // Divide the times of the same round: they were measured one after the other, so other load on the machine affected
    // both.
    std::vector<double> ratios;
    for (std::size_t i = 0; i < usrbio.cpu_ns.size(); ++i) {
        ratios.push_back(usrbio.cpu_ns[i] / reference.cpu_ns[i]);
    }
    std::printf("{\"name\": \"%s\", \"ratio\": %.3f, \"limit\": %.1f, \"holds\": %s}\n", name, compute_median(ratios),
                ratio_max, compute_median(ratios) <= ratio_max ? "true" : "false");
}

} // namespace

// Usage: ring_bench [rounds [batches]]
int main(int argc, char** argv) {
    const int round_count = argc > 1 ? std::atoi(argv[1]) : 9;
    const int batch_count = argc > 2 ? std::atoi(argv[2]) : 20000;
    CHECK(round_count > 0 && batch_count > 0);
    test::Mount mount;
    // The library needs this agent for its socket. The class Library serves the rings.
    const test::Agent agent(mount, test::Agent::Rings::not_served);
    Measurement spinning_three_batches{"usrbio, agent spins up to 50 us, 3 batches in flight",
                                       [&] { return std::make_unique<Library>(mount, 50000, 3); }};
    Measurement spinning_one_batch{"usrbio, agent spins up to 50 us, 1 batch in flight",
                                   [&] { return std::make_unique<Library>(mount, 50000, 1); }};
    Measurement sleeping{"usrbio, agent sleeps", [&] { return std::make_unique<Library>(mount, 0, 1); }};
    Measurement bare{"bare loop, same semaphores", [&] { return std::make_unique<BareLoop>(mount); }};
    Measurement nop{"io_uring NOP", [] { return std::make_unique<UringNop>(); }};
    const bool has_io_uring = UringNop::is_available();
    for (int round = 0; round < round_count; ++round) {
        if (has_io_uring) {
            measure(nop, static_cast<unsigned>(batch_count));
        }
        measure(spinning_three_batches, static_cast<unsigned>(batch_count));
        measure(spinning_one_batch, static_cast<unsigned>(batch_count));
        measure(bare, static_cast<unsigned>(batch_count) / 4);
        measure(sleeping, static_cast<unsigned>(batch_count) / 4);
    }
    for (const Measurement* measurement : {&spinning_three_batches, &spinning_one_batch, &sleeping, &bare}) {
        print_measurement(*measurement);
    }
    if (has_io_uring) {
        print_measurement(nop);
        print_ratio("usrbio with a spinning agent / io_uring NOP", spinning_three_batches, nop, 2.0);
    } else {
        std::printf("{\"name\": \"io_uring NOP\", \"not_run\": \"io_uring_setup: %s\"}\n", std::strerror(errno));
    }
    print_ratio("usrbio with a sleeping agent / bare loop", sleeping, bare, 1.2);
    return 0;
}
