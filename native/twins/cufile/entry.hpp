// What every entry does first: count the call and ask the fault plan; and how a refusal gets to the caller.
#pragma once

#include <cerrno>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

// Thrown inside, never across an entry: why something is refused.
struct Refused {
    Status status;
    int cuda_error = 0;
};

// Empty, or what was malformed in the environment or the fault plan; read once.
const std::string_view& load_error();

// 0, or what the plan wants this call to answer.
int planned_failure(std::string_view symbol);

inline Error answer(int status, int cuda_error = 0) {
    return {status, cuda_error};
}

// An entry that answers a CUfileError_t. The body throws Refused, or returns.
template <typename Body> Error entry(std::string_view symbol, Body&& body) {
    try {
        if (const int code = planned_failure(symbol); code != 0) {
            return answer(code);
        }
        std::forward<Body>(body)();
        return answer(success);
    } catch (const Refused& refused) {
        return answer(refused.status, refused.cuda_error);
    } catch (const std::bad_alloc&) {
        return answer(no_memory);
    } catch (const std::system_error&) {
        return answer(internal_error);
    }
}

// Codes of a plan below this are errnos where a call can answer both.
inline constexpr int first_status = 5000;

// -1 and errno, or a negative CUfileOpError.
inline ssize_t data_failure(int code) {
    if (code < first_status) {
        errno = code;
        return -1;
    }
    return -code;
}

// An entry of the data path, which answers a count, -1 and errno, or a negative CUfileOpError.
template <typename Body> ssize_t data_entry(std::string_view symbol, Body&& body) {
    try {
        const int code = planned_failure(symbol);
        return code != 0 ? data_failure(code) : std::forward<Body>(body)();
    } catch (const Refused& refused) {
        return -refused.status;
    } catch (const std::bad_alloc&) {
        return -no_memory;
    } catch (const std::system_error&) {
        return -internal_error;
    }
}

} // namespace gdrkit::twin::cufile
