// The functions by which the cuFile twin uses the CUDA driver. The loaded libcuda may be the CUDA twin or the real
// driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// The memory that an address belongs to. The CUDA driver reports these values as attributes of the address.
struct MemoryLocation {
    bool is_device = false;      // device memory; else host memory
    int device_ordinal = -1;     // -1: host memory
    std::uint64_t context = 0;   // 0: the memory belongs to no context; use the primary context of the device
    std::uint64_t buffer_id = 0; // unique for each allocation of the process; 0: host memory
};

// Call cuInit and return the UUIDs of all devices, in the order of their ordinals. Throw CufileError
// (cuda_driver_error) if the driver cannot be used.
std::vector<std::array<std::uint8_t, 16>> initialize_cuda();

// Query the driver for the memory at an address. Memory that the driver does not know is host memory.
MemoryLocation find_location(std::uint64_t address);

// Return whether any context is current in the calling thread.
bool has_current_context();

// Throw CufileError (cuda_driver_error with CUDA_ERROR_INVALID_CONTEXT) if the location is device memory and no context
// is current.
void require_current_context(const MemoryLocation& location);

// Throw CufileError (cuda_pointer_range_error) unless the whole range is allocated device memory.
void check_allocated(std::uint64_t address, std::size_t length_bytes);

// Return a location that contains only the device of the stream. Throw CufileError (invalid_value) if no device has
// such a stream.
MemoryLocation find_location_of_stream(Stream stream);

// Queue a call of function(argument) in the stream. Throw CufileError if the driver refuses the call.
void launch_host_function(const MemoryLocation& location, Stream stream, void (*function)(void*), void* argument);

// An object that makes the context of the location current in this thread during its lifetime. If the location has no
// context, the object uses the primary context of the location's device.
class ScopedContext {
public:
    explicit ScopedContext(const MemoryLocation& location);
    ScopedContext(const ScopedContext&) = delete;
    ScopedContext& operator=(const ScopedContext&) = delete;
    ~ScopedContext();

private:
    int retained_device_ = -1; // device whose primary context this object retains; -1: none
};

// An object that copies between host memory and the memory of one device. It has a non-blocking stream for its copies.
class DeviceCopier {
public:
    explicit DeviceCopier(const MemoryLocation& location);
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;
    ~DeviceCopier();
    // Copy the bytes and wait for the copy. Both functions throw CufileError if the driver refuses the copy.
    void copy_to_device(std::uint64_t target, const void* source, std::size_t length_bytes) const;
    void copy_from_device(void* target, std::uint64_t source, std::size_t length_bytes) const;

private:
    const ScopedContext scoped_context_;
    std::uint64_t stream_ = 0;
};

} // namespace gdrkit::twin::cufile
