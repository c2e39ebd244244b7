// Common first steps of every exported function (count the call, apply the fault plan), and the conversion of
// exceptions to error codes.
#pragma once

#include <cerrno>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// The error code of a failed call. It is thrown inside the library and never leaves an exported function.
struct CufileError {
    Status status;
    int cuda_error = 0; // CUresult, if `status` is cuda_driver_error
};

// Read the environment variables and the fault plan at the first call. Return the text of the first error in them, or
// an empty text if both are valid.
const std::string_view& configuration_error();

// Count the call and return the code that the fault plan injects, or 0.
int take_injected_failure(std::string_view symbol);

inline Error make_error(int status, int cuda_error = 0) {
    return {status, cuda_error};
}

// Run the body of an exported function that returns CUfileError_t. The body throws CufileError to report a failure.
template <typename Body> Error run_entry(std::string_view symbol, Body&& body) {
    try {
        if (const int code = take_injected_failure(symbol); code != 0) {
            return make_error(code);
        }
        std::forward<Body>(body)();
        return make_error(success);
    } catch (const CufileError& error) {
        return make_error(error.status, error.cuda_error);
    } catch (const std::bad_alloc&) {
        return make_error(no_memory);
    } catch (const std::system_error&) {
        return make_error(internal_error);
    }
}

// CUFILEOP_BASE_ERR: every CUfileOpError except success is greater. A function that moves bytes reports smaller codes
// as errno.
inline constexpr int cufile_base_error = 5000;

// Report a failed transfer: return -1 with errno set, or a negative CUfileOpError.
inline ssize_t report_failed_transfer(int code) {
    if (code < cufile_base_error) {
        errno = code;
        return -1;
    }
    return -code;
}

// Run the body of an exported function that returns a number of bytes, -1 with errno set, or a negative CUfileOpError.
template <typename Body> ssize_t run_data_entry(std::string_view symbol, Body&& body) {
    try {
        const int code = take_injected_failure(symbol);
        return code != 0 ? report_failed_transfer(code) : std::forward<Body>(body)();
    } catch (const CufileError& error) {
        return -error.status;
    } catch (const std::bad_alloc&) {
        return -no_memory;
    } catch (const std::system_error&) {
        return -internal_error;
    }
}

} // namespace gdrkit::twin::cufile
