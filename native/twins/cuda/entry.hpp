// Common first steps of every exported function: count the call and apply the fault plan, check that cuInit was called,
// and find the current context.
#pragma once

#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Read the environment and the fault plan when this function is called for the first time.
void load_fault_plan();

// Count the call. Return false and set *error if the fault plan makes the call fail.
bool begin_call(std::string_view symbol, Result* error);

// Return success, or an error if the calling thread must not use the driver. cuInit must have been called in this
// process (a forked child counts as another process), and the thread must not be in a host function of a stream
// (cuLaunchHostFunc).
Result check_ready();

// Convert exceptions to error codes, because no exception may reach a C caller.
template <typename Body> Result catch_exceptions(Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const std::bad_alloc&) {
        return out_of_memory;
    } catch (const std::system_error&) {
        return operating_system_error;
    }
}

// Run the body of an exported function that may be called before cuInit.
template <typename Body> Result run_entry_before_init(std::string_view symbol, Body&& body) {
    return catch_exceptions([&] {
        Result error = success;
        return begin_call(symbol, &error) ? std::forward<Body>(body)() : error;
    });
}

// Run the body of an exported function that requires cuInit.
template <typename Body> Result run_entry(std::string_view symbol, Body&& body) {
    return run_entry_before_init(symbol, [&] {
        const Result result = check_ready();
        return result == success ? std::forward<Body>(body)() : result;
    });
}

// Run the body of an exported function that requires a current context, which is passed to the body.
template <typename Body> Result run_entry_in_context(std::string_view symbol, Body&& body) {
    return run_entry(symbol, [&] {
        ContextRef context;
        const Result result = find_current_context(&context);
        return result == success ? std::forward<Body>(body)(context) : result;
    });
}

} // namespace gdrkit::twin::cuda
