// Reads and writes between files and memory, and everything that is refused.
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

void bytes_arrive_and_go_back() {
    const Scene scene;
    CHECK(read_file(scene.file, scene.memory, Scene::length_bytes) == static_cast<ssize_t>(Scene::length_bytes));
    CHECK(scene.on_device() == scene.bytes);
    // Odd numbers, to a place inside the memory.
    CHECK(read_file(scene.file, scene.memory, 1001, 77, 13) == 1001);
    CHECK(cuda::read_device(scene.memory + 13, 1001) ==
          std::vector(scene.bytes.begin() + 77, scene.bytes.begin() + 77 + 1001));
    const auto other = cuda::pattern(3 * page, 99);
    cuda::write_device(scene.memory, other);
    CHECK(write_file(scene.file, scene.memory, other.size(), page) == static_cast<ssize_t>(other.size()));
    auto expected = scene.bytes;
    std::copy(other.begin(), other.end(), expected.begin() + page);
    CHECK(scene.on_disk() == expected);
}

void the_end_of_a_file_is_a_count() {
    const Scene scene;
    CHECK(read_file(scene.file, scene.memory, 2 * page, Scene::length_bytes - page) == page);
    CHECK(read_file(scene.file, scene.memory, page, Scene::length_bytes) == 0);
    CHECK(read_file(scene.file, scene.memory, 0) == 0);
}

void vectors_follow_each_other() {
    const Scene scene;
    const IoVector vectors[] = {{pointer(scene.memory + 8 * page), page}, {pointer(scene.memory), 2 * page}};
    const IoVector* const first = vectors;
    CHECK(call<ssize_t>("cuFileReadv", scene.file, first, std::size_t{2}, off_t{page}, 0U) == 3 * page);
    CHECK(cuda::read_device(scene.memory + 8 * page, page) ==
          std::vector(scene.bytes.begin() + page, scene.bytes.begin() + 2 * page));
    CHECK(cuda::read_device(scene.memory, 2 * page) ==
          std::vector(scene.bytes.begin() + 2 * page, scene.bytes.begin() + 4 * page));
    CHECK(call<ssize_t>("cuFileReadv", scene.file, first, std::size_t{0}, off_t{0}, 0U) == -invalid_value);
    CHECK(call<ssize_t>("cuFileReadv", scene.file, first, std::size_t{2}, off_t{0}, 1U) == -invalid_value);
}

void host_memory_works_too() {
    const Scene scene;
    std::vector<unsigned char> host(Scene::length_bytes);
    CHECK(read_file(scene.file, reinterpret_cast<u64>(host.data()), host.size()) == static_cast<ssize_t>(host.size()));
    CHECK(host == scene.bytes);
}

void what_cannot_be_right_is_refused() {
    const Scene scene;
    CHECK(read_file(scene.file, 0, page) == -invalid_value);
    CHECK(read_file(scene.file, scene.memory, page, -1) == -invalid_value);
    CHECK(read_file(scene.file, scene.memory, page, 0, -1) == -invalid_value);
    CHECK(read_file(scene.file, scene.memory, SIZE_MAX) == -invalid_value);
    CHECK(read_file(scene.file, scene.memory, page, INT64_MAX) == -invalid_value);
    CHECK(read_file(pointer(scene.memory), scene.memory, page) == -handle_not_registered);
    CHECK(read_file(scene.file, scene.memory, Scene::length_bytes + page) == -cuda_pointer_range_error);
    const u64 gone = cuda::allocate(page);
    CHECK(cuda::cu("cuMemFree_v2", gone) == cuda::success);
    CHECK(read_file(scene.file, gone, page) < 0);
}

void a_registered_buffer_has_bounds() {
    const Scene scene;
    const auto* const base = static_cast<const void*>(pointer(scene.memory));
    SAYS(invalid_value, "cuFileBufRegister", base, std::size_t{0}, 0);
    SAYS(invalid_value, "cuFileBufRegister", base, std::size_t{page}, 8);
    // The driver tells a thread nothing of memory where no context is current.
    std::thread([base] { SAYS(cuda_driver_error, "cuFileBufRegister", base, std::size_t{page}, 0); }).join();
    SAYS(success, "cuFileBufRegister", base, std::size_t{2 * page}, 0);
    std::thread([base] { SAYS(cuda_driver_error, "cuFileBufDeregister", base); }).join();
    SAYS(memory_not_registered, "cuFileBufDeregister", static_cast<const void*>(pointer(scene.memory + page)));
    SAYS(memory_already_registered, "cuFileBufRegister", base, std::size_t{page}, 0);
    CHECK(read_file(scene.file, scene.memory, 2 * page) == 2 * page);
    CHECK(read_file(scene.file, scene.memory, page, 0, page + 1) == -invalid_mapping_range);
    SAYS(success, "cuFileBufDeregister", base);
    const int status = cuda::status_of_child([base] { cf("cuFileBufDeregister", base); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void a_buffer_that_was_freed_is_noticed() {
    const Scene scene;
    const u64 memory = cuda::allocate(page);
    SAYS(success, "cuFileBufRegister", static_cast<const void*>(pointer(memory)), std::size_t{page}, 0);
    CHECK(cuda::cu("cuMemFree_v2", memory) == cuda::success);
    CHECK(read_file(scene.file, memory, page) < 0);
    SAYS(success, "cuFileBufDeregister", static_cast<const void*>(pointer(memory)));
}

void a_descriptor_that_became_another_file_is_none() {
    Scene scene;
    // On the same disk.
    std::string name = GDRKIT_DISK "/cufile-XXXXXX";
    const int other = mkstemp(name.data());
    CHECK(other >= 0 && unlink(name.c_str()) == 0);
    const int kept = dup(scene.fd);
    CHECK(dup3(other, scene.fd, O_CLOEXEC) == scene.fd);
    errno = 0;
    CHECK(read_file(scene.file, scene.memory, page) == -1 && errno == EBADF);
    CHECK(dup3(kept, scene.fd, O_CLOEXEC) == scene.fd);
    CHECK(read_file(scene.file, scene.memory, page) == page);
    close(other);
    close(kept);
}

void only_files_on_disks_are_registered() {
    const Scene scene;
    FileHandle handle = nullptr;
    const int folder = open("/", O_RDONLY | O_CLOEXEC);
    CHECK(register_file(folder, &handle) == invalid_file_type);
    close(folder);
    const int memory = memfd_create("none", MFD_CLOEXEC);
    CHECK(register_file(memory, &handle) == handle_not_registered);
    close(memory);
    CHECK(register_file(999'999, &handle) == invalid_value);
    CHECK(register_file(scene.fd, &handle) == handle_already_registered);
    CHECK(handle == nullptr);
}

void a_handle_is_given_back_once() {
    const Scene scene;
    const int status = cuda::status_of_child([] { call<void>("cuFileHandleDeregister", pointer(0x1234)); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main() {
    bytes_arrive_and_go_back();
    the_end_of_a_file_is_a_count();
    vectors_follow_each_other();
    host_memory_works_too();
    what_cannot_be_right_is_refused();
    a_registered_buffer_has_bounds();
    a_buffer_that_was_freed_is_noticed();
    a_descriptor_that_became_another_file_is_none();
    only_files_on_disks_are_registered();
    a_handle_is_given_back_once();
}
