// The description of a failed call: the API, the function and the error number.
#pragma once

#include <exception>
#include <string>

namespace gdrkit::engine {

enum class Api { kernel, cuda };

// A failed call of the kernel or of the CUDA driver. `number` is an errno or a CUresult. `operation` is the name of the
// function that failed, in a static string.
struct Failure {
    Api api = Api::kernel;
    const char* operation = "";
    int number = 0;
    std::string name; // CUDA_ERROR_..., empty for an errno.
};

class Error : public std::exception {
public:
    explicit Error(Failure failure)
        : failure_(std::move(failure)),
          text_(std::string(failure_.operation) + " failed with " + std::to_string(failure_.number)) {}
    const Failure& failure() const noexcept { return failure_; }
    const char* what() const noexcept override { return text_.c_str(); }

private:
    Failure failure_;
    std::string text_;
};

inline Error make_kernel_error(const char* operation, int number) {
    return Error({.api = Api::kernel, .operation = operation, .number = number, .name = {}});
}

} // namespace gdrkit::engine
