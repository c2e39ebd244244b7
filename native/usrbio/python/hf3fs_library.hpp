// The client library of this process: opened once, by a path that Python chooses, and kept until the process ends.
#pragma once

#include "hf3fs_abi.hpp"

#include <string>
#include <vector>

namespace gdrkit::usrbio {

using abi::Cqe;
using abi::GpuHandle;
using abi::Ior;
using abi::Iov;

struct Functions {
#define GDRKIT_DECLARE(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_DECLARE)
#undef GDRKIT_DECLARE
};

// Opens the library. Empty on success, else what the loader said. A second call does nothing: what this process has
// open of one library must not meet the functions of another.
std::string open_library(const std::string& path);

// The functions that the library has; all null before it was opened.
const Functions& functions() noexcept;

// The names of the functions that the library has.
std::vector<std::string> function_names();

} // namespace gdrkit::usrbio
