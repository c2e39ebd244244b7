// Tests of the software twin of libcufile (GPUDirect Storage): reads and writes between files and memory, and the
// arguments that the twin refuses.
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;

void test_data_is_read_and_written() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, test_file.memory, TestFile::length_bytes) ==
          static_cast<ssize_t>(TestFile::length_bytes));
    CHECK(test_file.device_content() == test_file.initial_bytes);
    // Read an odd number of bytes from an odd file offset to an odd memory offset.
    CHECK(read_file(test_file.file, test_file.memory, 1001, 77, 13) == 1001);
    CHECK(cuda::read_device(test_file.memory + 13, 1001) ==
          std::vector(test_file.initial_bytes.begin() + 77, test_file.initial_bytes.begin() + 77 + 1001));
    const auto new_data = cuda::make_pattern(3 * page_bytes, 99);
    cuda::write_device(test_file.memory, new_data);
    CHECK(write_file(test_file.file, test_file.memory, new_data.size(), page_bytes) ==
          static_cast<ssize_t>(new_data.size()));
    auto expected_content = test_file.initial_bytes;
    std::copy(new_data.begin(), new_data.end(), expected_content.begin() + page_bytes);
    CHECK(test_file.file_content() == expected_content);
}

void test_short_read_at_end_of_file() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, test_file.memory, 2 * page_bytes, TestFile::length_bytes - page_bytes) ==
          page_bytes);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, TestFile::length_bytes) == 0);
    CHECK(read_file(test_file.file, test_file.memory, 0) == 0);
}

void test_vectors_are_filled_in_order() {
    const TestFile test_file;
    const IoVector vectors[] = {{to_pointer(test_file.memory + 8 * page_bytes), page_bytes},
                                {to_pointer(test_file.memory), 2 * page_bytes}};
    const IoVector* const first_vector = vectors;
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first_vector, std::size_t{2}, off_t{page_bytes}, 0U) ==
          3 * page_bytes);
    CHECK(cuda::read_device(test_file.memory + 8 * page_bytes, page_bytes) ==
          std::vector(test_file.initial_bytes.begin() + page_bytes, test_file.initial_bytes.begin() + 2 * page_bytes));
    CHECK(cuda::read_device(test_file.memory, 2 * page_bytes) ==
          std::vector(test_file.initial_bytes.begin() + 2 * page_bytes,
                      test_file.initial_bytes.begin() + 4 * page_bytes));
    // The call needs at least one vector, and its flags must be 0.
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first_vector, std::size_t{0}, off_t{0}, 0U) == -invalid_value);
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first_vector, std::size_t{2}, off_t{0}, 1U) == -invalid_value);
}

void test_data_is_read_into_host_memory() {
    const TestFile test_file;
    std::vector<unsigned char> host_bytes(TestFile::length_bytes);
    CHECK(read_file(test_file.file, reinterpret_cast<u64>(host_bytes.data()), host_bytes.size()) ==
          static_cast<ssize_t>(host_bytes.size()));
    CHECK(host_bytes == test_file.initial_bytes);
}

void test_invalid_arguments_are_refused() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, 0, page_bytes) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, -1) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, 0, -1) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, SIZE_MAX) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, INT64_MAX) == -invalid_value);
    CHECK(read_file(to_pointer(test_file.memory), test_file.memory, page_bytes) == -handle_not_registered);
    CHECK(read_file(test_file.file, test_file.memory, TestFile::length_bytes + page_bytes) ==
          -cuda_pointer_range_error);
    const u64 freed_memory = cuda::allocate(page_bytes);
    CHECK(cuda::call_driver("cuMemFree_v2", freed_memory) == cuda::success);
    CHECK(read_file(test_file.file, freed_memory, page_bytes) < 0);
}

