// Helpers for the tests of the software twin of libcufile (GPUDirect Storage). They open the twin with dlopen beside
// the CUDA twin, and call its functions by name.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <string>
#include <vector>

#include "cuda_driver.hpp"
#include "cufile/cufile_abi.hpp"

namespace gdrkit::twin::cufile {

using cuda::u64;

// Return the dlopen handle of the cuFile twin.
inline void* twin_library() {
    static void* const library_handle = [] {
        // Open the CUDA twin first, so that the cuFile twin finds it as libcuda.so.1.
        cuda::driver_library();
        void* handle = dlopen(GDRKIT_CUFILE_TWIN, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
        return handle;
    }();
    return library_handle;
}

// Call a function of the cuFile twin by name.
template <typename Result, typename... Arguments> Result call(const char* symbol, Arguments... arguments) {
    void* const function_address = dlsym(twin_library(), symbol);
    if (function_address == nullptr) {
        std::fprintf(stderr, "%s is not exported\n", symbol);
        std::exit(1);
    }
    return reinterpret_cast<Result (*)(Arguments...)>(function_address)(arguments...);
}

// Call a function that returns CUfileError_t, and return the CUfileOpError in it. The arguments must have the types of
// the API.
template <typename... Arguments> int call_for_status(const char* symbol, Arguments... arguments) {
    return call<Error>(symbol, arguments...).error;
}

// Call a function that returns CUfileError_t, and check that the CUfileOpError in the result is `code`.
#define EXPECT_STATUS(code, ...)                                                                                       \
    do {                                                                                                               \
        const int result_ = call_for_status(__VA_ARGS__);                                                              \
        if (result_ != (code)) {                                                                                       \
            std::fprintf(stderr, "%s:%d: %s returned %d, not %d\n", __FILE__, __LINE__, #__VA_ARGS__, result_,         \
                         static_cast<int>(code));                                                                      \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

// Replace the fault plan of the twin by these rules, one a line. An empty text removes all rules.
inline void set_fault_plan(const std::string& rules) {
    CHECK(call<int>("gdrkit_twin_faults", ("gdrkit-faults 1\n" + rules + "\n").c_str()) == 0);
}

inline std::string read_ledger() {
    std::vector<char> ledger_text(1 << 16);
    CHECK(call<int>("gdrkit_twin_ledger", ledger_text.data(), ledger_text.size()) > 0);
    return ledger_text.data();
}

inline int register_file(int fd, FileHandle* handle) {
    Description description{};
    description.type = opaque_fd;
    description.handle.fd = fd;
    return call_for_status("cuFileHandleRegister", handle, &description);
}

inline void* to_pointer(u64 address) {
    return reinterpret_cast<void*>(address);
}

inline ssize_t read_file(FileHandle file, u64 buffer, std::size_t length_bytes, off_t file_offset = 0,
                         off_t buffer_offset = 0) {
    return call<ssize_t>("cuFileRead", file, to_pointer(buffer), length_bytes, file_offset, buffer_offset);
}

inline ssize_t write_file(FileHandle file, u64 buffer, std::size_t length_bytes, off_t file_offset = 0,
                          off_t buffer_offset = 0) {
    return call<ssize_t>("cuFileWrite", file, static_cast<const void*>(to_pointer(buffer)), length_bytes, file_offset,
                         buffer_offset);
}

// A registered temporary file, which first has the content `initial_bytes`, and device memory of the same size. The
// constructor opens the driver. The destructor closes the driver and checks that no handles are left.
struct TestFile {
    static constexpr std::size_t length_bytes = 1 << 18;
    std::vector<unsigned char> initial_bytes = cuda::make_pattern(length_bytes, 7);
    int fd = -1;
    FileHandle file = nullptr;
    u64 memory = 0;

    TestFile() {
        cuda::use_primary_context();
        std::string file_path = GDRKIT_DISK "/cufile-XXXXXX";
        const int buffered_fd = mkstemp(file_path.data());
        CHECK(buffered_fd >= 0 &&
              pwrite(buffered_fd, initial_bytes.data(), length_bytes, 0) == static_cast<ssize_t>(length_bytes));
        fd = open(file_path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        CHECK(fd >= 0);
        close(buffered_fd);
        CHECK(unlink(file_path.c_str()) == 0);
        memory = cuda::allocate(length_bytes);
        EXPECT_STATUS(success, "cuFileDriverOpen");
        CHECK(register_file(fd, &file) == success);
    }
    TestFile(const TestFile&) = delete;
    TestFile& operator=(const TestFile&) = delete;
    ~TestFile() {
        set_fault_plan("");
        call<void>("cuFileHandleDeregister", file);
        EXPECT_STATUS(success, "cuFileDriverClose");
        close(fd);
        CHECK(cuda::call_driver("cuMemFree_v2", memory) == cuda::success);
        CHECK(read_ledger().find("\"handles\":{}") != std::string::npos);
    }

    [[nodiscard]] std::vector<unsigned char> device_content() const { return cuda::read_device(memory, length_bytes); }
    [[nodiscard]] std::vector<unsigned char> file_content() const {
        std::vector<unsigned char> content(length_bytes);
        // The file has no name anymore, and `fd` allows only direct I/O, so open the file again through /proc.
        const std::string file_path = "/proc/self/fd/" + std::to_string(fd);
        const int buffered_fd = open(file_path.c_str(), O_RDONLY | O_CLOEXEC);
        CHECK(pread(buffered_fd, content.data(), length_bytes, 0) == static_cast<ssize_t>(length_bytes));
        close(buffered_fd);
        return content;
    }
};

} // namespace gdrkit::twin::cufile
