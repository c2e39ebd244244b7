// Common steps of the exported functions of the NVML twin: check that NVML is initialized and that the handle of the
// GPU is valid, and store results.
#pragma once

#include <cstring>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "nvml/nvml_abi.hpp"

namespace gdrkit::twin::nvml {

// Return whether nvmlInit was called more often than nvmlShutdown.
bool is_initialized();

// Return the number of a GPU in the machine, or -1 if the handle is not valid.
int find_gpu_number(const Gpu* gpu);

// Run the body of an exported function, or return `uninitialized` if NVML is not initialized. Convert exceptions to
// error codes, because no exception may reach a C caller.
template <typename Body> int run_if_initialized(Body&& body) {
    try {
        return is_initialized() ? static_cast<int>(std::forward<Body>(body)()) : uninitialized;
    } catch (const std::bad_alloc&) {
        return unknown;
    } catch (const std::system_error&) {
        return unknown;
    }
}

// Run the body of an exported function that queries one GPU and stores a result. The body gets the GPU's number. Return
// `invalid_argument` if the handle is not valid or `result` is null.
template <typename Value, typename Body> int run_if_arguments_valid(const Gpu* gpu, Value* result, Body&& body) {
    return run_if_initialized([&] {
        const int gpu_number = find_gpu_number(gpu);
        return gpu_number < 0 || result == nullptr ? invalid_argument : std::forward<Body>(body)(gpu_number);
    });
}

// Store a value that is the same for every GPU.
template <typename Value> int store_constant(const Gpu* gpu, Value* result, Value value) {
    return run_if_arguments_valid(gpu, result, [&](int) {
        *result = value;
        return success;
    });
}

// Store a text with its final NUL in a buffer of the caller.
inline Result store_text(std::string_view text, char* buffer, unsigned length_bytes) {
    if (buffer == nullptr) {
        return invalid_argument;
    }
    if (length_bytes <= text.size()) {
        return insufficient_size;
    }
    std::memcpy(buffer, text.data(), text.size());
    buffer[text.size()] = '\0';
    return success;
}

} // namespace gdrkit::twin::nvml
