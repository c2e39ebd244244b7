// Tests of the software twin of libcuda: memory that processes share by CUDA IPC. In the first test, another process
// owns the memory and this process imports it. The other tests use handles of this process.
#include <sys/mman.h>

#include <cstring>

#include "cuda_peer.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr unsigned lazy_peer_access = ipc_lazy_enable_peer_access;

// The owner and the importer send each other these messages.
constexpr char importer_has_written = 'w', owner_has_freed = 'f', importer_has_closed = 'c';

IpcHandle get_handle(u64 pointer) {
    IpcHandle handle{};
    EXPECT_SUCCESS("cuIpcGetMemHandle", &handle, pointer);
    return handle;
}

// The owning process runs this function. It sends handles, and frees the memory after the importer has written to it.
int run_owner(int socket) {
    use_primary_context();
    const u64 small_memory = allocate(5000), large_memory = allocate(3 << 20);
    write_device(large_memory, make_pattern(3 << 20, 1));
    // All addresses of an allocation have the same handle.
    const IpcHandle handle = get_handle(large_memory), second_page_handle = get_handle(large_memory + 4096);
    CHECK(std::memcmp(&handle, &second_page_handle, sizeof handle) == 0);
    // A process cannot open a handle of its own memory.
    u64 opened_pointer = 0;
    EXPECT_RESULT(invalid_context, "cuIpcOpenMemHandle_v2", &opened_pointer, handle, lazy_peer_access);
    send_value(socket, handle);
    send_value(socket, get_handle(small_memory));
    CHECK(receive_value<char>(socket) == importer_has_written);
    CHECK(read_device(large_memory + 7, 100) == make_pattern(100, 2));
    const u64 free_bytes_before = query_free_memory();
    EXPECT_SUCCESS("cuMemFree_v2", large_memory);
    CHECK(query_free_memory() == free_bytes_before); // the importer still references the memory
    send_value(socket, owner_has_freed);
    CHECK(receive_value<char>(socket) == importer_has_closed);
    CHECK(wait_for_free_memory(free_bytes_before + (3 << 20)));
    send_value(socket, get_handle(small_memory));
    receive_value<char>(socket); // never returns, because the test kills this process here
    return 1;
}

void test_imported_memory_outlives_free_by_owner() {
    ChildProcess owner;
    const int socket = owner.socket();
    use_primary_context();
    const auto handle = receive_value<IpcHandle>(socket), small_handle = receive_value<IpcHandle>(socket);
    u64 pointer = 0, pointer_again = 0;
    EXPECT_SUCCESS("cuIpcOpenMemHandle_v2", &pointer, handle, lazy_peer_access);
    EXPECT_SUCCESS("cuIpcOpenMemHandle", &pointer_again, handle, lazy_peer_access);
    CHECK(pointer == pointer_again);
    CHECK(read_device(pointer, 3 << 20) == make_pattern(3 << 20, 1));
    write_device(pointer + 7, make_pattern(100, 2));
    EXPECT_RESULT(invalid_value, "cuMemsetD8_v2", pointer, static_cast<unsigned char>(1), u64{(3 << 20) + 1});
    // An H200 refuses these functions for imported memory.
    int fd = -1;
    IpcHandle exported_handle{};
    EXPECT_RESULT(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
                  range_handle_dmabuf, u64{0});
    EXPECT_RESULT(invalid_value, "cuIpcGetMemHandle", &exported_handle, pointer);
    EXPECT_RESULT(invalid_value, "cuMemFree_v2", pointer);
    CHECK(query_buffer_id(pointer) != 0);
    // The address range of a small imported allocation begins at its pointer, even if the pointer is inside of a page.
    u64 small_pointer = 0, base = 0, length_bytes = 0;
    EXPECT_SUCCESS("cuIpcOpenMemHandle_v2", &small_pointer, small_handle, lazy_peer_access);
    EXPECT_SUCCESS("cuMemGetAddressRange_v2", &base, &length_bytes, small_pointer);
    CHECK(base == small_pointer && length_bytes == 5000);
    EXPECT_SUCCESS("cuIpcCloseMemHandle", small_pointer);
    send_value(socket, importer_has_written);
    CHECK(receive_value<char>(socket) == owner_has_freed);
    // The owner has freed the memory. The mapping of the importer stays valid, but the handle cannot be opened again.
    CHECK(read_device(pointer + 7, 100) == make_pattern(100, 2));
    EXPECT_SUCCESS("cuIpcCloseMemHandle", pointer_again);
    CHECK(read_device(pointer + 7, 1) == make_pattern(1, 2));
    EXPECT_SUCCESS("cuIpcCloseMemHandle", pointer);
    u64 buffer_id = 0;
    EXPECT_RESULT(invalid_value, "cuPointerGetAttribute", static_cast<void*>(&buffer_id),
                  static_cast<int>(pointer_buffer_id), pointer);
    EXPECT_RESULT(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, handle, lazy_peer_access);
    send_value(socket, importer_has_closed);
    const auto handle_of_killed_owner = receive_value<IpcHandle>(socket);
    owner.kill_and_wait();
    EXPECT_RESULT(invalid_handle, "cuIpcOpenMemHandle_v2", &pointer, handle_of_killed_owner, lazy_peer_access);
}

