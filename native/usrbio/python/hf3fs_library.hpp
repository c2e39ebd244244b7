// The client library (libhf3fs_api_shared.so) that the Python module _hf3fs uses. Python code
// (gdrkit/usrbio/_library.py) chooses the path of the library. The library is opened once and stays open until the
// process ends.
#pragma once

#include "hf3fs_abi.hpp"

#include <string>
#include <vector>

namespace gdrkit::usrbio {

using abi::Cqe;
using abi::GpuHandle;
using abi::GpuPoolStatistics;
using abi::Ior;
using abi::Iov;

// Pointers to the functions of the library, under their names in the library.
struct Functions {
#define GDRKIT_DECLARE(name, result_type, ...) result_type (*name)(__VA_ARGS__) = nullptr;
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_DECLARE)
#undef GDRKIT_DECLARE
};

// Opens the library. Returns the empty string on success, otherwise the message of dlopen. After a success, every
// further call does nothing and returns the empty string, also with another path: the library cannot be replaced,
// because its objects must not be passed to another library. After a failure, a call tries again.
std::string open_library(const std::string& path);

// Returns the functions of the library. A function that the library does not have is null. Before open_library(), all
// functions are null.
const Functions& functions() noexcept;

// Returns the names of the functions that the library has.
std::vector<std::string> function_names();

} // namespace gdrkit::usrbio
