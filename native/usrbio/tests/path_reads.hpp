// Reads a file through the client library and the agent. The benchmark path_bench.cpp measures these reads.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "hf3fs_usrbio.h"
#include "uring_reads.hpp"

namespace gdrkit::usrbio::bench {

// The ring has twice as many entries as operations in flight. If completions come out of order, an entry of the ring
// becomes free later than its operation ends. Without spare entries, the ring would then refuse the next operation.
constexpr unsigned ring_entries_per_operation = 2;

// Exits if `result`, a positive or negative errno that `call` returned, is not 0.
inline void check_result(const char* call, long result) {
    if (result != 0) {
        errno = static_cast<int>(result < 0 ? -result : result);
        exit_with_errno(call);
    }
}

// The CUDA driver, by which the program copies device memory to the host before it compares the data with the file.
struct Cuda {
    int (*copy_to_host)(void*, std::uint64_t, std::size_t) = nullptr;

    Cuda() {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        copy_to_host =
            library == nullptr
                ? nullptr
                : reinterpret_cast<int (*)(void*, std::uint64_t, std::size_t)>(dlsym(library, "cuMemcpyDtoH_v2"));
        const auto initialize_driver =
            library == nullptr ? nullptr : reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
        const auto retain_primary_context =
            library == nullptr ? nullptr
                               : reinterpret_cast<int (*)(void**, int)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
        const auto set_current_context =
            library == nullptr ? nullptr : reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
        void* context = nullptr;
        if (copy_to_host == nullptr || initialize_driver == nullptr || retain_primary_context == nullptr ||
            set_current_context == nullptr || initialize_driver(0) != 0 || retain_primary_context(&context, 0) != 0 ||
            set_current_context(context) != 0) {
            std::fprintf(stderr, "path_bench: the CUDA driver or device 0 is not available\n");
            std::exit(1);
        }
    }
};

// Reads of `read_bytes` bytes through the client library and the agent, with `depth` reads in flight. `cuda` is null
// for reads into host memory.
class UsrbioReads {
public:
    UsrbioReads(const std::string& mount_path, const Cuda* cuda, int file_fd, unsigned depth, std::size_t read_bytes)
        : cuda_(cuda), file_fd_(file_fd), depth_(depth), read_bytes_(read_bytes), file_offsets_(depth) {
        const char* const mount = mount_path.c_str();
        check_result("hf3fs_iovcreate", cuda != nullptr ? hf3fs_iovcreate_gpu(&iov_, mount, depth * read_bytes, 0, 0)
                                                        : hf3fs_iovcreate(&iov_, mount, depth * read_bytes, 0, -1));
        const auto ring_entries = static_cast<int>(depth * ring_entries_per_operation);
        check_result("hf3fs_iorcreate", hf3fs_iorcreate(&ior_, mount, ring_entries, true, 0, -1));
        cqes_.resize(depth);
        for (unsigned buffer_index = 0; buffer_index < depth; ++buffer_index) {
            free_buffer_indices_.push_back(buffer_index);
        }
    }
    ~UsrbioReads() {
        hf3fs_iordestroy(&ior_);
        cuda_ != nullptr ? hf3fs_iovdestroy_gpu(&iov_) : hf3fs_iovdestroy(&iov_);
    }
    UsrbioReads(const UsrbioReads&) = delete;
    UsrbioReads& operator=(const UsrbioReads&) = delete;

    // Submits reads until `depth` are in flight, each at the offset that next_offset() returns. Then waits for at least
    // `completions_min` completions and returns the number of completions.
    template <typename NextOffset> unsigned run_step(unsigned completions_min, NextOffset next_offset) {
        has_started_ = true;
        while (!free_buffer_indices_.empty()) {
            const unsigned buffer_index = free_buffer_indices_.back();
            free_buffer_indices_.pop_back();
            file_offsets_[buffer_index] = next_offset();
            const int prepare_result = hf3fs_prep_io(&ior_, &iov_, true, iov_.base + buffer_index * read_bytes_,
                                                     file_fd_, file_offsets_[buffer_index], read_bytes_,
                                                     reinterpret_cast<const void*>(std::uintptr_t{buffer_index}));
            // A slow operation also keeps the entries after its own in use; see ring_entries_per_operation.
            if (prepare_result == -EAGAIN) {
                free_buffer_indices_.push_back(buffer_index);
                break;
            }
            check_result("hf3fs_prep_io", std::min(prepare_result, 0));
        }
        check_result("hf3fs_submit_ios", hf3fs_submit_ios(&ior_));
        return reap(std::min(completions_min, static_cast<unsigned>(depth_ - free_buffer_indices_.size())));
    }
    // Waits for all reads in flight and returns their number.
    unsigned drain() {
        unsigned completed_count = 0;
        while (free_buffer_indices_.size() != depth_) {
            completed_count += reap(static_cast<unsigned>(depth_ - free_buffer_indices_.size()));
        }
        return completed_count;
    }
    // Compares the last read into each buffer with the file, and exits if they differ.
    void compare() const {
        if (!has_started_) {
            return;
        }
        std::vector<std::uint8_t> host_copy(read_bytes_), expected_bytes(read_bytes_);
        for (unsigned buffer_index = 0; buffer_index < depth_; ++buffer_index) {
            const std::uint8_t* actual_bytes = iov_.base + buffer_index * read_bytes_;
            if (cuda_ != nullptr) {
                check_result(
                    "cuMemcpyDtoH",
                    cuda_->copy_to_host(host_copy.data(), reinterpret_cast<std::uintptr_t>(actual_bytes), read_bytes_));
                actual_bytes = host_copy.data();
            }
            const auto byte_count = static_cast<std::size_t>(
                pread(file_fd_, expected_bytes.data(), read_bytes_, static_cast<off_t>(file_offsets_[buffer_index])));
            if (byte_count != read_bytes_ || std::memcmp(actual_bytes, expected_bytes.data(), read_bytes_) != 0) {
                std::fprintf(stderr, "path_bench: the data of a read differs from the file\n");
                std::exit(1);
            }
        }
    }

private:
    // Waits for at least `completions_min` completions, marks their buffers as free, and returns their number.
    unsigned reap(unsigned completions_min) {
        const int completed_count = hf3fs_wait_for_ios(&ior_, cqes_.data(), static_cast<int>(depth_),
                                                       static_cast<int>(completions_min), nullptr);
        check_result("hf3fs_wait_for_ios", std::min(completed_count, 0));
        for (int index = 0; index < completed_count; ++index) {
            if (cqes_[static_cast<std::size_t>(index)].result != static_cast<std::int64_t>(read_bytes_)) {
                std::fprintf(stderr, "path_bench: a read failed or was short: result %lld\n",
                             static_cast<long long>(cqes_[static_cast<std::size_t>(index)].result));
                std::exit(1);
            }
            free_buffer_indices_.push_back(static_cast<unsigned>(
                reinterpret_cast<std::uintptr_t>(cqes_[static_cast<std::size_t>(index)].userdata)));
        }
        return static_cast<unsigned>(completed_count);
    }

    const Cuda* const cuda_;
    const int file_fd_;
    const unsigned depth_;
    const std::size_t read_bytes_;
    std::vector<std::uint64_t> file_offsets_;   // File offset of the last read into each buffer.
    std::vector<unsigned> free_buffer_indices_; // Indices of the buffers without a read in flight.
    std::vector<hf3fs_cqe> cqes_;
    hf3fs_iov iov_{};
    hf3fs_ior ior_{};
    bool has_started_ = false;
};

} // namespace gdrkit::usrbio::bench