void test_invalid_handles_are_refused() {
    const u64 memory = allocate(100);
    const IpcHandle valid_handle = get_handle(memory);
    u64 pointer = 0;
    IpcHandle zero_handle{};
    EXPECT_RESULT(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, zero_handle, lazy_peer_access);
    // The flag CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is required.
    EXPECT_RESULT(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, valid_handle, 0U);
    // A handle with one changed bit is refused, because its checksum is wrong.
    for (std::size_t index = 0; index < sizeof valid_handle.reserved; ++index) {
        IpcHandle corrupted_handle = valid_handle;
        corrupted_handle.reserved[index] ^= 0x40;
        EXPECT_RESULT(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, corrupted_handle, lazy_peer_access);
    }
    EXPECT_RESULT(invalid_value, "cuIpcCloseMemHandle", memory);
    IpcHandle handle{};
    EXPECT_RESULT(invalid_value, "cuIpcGetMemHandle", &handle, u64{0x1000});
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

// Return a copy of a handle in which this test program is the owner instead of the twin. The test program is linked
// with a control service of its own, so cuIpcOpenMemHandle then sends its request to a handler of this test.
// HandleMessage (cuda/ipc_handle.hpp) is the layout of a handle; its checksum is FNV-1a.
IpcHandle redirect_to_this_process(IpcHandle handle) {
    constexpr std::size_t owner_offset = 8, checksum_offset = 56;
    const std::uint64_t service_id = read_control_service_id();
    std::memcpy(&handle.reserved[owner_offset], &service_id, sizeof service_id);
    std::uint64_t checksum = 0xcbf29ce484222325;
    for (std::size_t index = 0; index < checksum_offset; ++index) {
        checksum = (checksum ^ static_cast<unsigned char>(handle.reserved[index])) * 0x100000001b3;
    }
    std::memcpy(&handle.reserved[checksum_offset], &checksum, sizeof checksum);
    return handle;
}

// The importer refuses memory whose file the owner could truncate, because the size of the file is not sealed.
void test_untrusted_owner_is_refused() {
    bool is_sealed = false;
    register_handler(cuda_ipc_request, [&](auto, auto* reply, auto* fds) {
        struct { // the layout of ReplyMessage in cuda/ipc.cpp
            u64 length_bytes = 100, memory_offset = 0, memory_bytes = 4096;
            std::int32_t physical_number = 0;
            std::uint32_t is_found = 1;
        } reply_message;
        reply->resize(sizeof reply_message);
        std::memcpy(reply->data(), &reply_message, sizeof reply_message);
        fds->emplace_back(is_sealed ? make_device_memory(4096)
                                    : memfd_create("gdrkit-gpu:0123456789abcdef", MFD_CLOEXEC));
        CHECK(is_sealed || ftruncate(fds->back().get(), 4096) == 0);
    });
    const u64 memory = allocate(100);
    const IpcHandle handle = redirect_to_this_process(get_handle(memory));
    u64 pointer = 0;
    EXPECT_RESULT(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, handle, lazy_peer_access);
    is_sealed = true;
    EXPECT_SUCCESS("cuIpcOpenMemHandle_v2", &pointer, handle, lazy_peer_access);
    EXPECT_SUCCESS("cuIpcCloseMemHandle", pointer);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 3) {
        return run_owner(std::atoi(arguments[2]));
    }
    test_imported_memory_outlives_free_by_owner();
    test_invalid_handles_are_refused();
    test_untrusted_owner_is_refused();
}
