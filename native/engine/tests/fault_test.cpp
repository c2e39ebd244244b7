// Tests of the copy engine when a driver call or an allocation fails: nothing is leaked, and a later job works. The
// tests need the software twin of libcuda. A file, the fault plan, tells the twin which call fails. Each plan runs in
// its own process.
#include <dlfcn.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <new>
#include <thread>

#include "engine/copy_stream.hpp"
#include "engine/staging.hpp"
#include "engine/tests/device.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

// Number of allocations that the engine still makes on this thread before one fails. With -1, all allocations
// succeed.
thread_local int allocations_left = -1;

// Returns whether a return address is in this program, which contains the engine, and not in a library.
bool is_in_engine(void* return_address) {
    Dl_info caller_info{};
    Dl_info engine_info{};
    return dladdr(return_address, &caller_info) != 0 &&
           dladdr(reinterpret_cast<void*>(&is_in_engine), &engine_info) != 0 &&
           caller_info.dli_fbase == engine_info.dli_fbase;
}

} // namespace

// Replaces the allocation function of the whole process, and fails the allocation that `allocations_left` determines.
void* operator new(std::size_t size) {
    if (allocations_left >= 0 && is_in_engine(__builtin_return_address(0)) && allocations_left-- == 0) {
        throw std::bad_alloc();
    }
    if (void* const memory = std::malloc(size)) {
        return memory;
    }
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept {
    std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

constexpr int out_of_memory = 2, unknown_error = 999; // CUDA_ERROR_OUT_OF_MEMORY and CUDA_ERROR_UNKNOWN.

// Number of transfers with each engine. The number is larger than the number of an engine's threads, because a call may
// fail once in each thread.
constexpr int rounds_count = 8;

// Transfers the data once, checks the bytes that arrived, and counts a failure, which must have the CUresult
// `expected_result`.
void check_round(Engine& engine, const Descriptor& fd, const Bytes& data, DeviceMemory& memory, bool is_write,
                 int expected_result, int& failures_count) {
    memory.fill();
    const auto job = start_job(engine, is_write ? Direction::write : Direction::read, 0,
                               {std::make_shared<File>(duplicate(fd))}, {Extent{0, 0, memory.address(), data.size()}});
    CHECK(job->wait(-1));
    const Progress progress = job->progress();
    const u64 arrived_bytes = job->arrived_bytes()[0];
    if (progress.failure) {
        ++failures_count;
        CHECK(progress.failure->api == Api::cuda && progress.failure->number == expected_result &&
              arrived_bytes < data.size());
    } else {
        CHECK(is_complete(progress, data.size()) && arrived_bytes == data.size());
    }
    // All bytes that are reported as arrived did arrive.
    CHECK(is_write ? sub_range(contents(fd), 0, arrived_bytes) == Bytes(arrived_bytes, filler)
                   : memory.read(0, arrived_bytes) == sub_range(data, 0, arrived_bytes));
    if (progress.failure && !is_write) {
        // After a failure no copy to the memory may be pending, because its owner may use it again.
        memory.fill();
        memory.synchronize();
        CHECK(memory.read(0, data.size()) == Bytes(data.size(), filler));
    }
}

int run_large_transfers(bool is_write, int expected_result) {
    const Folder folder;
    const Bytes data = pattern(3 * mib, 1);
    const Descriptor fd = create_file(folder.path_of("file"), data);
    DeviceMemory memory(0, data.size());
    const std::size_t open_files_count_before = count_open_files();
    for (int engine_index = 0; engine_index < 3; ++engine_index) {
        Engine engine(small_tuning(), any_node);
        int failures_count = 0;
        for (int round = 0; round < rounds_count; ++round) {
            check_round(engine, fd, data, memory, is_write, expected_result, failures_count);
        }
        // The planned fault occurs with the first engine, and no fault is left for the last engine.
        CHECK(engine_index != 0 || failures_count >= 1);
        CHECK(engine_index != 2 || failures_count == 0);
    }
    CHECK(count_open_files() == open_files_count_before);
    return 0;
}

constexpr u64 small_transfer_bytes = 64 * kib;

// When a failed small transfer returns, its copy must be over, because the caller may free its memory, and the next
// transfer uses the same staging memory.
int run_small_transfers(bool is_write, int expected_result) {
    const Folder folder;
    const Bytes data = pattern(small_transfer_bytes, 1);
    const Descriptor fd = create_file(folder.path_of("file"), data);
    DeviceMemory memory(0, small_transfer_bytes);
    Engine engine(small_tuning(), any_node);
    File file(duplicate(fd));
    const IoResult failed_result = engine.transfer_small(is_write ? Direction::write : Direction::read, file, 0,
                                                         memory.address(), small_transfer_bytes, 0);
    CHECK(failed_result.failure && failed_result.failure->number == expected_result && failed_result.bytes == 0);
    CHECK(contents(fd) == data);
    if (!is_write) {
        memory.fill();
        memory.synchronize();
        CHECK(memory.read(0, small_transfer_bytes) == Bytes(small_transfer_bytes, filler));
    }
    const IoResult next_result =
        engine.transfer_small(Direction::read, file, 0, memory.address(), small_transfer_bytes, 0);
    CHECK(!next_result.failure && next_result.bytes == small_transfer_bytes);
    CHECK(memory.read(0, small_transfer_bytes) == data);
    CHECK(get_current_context() == nullptr);
    return 0;
}

// A thread that could not make a context current must also be able to wait for the copies.
int run_drain_without_context() {
    const Bytes data = pattern(small_transfer_bytes, 3);
    DeviceMemory memory(0, small_transfer_bytes);
    PrimaryContexts contexts;
    const CopyStream stream(contexts.get(0), 1);
    // A copy from memory that is not pinned would end before copy_to_device() returns.
    Staging staging(small_transfer_bytes, any_node);
    staging.pin();
    std::ranges::copy(data, staging.data());
    stream.copy_to_device(memory.address(), staging.data(), small_transfer_bytes);
    std::thread([&] {
        CHECK(get_current_context() == nullptr);
        stream.drain();
        CHECK(get_current_context() == nullptr);
    }).join();
    memory.fill();
    memory.synchronize();
    CHECK(memory.read(0, small_transfer_bytes) == Bytes(small_transfer_bytes, filler));
    staging.unpin();
    return 0;
}

// Each allocation of a small transfer fails in turn. No context stays current, and the next transfer works.
void check_allocations() {
    const Folder folder;
    const Bytes data = pattern(small_transfer_bytes, 2);
    const Descriptor fd = create_file(folder.path_of("file"), data);
    DeviceMemory memory(0, small_transfer_bytes);
    File file(duplicate(fd));
    int failing_index = 0;
    for (bool has_each_allocation_failed = false; !has_each_allocation_failed; ++failing_index) {
        CHECK(failing_index < 100);
        Engine engine(small_tuning(), any_node);
        memory.fill();
        allocations_left = failing_index;
        try {
            CHECK(engine.transfer_small(Direction::read, file, 0, memory.address(), small_transfer_bytes, 0).bytes ==
                  small_transfer_bytes);
            has_each_allocation_failed = allocations_left >= 0; // The transfer needed fewer allocations.
        } catch (const std::bad_alloc&) {
        }
        allocations_left = -1;
        CHECK(get_current_context() == nullptr);
        CHECK(engine.transfer_small(Direction::read, file, 0, memory.address(), small_transfer_bytes, 0).bytes ==
              small_transfer_bytes);
        CHECK(memory.read(0, small_transfer_bytes) == data);
    }
    CHECK(failing_index >= 3); // At least two allocations have failed.
}

// Executes this program in a child process and returns its exit status. A new process is needed because the twin reads
// the fault plan when it is loaded.
int run_child(std::vector<std::string> arguments) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::vector<char*> argument_pointers{const_cast<char*>("child")};
        for (std::string& argument : arguments) {
            argument_pointers.push_back(argument.data());
        }
        argument_pointers.push_back(nullptr);
        execv("/proc/self/exe", argument_pointers.data());
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct Fault {
    const char* function;
    const char* call_number; // Which call fails, counted from 1, or a range of calls.
    int result;              // The CUresult of the call.
    bool is_write;
    bool is_small = false; // The transfer is small (Engine::transfer_small).
    int runs_count = 1;    // More than one run is needed if it is random which thread makes the call.
};

constexpr Fault faults[] = {
    {"cuMemHostRegister_v2", "1", out_of_memory, false},
    {"cuStreamCreate", "1", out_of_memory, false},
    {"cuEventCreate", "2", out_of_memory, false},
    {"cuMemcpyHtoDAsync_v2", "3", unknown_error, false},
    {"cuMemcpyDtoHAsync_v2", "3", unknown_error, true},
    {"cuEventRecord", "2", unknown_error, false},
    {"cuEventQuery", "1", unknown_error, false},
    // These calls belong to coalesced copies, which follow the first chunks.
    {"cuStreamCreate", "3", out_of_memory, false},
    {"cuMemcpyHtoDAsync_v2", "9", unknown_error, false},
    {"cuEventRecord", "9", unknown_error, false},
    {"cuEventQuery", "9", unknown_error, false},
    // This call belongs to the first chunk of a write, which has no coalesced copies.
    {"cuEventQuery", "1", unknown_error, true},
    // The thread that completes a coalesced copy cannot make a context current. The copy must end before its buffer is
    // used again.
    {"cuCtxSetCurrent", "14-24", unknown_error, false, false, 8},
    // These calls belong to small transfers: the driver fails while the copy is still pending.
    {"cuStreamSynchronize", "1", unknown_error, false, true},
    {"cuStreamSynchronize", "1", unknown_error, true, true},
};

} // namespace

// Without arguments, the program runs itself as a child process for each fault. The arguments of a child are "drain",
// or the size ("small" or "large"), the direction, and the CUresult of the failing call.
int main(int arguments_count, char** arguments) {
    if (arguments_count == 2) {
        return run_drain_without_context();
    }
    if (arguments_count == 4) {
        const bool is_write = std::string(arguments[2]) == "write";
        return (std::string(arguments[1]) == "small" ? run_small_transfers
                                                     : run_large_transfers)(is_write, std::stoi(arguments[3]));
    }
    check_allocations();
    // The twin delays each copy by a random time up to this limit, half a second. So a copy for which no thread waits
    // probably ends after the checks of the test.
    CHECK(setenv("GDRKIT_TWINS_LATE_US", "500000", 1) == 0);
    CHECK(run_child({"drain"}) == 0);
    const Folder folder;
    const std::string plan_path = folder.path_of("plan");
    for (const Fault& fault : faults) {
        const char* const delay_max_us = fault.is_small ? "500000" : fault.runs_count > 1 ? "20000" : "100";
        std::ofstream(plan_path) << "gdrkit-faults 1\n"
                                 << fault.function << " call=" << fault.call_number << " status=" << fault.result
                                 << "\n";
        CHECK(setenv("GDRKIT_TWINS_FAULTS", plan_path.c_str(), 1) == 0);
        CHECK(setenv("GDRKIT_TWINS_LATE_US", delay_max_us, 1) == 0);
        const std::vector<std::string> arguments{fault.is_small ? "small" : "large", fault.is_write ? "write" : "read",
                                                 std::to_string(fault.result)};
        int status = 0;
        for (int run = 0; status == 0 && run < fault.runs_count; ++run) {
            status = run_child(arguments);
        }
        if (status != 0) {
            std::fprintf(stderr, "%s: after a failure of %s (CUresult %d), the child process exited with %d\n",
                         fault.is_write ? "write" : "read", fault.function, fault.result, status);
        }
        CHECK(status == 0);
    }
}
