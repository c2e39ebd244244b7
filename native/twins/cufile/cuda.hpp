// libcuda as this library uses it: the driver's own entries, whichever libcuda the process has. Nothing of the CUDA
// twin is known here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// Where an address lies.
struct Place {
    bool device = false;
    int ordinal = -1;
    std::uint64_t context = 0; // 0: of no context in particular, the primary one serves
    std::uint64_t buffer_id = 0;
};

// cuInit, and the UUIDs of the devices. Throws Refused (cuda_driver_error) when there is no driver that answers.
std::vector<std::array<std::uint8_t, 16>> open_cuda();

// What the driver says about an address; memory that it does not know is the host's.
Place place_of(std::uint64_t address);

// Whether a context is current in the calling thread, whichever.
bool has_current_context();

// Throws Refused (cuda_driver_error with CUDA_ERROR_INVALID_CONTEXT) for device memory where none is.
void require_current_context(const Place& place);

// Throws Refused (cuda_pointer_range_error) unless all of the range is allocated device memory.
void check_allocated(std::uint64_t address, std::size_t length_bytes);

// The place whose context knows the stream; throws Refused (invalid_value) when none does.
Place place_of_stream(Stream stream);

// Has the stream run `function(data)` in its turn; throws Refused.
void launch_on(const Place& place, Stream stream, void (*function)(void*), void* data);

// While one lives, the context of a place is current in this thread.
class InContext {
public:
    explicit InContext(const Place& place);
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;
    ~InContext();

private:
    int primary_of_ = -1;
};

// Copies between the host and the memory of one place, by a stream of its own that nobody else's work waits for.
class Copier {
public:
    explicit Copier(const Place& place);
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;
    ~Copier();
    // Both wait until the bytes are there; throw Refused.
    void to_device(std::uint64_t to, const void* from, std::size_t length_bytes) const;
    void from_device(void* to, std::uint64_t from, std::size_t length_bytes) const;

private:
    const InContext in_context_;
    std::uint64_t stream_ = 0;
};

} // namespace gdrkit::twin::cufile
