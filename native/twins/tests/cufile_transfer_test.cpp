// Tests of reads and writes between files and memory, and of all refused arguments.
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

void test_read_and_write() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, test_file.memory, TestFile::length_bytes) ==
          static_cast<ssize_t>(TestFile::length_bytes));
    CHECK(test_file.on_device() == test_file.bytes);
    // Odd sizes, and an offset into the memory.
    CHECK(read_file(test_file.file, test_file.memory, 1001, 77, 13) == 1001);
    CHECK(cuda::read_device(test_file.memory + 13, 1001) ==
          std::vector(test_file.bytes.begin() + 77, test_file.bytes.begin() + 77 + 1001));
    const auto other = cuda::pattern(3 * page, 99);
    cuda::write_device(test_file.memory, other);
    CHECK(write_file(test_file.file, test_file.memory, other.size(), page) == static_cast<ssize_t>(other.size()));
    auto expected = test_file.bytes;
    std::copy(other.begin(), other.end(), expected.begin() + page);
    CHECK(test_file.on_disk() == expected);
}

void test_short_read_at_end_of_file() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, test_file.memory, 2 * page, TestFile::length_bytes - page) == page);
    CHECK(read_file(test_file.file, test_file.memory, page, TestFile::length_bytes) == 0);
    CHECK(read_file(test_file.file, test_file.memory, 0) == 0);
}

void test_vectored_transfers() {
    const TestFile test_file;
    const IoVector vectors[] = {{pointer(test_file.memory + 8 * page), page}, {pointer(test_file.memory), 2 * page}};
    const IoVector* const first = vectors;
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first, std::size_t{2}, off_t{page}, 0U) == 3 * page);
    CHECK(cuda::read_device(test_file.memory + 8 * page, page) ==
          std::vector(test_file.bytes.begin() + page, test_file.bytes.begin() + 2 * page));
    CHECK(cuda::read_device(test_file.memory, 2 * page) ==
          std::vector(test_file.bytes.begin() + 2 * page, test_file.bytes.begin() + 4 * page));
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first, std::size_t{0}, off_t{0}, 0U) == -invalid_value);
    CHECK(call<ssize_t>("cuFileReadv", test_file.file, first, std::size_t{2}, off_t{0}, 1U) == -invalid_value);
}

void test_host_memory() {
    const TestFile test_file;
    std::vector<unsigned char> host(TestFile::length_bytes);
    CHECK(read_file(test_file.file, reinterpret_cast<u64>(host.data()), host.size()) ==
          static_cast<ssize_t>(host.size()));
    CHECK(host == test_file.bytes);
}

void test_invalid_arguments_are_refused() {
    const TestFile test_file;
    CHECK(read_file(test_file.file, 0, page) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page, -1) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page, 0, -1) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, SIZE_MAX) == -invalid_value);
    CHECK(read_file(test_file.file, test_file.memory, page, INT64_MAX) == -invalid_value);
    CHECK(read_file(pointer(test_file.memory), test_file.memory, page) == -handle_not_registered);
    CHECK(read_file(test_file.file, test_file.memory, TestFile::length_bytes + page) == -cuda_pointer_range_error);
    const u64 freed = cuda::allocate(page);
    CHECK(cuda::cu("cuMemFree_v2", freed) == cuda::success);
    CHECK(read_file(test_file.file, freed, page) < 0);
}

void test_registered_buffer_bounds() {
    const TestFile test_file;
    const auto* const base = static_cast<const void*>(pointer(test_file.memory));
    EXPECT_STATUS(invalid_value, "cuFileBufRegister", base, std::size_t{0}, 0);
    EXPECT_STATUS(invalid_value, "cuFileBufRegister", base, std::size_t{page}, 8);
    // The driver reports no ranges to a thread without a current context.
    std::thread([base] { EXPECT_STATUS(cuda_driver_error, "cuFileBufRegister", base, std::size_t{page}, 0); }).join();
    EXPECT_STATUS(success, "cuFileBufRegister", base, std::size_t{2 * page}, 0);
    std::thread([base] { EXPECT_STATUS(cuda_driver_error, "cuFileBufDeregister", base); }).join();
    EXPECT_STATUS(memory_not_registered, "cuFileBufDeregister",
                  static_cast<const void*>(pointer(test_file.memory + page)));
    EXPECT_STATUS(memory_already_registered, "cuFileBufRegister", base, std::size_t{page}, 0);
    CHECK(read_file(test_file.file, test_file.memory, 2 * page) == 2 * page);
    CHECK(read_file(test_file.file, test_file.memory, page, 0, page + 1) == -invalid_mapping_range);
    EXPECT_STATUS(success, "cuFileBufDeregister", base);
    const int status = cuda::status_of_child([base] { call_control("cuFileBufDeregister", base); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_freed_buffer_is_refused() {
    const TestFile test_file;
    const u64 memory = cuda::allocate(page);
    EXPECT_STATUS(success, "cuFileBufRegister", static_cast<const void*>(pointer(memory)), std::size_t{page}, 0);
    CHECK(cuda::cu("cuMemFree_v2", memory) == cuda::success);
    CHECK(read_file(test_file.file, memory, page) < 0);
    EXPECT_STATUS(success, "cuFileBufDeregister", static_cast<const void*>(pointer(memory)));
}

void test_reused_descriptor_is_refused() {
    TestFile test_file;
    // On the same file system.
    std::string name = GDRKIT_DISK "/cufile-XXXXXX";
    const int other = mkstemp(name.data());
    CHECK(other >= 0 && unlink(name.c_str()) == 0);
    const int saved_fd = dup(test_file.fd);
    CHECK(dup3(other, test_file.fd, O_CLOEXEC) == test_file.fd);
    errno = 0;
    CHECK(read_file(test_file.file, test_file.memory, page) == -1 && errno == EBADF);
    CHECK(dup3(saved_fd, test_file.fd, O_CLOEXEC) == test_file.fd);
    CHECK(read_file(test_file.file, test_file.memory, page) == page);
    close(other);
    close(saved_fd);
}

void test_only_files_on_disks_are_registered() {
    const TestFile test_file;
    FileHandle handle = nullptr;
    const int folder = open("/", O_RDONLY | O_CLOEXEC);
    CHECK(register_file(folder, &handle) == invalid_file_type);
    close(folder);
    const int memory = memfd_create("none", MFD_CLOEXEC);
    CHECK(register_file(memory, &handle) == handle_not_registered);
    close(memory);
    CHECK(register_file(999'999, &handle) == invalid_value);
    CHECK(register_file(test_file.fd, &handle) == handle_already_registered);
    CHECK(handle == nullptr);
}

void test_second_deregister_aborts() {
    const TestFile test_file;
    const int status = cuda::status_of_child([] { call<void>("cuFileHandleDeregister", pointer(0x1234)); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main() {
    test_read_and_write();
    test_short_read_at_end_of_file();
    test_vectored_transfers();
    test_host_memory();
    test_invalid_arguments_are_refused();
    test_registered_buffer_bounds();
    test_freed_buffer_is_refused();
    test_reused_descriptor_is_refused();
    test_only_files_on_disks_are_registered();
    test_second_deregister_aborts();
}
