// The functions of the CUDA driver that the cuFile twin uses. They work with any libcuda, the twin or a real driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// The memory that an address belongs to.
struct MemoryLocation {
    bool device = false;
    int ordinal = -1;
    std::uint64_t context = 0; // 0: not tied to a context; use the primary one
    std::uint64_t buffer_id = 0;
};

// Call cuInit and return the UUIDs of the devices. Throws CufileError (cuda_driver_error) if the driver cannot be used.
std::vector<std::array<std::uint8_t, 16>> open_cuda();

// Query the driver for an address. Memory unknown to the driver is host memory.
MemoryLocation location_of(std::uint64_t address);

// Return whether any context is current in the calling thread.
bool has_current_context();

// Throws CufileError (cuda_driver_error with CUDA_ERROR_INVALID_CONTEXT) for device memory if no context is current.
void require_current_context(const MemoryLocation& location);

// Throws CufileError (cuda_pointer_range_error) unless the whole range is allocated device memory.
void check_allocated(std::uint64_t address, std::size_t length_bytes);

// Return the device whose context knows the stream. Throws CufileError (invalid_value) if there is none.
MemoryLocation location_of_stream(Stream stream);

// Queue function(data) in the stream. Throws CufileError.
void launch_host_function(const MemoryLocation& location, Stream stream, void (*function)(void*), void* data);

// Makes a context of the location's device current in this thread for the lifetime of the object.
class ScopedContext {
public:
    explicit ScopedContext(const MemoryLocation& location);
    ScopedContext(const ScopedContext&) = delete;
    ScopedContext& operator=(const ScopedContext&) = delete;
    ~ScopedContext();

private:
    int primary_of_ = -1;
};

// Copies between host memory and the memory of one device in a non-blocking stream.
class DeviceCopier {
public:
    explicit DeviceCopier(const MemoryLocation& location);
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;
    ~DeviceCopier();
    // Both return when the bytes are copied. They throw CufileError.
    void to_device(std::uint64_t to, const void* from, std::size_t length_bytes) const;
    void from_device(void* to, std::uint64_t from, std::size_t length_bytes) const;

private:
    const ScopedContext scoped_context_;
    std::uint64_t stream_ = 0;
};

} // namespace gdrkit::twin::cufile