void test_transfer_beyond_registered_buffer_is_refused() {
    const TestFile test_file;
    const auto* const base = static_cast<const void*>(to_pointer(test_file.memory));
    EXPECT_STATUS(invalid_value, "cuFileBufRegister", base, std::size_t{0}, 0);
    EXPECT_STATUS(invalid_value, "cuFileBufRegister", base, std::size_t{page_bytes}, 8); // 8 is not a flag
    // Registration and deregistration fail in a thread without a current context.
    std::thread([base] {
        EXPECT_STATUS(cuda_driver_error, "cuFileBufRegister", base, std::size_t{page_bytes}, 0);
    }).join();
    EXPECT_STATUS(success, "cuFileBufRegister", base, std::size_t{2 * page_bytes}, 0);
    std::thread([base] { EXPECT_STATUS(cuda_driver_error, "cuFileBufDeregister", base); }).join();
    EXPECT_STATUS(memory_not_registered, "cuFileBufDeregister",
                  static_cast<const void*>(to_pointer(test_file.memory + page_bytes)));
    EXPECT_STATUS(memory_already_registered, "cuFileBufRegister", base, std::size_t{page_bytes}, 0);
    CHECK(read_file(test_file.file, test_file.memory, 2 * page_bytes) == 2 * page_bytes);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes, 0, page_bytes + 1) == -invalid_mapping_range);
    EXPECT_STATUS(success, "cuFileBufDeregister", base);
    // A second deregistration aborts the process.
    const int status = cuda::run_in_child([base] { call_for_status("cuFileBufDeregister", base); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_freed_buffer_is_refused() {
    const TestFile test_file;
    const u64 memory = cuda::allocate(page_bytes);
    EXPECT_STATUS(success, "cuFileBufRegister", static_cast<const void*>(to_pointer(memory)), std::size_t{page_bytes},
                  0);
    CHECK(cuda::call_driver("cuMemFree_v2", memory) == cuda::success);
    CHECK(read_file(test_file.file, memory, page_bytes) < 0);
    EXPECT_STATUS(success, "cuFileBufDeregister", static_cast<const void*>(to_pointer(memory)));
}

void test_reused_descriptor_is_refused() {
    TestFile test_file;
    // The test makes the file descriptor of a registered file refer to another file. That file is on the same file
    // system, so only the inode numbers differ.
    std::string other_path = GDRKIT_DISK "/cufile-XXXXXX";
    const int other_fd = mkstemp(other_path.data());
    CHECK(other_fd >= 0 && unlink(other_path.c_str()) == 0);
    const int saved_fd = dup(test_file.fd);
    CHECK(dup3(other_fd, test_file.fd, O_CLOEXEC) == test_file.fd);
    errno = 0;
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == -1 && errno == EBADF);
    CHECK(dup3(saved_fd, test_file.fd, O_CLOEXEC) == test_file.fd);
    CHECK(read_file(test_file.file, test_file.memory, page_bytes) == page_bytes);
    close(other_fd);
    close(saved_fd);
}

void test_only_files_on_disks_are_registered() {
    const TestFile test_file;
    FileHandle handle = nullptr;
    const int directory_fd = open("/", O_RDONLY | O_CLOEXEC);
    CHECK(register_file(directory_fd, &handle) == invalid_file_type);
    close(directory_fd);
    const int memfd = memfd_create("none", MFD_CLOEXEC); // a file in a tmpfs
    CHECK(register_file(memfd, &handle) == handle_not_registered);
    close(memfd);
    CHECK(register_file(999'999, &handle) == invalid_value); // not an open descriptor
    CHECK(register_file(test_file.fd, &handle) == handle_already_registered);
    CHECK(handle == nullptr);
}

void test_deregister_of_invalid_handle_aborts() {
    const TestFile test_file;
    const int status = cuda::run_in_child([] { call<void>("cuFileHandleDeregister", to_pointer(0x1234)); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main() {
    test_data_is_read_and_written();
    test_short_read_at_end_of_file();
    test_vectors_are_filled_in_order();
    test_data_is_read_into_host_memory();
    test_invalid_arguments_are_refused();
    test_transfer_beyond_registered_buffer_is_refused();
    test_freed_buffer_is_refused();
    test_reused_descriptor_is_refused();
    test_only_files_on_disks_are_registered();
    test_deregister_of_invalid_handle_aborts();
}
