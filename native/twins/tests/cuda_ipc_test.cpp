// CUDA IPC between two processes. The peer owns the memory, this process opens it, then the other way round.
#include <sys/mman.h>

#include <cstring>

#include "cuda_peer.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

constexpr unsigned lazy = ipc_lazy_enable_peer_access;

IpcMemHandle handle_of(u64 pointer) {
    IpcMemHandle handle{};
    WORKS("cuIpcGetMemHandle", &handle, pointer);
    return handle;
}

// The owner: hands out handles, and frees when it is told.
int peer(int socket) {
    begin();
    const u64 first = allocate(5000), second = allocate(3 << 20);
    write_device(second, pattern(3 << 20, 1));
    const IpcMemHandle handle = handle_of(second), of_inside = handle_of(second + 4096);
    CHECK(std::memcmp(&handle, &of_inside, sizeof handle) == 0);
    u64 opened = 0;
    ANSWERS(invalid_context, "cuIpcOpenMemHandle_v2", &opened, handle, lazy);
    tell(socket, handle);
    tell(socket, handle_of(first));
    // The other side wrote.
    CHECK(hear<char>(socket) == 'w');
    CHECK(read_device(second + 7, 100) == pattern(100, 2));
    const u64 before = free_memory();
    WORKS("cuMemFree_v2", second);
    CHECK(free_memory() == before); // the importer holds it
    tell(socket, 'f');
    CHECK(hear<char>(socket) == 'c');
    CHECK(comes_to_have_free(before + (3 << 20)));
    tell(socket, handle_of(first));
    hear<char>(socket); // killed here
    return 1;
}

void importer() {
    Peer owner;
    const int socket = owner.socket();
    begin();
    const auto handle = hear<IpcMemHandle>(socket), small = hear<IpcMemHandle>(socket);
    u64 pointer = 0, again = 0;
    WORKS("cuIpcOpenMemHandle_v2", &pointer, handle, lazy);
    WORKS("cuIpcOpenMemHandle", &again, handle, lazy);
    CHECK(pointer == again);
    CHECK(read_device(pointer, 3 << 20) == pattern(3 << 20, 1));
    write_device(pointer + 7, pattern(100, 2));
    ANSWERS(invalid_value, "cuMemsetD8_v2", pointer, static_cast<unsigned char>(1), u64{(3 << 20) + 1});
    // What an H200 refuses for imported memory.
    int fd = -1;
    IpcMemHandle other{};
    ANSWERS(invalid_value, "cuMemGetHandleForAddressRange", static_cast<void*>(&fd), pointer, u64{4096},
            range_handle_dmabuf, u64{0});
    ANSWERS(invalid_value, "cuIpcGetMemHandle", &other, pointer);
    ANSWERS(invalid_value, "cuMemFree_v2", pointer);
    CHECK(buffer_id(pointer) != 0);
    // A small allocation lies where it lay in its page.
    u64 small_pointer = 0, base = 0, length = 0;
    WORKS("cuIpcOpenMemHandle_v2", &small_pointer, small, lazy);
    WORKS("cuMemGetAddressRange_v2", &base, &length, small_pointer);
    CHECK(base == small_pointer && length == 5000);
    WORKS("cuIpcCloseMemHandle", small_pointer);
    tell(socket, 'w');
    CHECK(hear<char>(socket) == 'f');
    // Freed by its owner, alive here, and not to be opened again.
    CHECK(read_device(pointer + 7, 100) == pattern(100, 2));
    WORKS("cuIpcCloseMemHandle", again);
    CHECK(read_device(pointer + 7, 1) == pattern(1, 2));
    WORKS("cuIpcCloseMemHandle", pointer);
    u64 value = 0;
    ANSWERS(invalid_value, "cuPointerGetAttribute", static_cast<void*>(&value), static_cast<int>(pointer_buffer_id),
            pointer);
    ANSWERS(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, handle, lazy);
    tell(socket, 'c');
    const auto last = hear<IpcMemHandle>(socket);
    owner.die();
    ANSWERS(invalid_handle, "cuIpcOpenMemHandle_v2", &pointer, last, lazy);
}

void strange_handles() {
    const u64 memory = allocate(100);
    const IpcMemHandle good = handle_of(memory);
    u64 pointer = 0;
    IpcMemHandle zero{};
    ANSWERS(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, zero, lazy);
    ANSWERS(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, good, 0U);
    for (std::size_t at = 0; at < sizeof good.reserved; ++at) {
        IpcMemHandle bad = good;
        bad.reserved[at] ^= 0x40;
        ANSWERS(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, bad, lazy);
    }
    ANSWERS(invalid_value, "cuIpcCloseMemHandle", memory);
    IpcMemHandle handle{};
    ANSWERS(invalid_value, "cuIpcGetMemHandle", &handle, u64{0x1000});
    WORKS("cuMemFree_v2", memory);
}

// The handle, changed to come from the control service of this test instead of the driver's.
IpcMemHandle from_this_test(IpcMemHandle handle) {
    constexpr std::size_t owner_at = 8, checksum_at = 56;
    const std::uint64_t owner = control_name();
    std::memcpy(&handle.reserved[owner_at], &owner, sizeof owner);
    std::uint64_t hash = 0xcbf29ce484222325;
    for (std::size_t at = 0; at < checksum_at; ++at) {
        hash = (hash ^ static_cast<unsigned char>(handle.reserved[at])) * 0x100000001b3;
    }
    std::memcpy(&handle.reserved[checksum_at], &hash, sizeof hash);
    return handle;
}

// An owner that hands out a file which it could shorten under the importer is not believed.
void strange_owners() {
    bool sealed = false;
    serve(ask_cuda_ipc, [&](auto, auto* reply, auto* fds) {
        struct {
            u64 length_bytes = 100, memory_offset = 0, memory_bytes = 4096;
            std::int32_t device = 0;
            std::uint32_t found = 1;
        } wire;
        reply->resize(sizeof wire);
        std::memcpy(reply->data(), &wire, sizeof wire);
        fds->emplace_back(sealed ? make_device_memory(4096) : memfd_create("gdrkit-gpu:0123456789abcdef", MFD_CLOEXEC));
        CHECK(sealed || ftruncate(fds->back().get(), 4096) == 0);
    });
    const u64 memory = allocate(100);
    const IpcMemHandle handle = from_this_test(handle_of(memory));
    u64 pointer = 0;
    ANSWERS(invalid_value, "cuIpcOpenMemHandle_v2", &pointer, handle, lazy);
    sealed = true;
    WORKS("cuIpcOpenMemHandle_v2", &pointer, handle, lazy);
    WORKS("cuIpcCloseMemHandle", pointer);
    WORKS("cuMemFree_v2", memory);
}

} // namespace

int main(int count, char** arguments) {
    if (count == 3) {
        return peer(std::atoi(arguments[2]));
    }
    importer();
    strange_handles();
    strange_owners();
}
