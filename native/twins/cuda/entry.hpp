// What every entry does first: count the call and ask the fault plan, see that cuInit was called, find the context.
#pragma once

#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Reads the environment and the fault plan, once.
void load_plan();

// False, and *error, when the plan asks that this call fails.
bool begin_call(std::string_view symbol, Result* error);

// success, or why the calling thread may not use the driver: cuInit was not called in this process (a forked child
// has to be another process first), or the thread is running a host function of a stream.
Result ready();

// Nothing may be thrown into a C caller.
template <typename Body> Result guarded(Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const std::bad_alloc&) {
        return out_of_memory;
    } catch (const std::system_error&) {
        return operating_system;
    }
}

// An entry that works before cuInit.
template <typename Body> Result entry_before_init(std::string_view symbol, Body&& body) {
    return guarded([&] {
        Result error = success;
        return begin_call(symbol, &error) ? std::forward<Body>(body)() : error;
    });
}

// An entry that needs cuInit.
template <typename Body> Result entry(std::string_view symbol, Body&& body) {
    return entry_before_init(symbol, [&] {
        const Result state = ready();
        return state == success ? std::forward<Body>(body)() : state;
    });
}

// An entry that needs a current context, which the body gets.
template <typename Body> Result entry_in_context(std::string_view symbol, Body&& body) {
    return entry(symbol, [&] {
        ContextRef context;
        const Result state = current_context(&context);
        return state == success ? std::forward<Body>(body)(context) : state;
    });
}

} // namespace gdrkit::twin::cuda
