// Tests of a software twin of libcudart (the CUDA runtime): devices and contexts, memory and copies, streams and
// events, errors of threads, IPC, and kernels, which the twin refuses.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;
using cuda::Handle;
using cuda::make_pattern;

namespace {

constexpr unsigned char canary = 0xee;

// Blocks a stream until open() is called.
class Gate {
public:
    Gate(const char* launch_symbol, u64 stream) {
        EXPECT_OK(launch_symbol, stream, &Gate::wait, static_cast<void*>(this));
    }
    void open() {
        is_open_ = true;
        is_open_.notify_all();
    }

private:
    static void wait(void* self) { static_cast<Gate*>(self)->is_open_.wait(false); }
    std::atomic<bool> is_open_{false};
};

int get_selected_device() {
    int device = -1;
    EXPECT_OK("cudaGetDevice", &device);
    return device;
}

void test_versions_and_devices() {
    int version = 0, device_count = 0, major = 0, can_access = 0;
    EXPECT_OK("cudaRuntimeGetVersion", &version);
    CHECK(version / 1000 == GDRKIT_CUDART_MAJOR);
    EXPECT_OK("cudaDriverGetVersion", &version);
    CHECK(version == cuda::driver_version);
    EXPECT_OK("cudaGetDeviceCount", &device_count);
    CHECK(device_count == 2 && get_selected_device() == 0);
    EXPECT_OK("cudaDeviceGetAttribute", &major, 75, 1); // cudaDevAttrComputeCapabilityMajor
    CHECK(major == 9);
    EXPECT_OK("cudaDeviceCanAccessPeer", &can_access, 0, 1);
    CHECK(can_access == 1);
    EXPECT_ERROR(invalid_device, "cudaSetDevice", 2);
    EXPECT_ERROR(invalid_device, "cudaSetDevice", -1);
    CHECK(get_selected_device() == 0);
    void* function_address = nullptr;
    EXPECT_OK("cudaGetDriverEntryPointByVersion", "cuMemAlloc", &function_address, 12000U, u64{0},
              static_cast<int*>(nullptr));
    CHECK(function_address == dlsym(cuda::driver_library(), "cuMemAlloc_v2"));
}

// cudaGetDeviceProperties returns the values of the driver, and writes nothing past the end of the structure.
void test_properties_fill_the_structure() {
    const auto query_properties = [](const char* symbol, u64 length_bytes) {
        std::vector<unsigned char> bytes(4096, canary);
        EXPECT_OK(symbol, static_cast<void*>(bytes.data()), 1);
        CHECK(std::all_of(bytes.begin() + static_cast<long>(length_bytes), bytes.end(),
                          [](unsigned char byte) { return byte == canary; }));
        DeviceProperties properties{};
        std::memcpy(static_cast<void*>(&properties), bytes.data(), length_bytes);
        return properties;
    };
    std::vector<DeviceProperties> all_properties;
    if (GDRKIT_CUDART_MAJOR == 12) {
        // Programs that were built for CUDA 11 call cudaGetDeviceProperties, with a smaller structure, which ends
        // before host_register_supported.
        all_properties = {
            query_properties("cudaGetDeviceProperties", offsetof(DeviceProperties, host_register_supported)),
            query_properties("cudaGetDeviceProperties_v2", sizeof(DeviceProperties))};
    } else {
        all_properties = {query_properties("cudaGetDeviceProperties", sizeof(DeviceProperties))};
    }
    for (const DeviceProperties& properties : all_properties) {
        char name[256] = {};
        cuda::Uuid uuid{};
        int bus_id = 0;
        cuda::call_driver("cuDeviceGetName", static_cast<char*>(name), 256, 1);
        cuda::call_driver("cuDeviceGetUuid_v2", &uuid, 1);
        EXPECT_OK("cudaDeviceGetAttribute", &bus_id, 33, 1); // cudaDevAttrPciBusId
        CHECK(std::string_view(properties.name) == name);
        CHECK(std::memcmp(properties.uuid, &uuid, sizeof uuid) == 0);
        CHECK(properties.major == 9 && properties.warp_size == 32 && properties.pci_bus_id == bus_id);
        CHECK(properties.total_global_bytes > u64{1} << 30 && properties.unified_addressing == 1);
        CHECK(properties.threads_dimensions_max[2] == 64 && properties.shared_bytes_per_block == 49152);
    }
    CHECK(all_properties.back().memory_pools_supported == 1 && all_properties.back().ipc_event_supported == 1);
    EXPECT_ERROR(invalid_device, "cudaGetDeviceProperties", static_cast<void*>(&all_properties[0]), 2);
    EXPECT_ERROR(invalid_value, "cudaGetDeviceProperties", static_cast<void*>(nullptr), 0);
}

void test_ranges_are_copied() {
    void* const memory = allocate(1000);
    const auto bytes = make_pattern(1000, 1);
    write_memory(memory, bytes);
    CHECK(read_memory(memory, 1000) == bytes);
    std::vector<unsigned char> host_bytes(1000);
    for (const char* symbol : {"cudaMemcpy", "cudaMemcpy_ptds"}) {
        std::ranges::fill(host_bytes, canary);
        EXPECT_OK(symbol, static_cast<void*>(host_bytes.data()), static_cast<const void*>(memory), u64{1000},
                  int{memcpy_default});
        CHECK(host_bytes == bytes);
    }
    EXPECT_OK("cudaMemset", memory, 0x1ee, u64{10}); // only the low byte counts, which is the canary
    CHECK(read_memory(memory, 11)[9] == canary && read_memory(memory, 11)[10] == bytes[10]);
    EXPECT_ERROR(invalid_value, "cudaMemset", memory, 0, u64{1001});
    EXPECT_ERROR(invalid_memcpy_direction, "cudaMemcpy", memory, static_cast<const void*>(host_bytes.data()), u64{1},
                 5); // not a direction
    EXPECT_ERROR(invalid_value, "cudaMemcpy", static_cast<void*>(host_bytes.data()),
                 static_cast<const void*>(host_bytes.data()), u64{1}, int{host_to_device});
    EXPECT_ERROR(invalid_value, "cudaMemcpy", memory, static_cast<const void*>(host_bytes.data()), u64{1001},
                 int{host_to_device});
    EXPECT_OK("cudaFree", memory);
    EXPECT_ERROR(invalid_value, "cudaMemcpy", memory, static_cast<const void*>(host_bytes.data()), u64{1},
                 int{host_to_device});
}

void test_rows_and_volumes_are_copied() {
    void* pitched_memory = nullptr;
    u64 pitch_bytes = 0;
    constexpr u64 width = 30, rows = 4, slices = 3;
    EXPECT_OK("cudaMallocPitch", &pitched_memory, &pitch_bytes, width, rows);
    CHECK(pitch_bytes >= width && pitch_bytes % 512 == 0);
    const auto bytes = make_pattern(width * rows * slices, 2);
    std::vector<unsigned char> read_bytes(width * rows * slices);
    for (const char* symbol : {"cudaMemcpy2D", "cudaMemcpy2D_ptds"}) {
        EXPECT_OK(symbol, pitched_memory, pitch_bytes, static_cast<const void*>(bytes.data()), width, width, rows,
                  int{host_to_device});
        EXPECT_OK(symbol, static_cast<void*>(read_bytes.data()), width, static_cast<const void*>(pitched_memory),
                  pitch_bytes, width, rows, int{device_to_host});
        CHECK(std::equal(bytes.begin(), bytes.begin() + width * rows, read_bytes.begin()));
        std::ranges::fill(read_bytes, canary);
    }
    EXPECT_ERROR(invalid_pitch_value, "cudaMemcpy2D", pitched_memory, pitch_bytes,
                 static_cast<const void*>(bytes.data()), width - 1, width, rows, int{host_to_device});
    EXPECT_ERROR(invalid_value, "cudaMemcpy2D", static_cast<void*>(read_bytes.data()), width,
                 static_cast<const void*>(pitched_memory), pitch_bytes, width, rows, int{host_to_device});
    EXPECT_OK("cudaFree", pitched_memory);
    PitchedPointer volume{};
    const Extent extent{width, rows, slices};
    EXPECT_OK("cudaMalloc3D", &volume, extent);
    CHECK(volume.x_size == width && volume.y_size == rows);
    const PitchedPointer host_volume{read_bytes.data(), width, width, rows};
    Copy3d copy{};
    copy.from = {const_cast<unsigned char*>(bytes.data()), width, width, rows};
    copy.to = volume;
    copy.extent = extent;
    copy.kind = host_to_device;
    EXPECT_OK("cudaMemcpy3D", static_cast<const Copy3d*>(&copy));
    // Each side of a Copy3d is an array, a position and memory. Copy two rows, from row 1 on, of the slices 1 and 2.
    copy = {nullptr, {0, 1, 1}, volume, nullptr, {}, host_volume, {width, 2, 2}, device_to_host};
    EXPECT_OK("cudaMemcpy3DAsync", static_cast<const Copy3d*>(&copy), u64{0});
    for (u64 slice = 0; slice < 2; ++slice) {
        const auto expected_bytes = bytes.begin() + static_cast<long>(((slice + 1) * rows + 1) * width);
        CHECK(std::equal(expected_bytes, expected_bytes + 2 * width,
                         read_bytes.begin() + static_cast<long>(slice * rows * width)));
    }
    EXPECT_OK("cudaMemset3D", volume, 7, extent);
    copy = {nullptr, {}, volume, nullptr, {}, host_volume, extent, device_to_host};
    EXPECT_OK("cudaMemcpy3D_ptds", static_cast<const Copy3d*>(&copy));
    CHECK(std::ranges::all_of(read_bytes, [](unsigned char byte) { return byte == 7; }));
    copy.from_array = &copy; // not a handle of an array
    EXPECT_ERROR(cuda::invalid_handle, "cudaMemcpy3D", static_cast<const Copy3d*>(&copy));
    EXPECT_OK("cudaFree", volume.pointer);
}

// A memset that does not fit into its volume changes nothing. A memset of host memory is done when the call returns.
void test_volumes_are_filled() {
    PitchedPointer volume{};
    EXPECT_OK("cudaMalloc3D", &volume, Extent{30, 4, 3});
    const u64 volume_bytes = volume.pitch * 4 * 3;
    const std::vector<unsigned char> bytes_before(volume_bytes, canary);
    write_memory(volume.pointer, bytes_before);
    for (const char* symbol : {"cudaMemset3D", "cudaMemset3D_ptds"}) {
        // The depth 2^62, the height 2^63, and below the pitch 2^61 make the length of the memory overflow 64 bits.
        for (const Extent extent : {Extent{30, 4, 4}, Extent{30, 2, 4}, Extent{30, 5, 2}, Extent{30, 1, u64{1} << 62},
                                    Extent{30, u64{1} << 63, 4}}) {
            EXPECT_ERROR(invalid_value, symbol, volume, 7, extent);
        }
        PitchedPointer changed_volume = volume;
        changed_volume.y_size = 0;
        EXPECT_ERROR(invalid_value, symbol, changed_volume, 7, Extent{30, 1, u64{1} << 40});
        EXPECT_OK(symbol, volume, 7, Extent{30, 0, u64{1} << 40});
        changed_volume = volume;
        changed_volume.pitch = u64{1} << 61;
        EXPECT_ERROR(invalid_value, symbol, changed_volume, 7, Extent{30, 1, 2});
        CHECK(read_memory(volume.pointer, volume_bytes) == bytes_before);
    }
    EXPECT_OK("cudaMemset3D", volume, 7, Extent{30, 2, 3});
    const auto bytes = read_memory(volume.pointer, volume_bytes);
    for (u64 index = 0; index < volume_bytes; ++index) {
        CHECK(bytes[index] == (index % volume.pitch < 30 && index / volume.pitch % 4 < 2 ? 7 : canary));
    }
    EXPECT_OK("cudaFree", volume.pointer);
    void* host_memory = nullptr;
    EXPECT_OK("cudaMallocHost", &host_memory, u64{24});
    std::memset(host_memory, canary, 24);
    EXPECT_OK("cudaMemset3D", PitchedPointer{host_memory, 2, 2, 4}, 7, Extent{2, 4, 3});
    CHECK(std::all_of(static_cast<unsigned char*>(host_memory), static_cast<unsigned char*>(host_memory) + 24,
                      [](unsigned char byte) { return byte == 7; }));
    EXPECT_OK("cudaFreeHost", host_memory);
}

// A copy of a volume between devices waits for earlier work of the other device, and later work of the other device
// waits for the copy.
void test_volumes_are_ordered_between_devices() {
    void* const first_memory = allocate(8);
    write_memory(first_memory, make_pattern(8, 6));
    u64 stream = 0;
    EXPECT_OK("cudaSetDevice", 1);
    void* const second_memory = allocate(8);
    void* pinned_memory = nullptr;
    EXPECT_OK("cudaMallocHost", &pinned_memory, u64{8});
    std::memset(pinned_memory, canary, 8);
    EXPECT_OK("cudaStreamCreateWithFlags", &stream, 1U); // cudaStreamNonBlocking
    PeerCopy3d copy{};
    // The members of a PitchedPointer are the address, the pitch, and the width and number of the rows.
    copy.from = {first_memory, 2, 2, 2};
    copy.to = {second_memory, 2, 2, 2};
    copy.to_device = 1;
    copy.extent = {2, 2, 2};
    for (const char* symbol : {"cudaMemcpy3DPeer", "cudaMemcpy3DPeer_ptds"}) {
        Gate gate("cudaLaunchHostFunc", stream);
        EXPECT_OK("cudaMemcpyAsync", second_memory, static_cast<const void*>(pinned_memory), u64{8},
                  int{memcpy_default}, stream);
        EXPECT_OK("cudaSetDevice", 0);
        std::thread opener_thread([&] { gate.open(); });
        EXPECT_OK(symbol, static_cast<const PeerCopy3d*>(&copy));
        opener_thread.join();
        EXPECT_OK("cudaSetDevice", 1);
        CHECK(read_memory(second_memory, 8) == make_pattern(8, 6));
    }
    copy.from_device = 2;
    EXPECT_ERROR(invalid_device, "cudaMemcpy3DPeer", static_cast<const PeerCopy3d*>(&copy));
    EXPECT_OK("cudaStreamDestroy", stream);
    EXPECT_OK("cudaFreeHost", pinned_memory);
    EXPECT_OK("cudaFree", second_memory);
    EXPECT_OK("cudaSetDevice", 0);
    EXPECT_OK("cudaFree", first_memory);
}

void test_devices_copy_to_each_other() {
    void* const first_memory = allocate(100);
    write_memory(first_memory, make_pattern(100, 3));
    EXPECT_OK("cudaSetDevice", 1);
    void* const second_memory = allocate(100);
    EXPECT_OK("cudaMemcpyPeer", second_memory, 1, static_cast<const void*>(first_memory), 0, u64{100});
    CHECK(read_memory(second_memory, 100) == make_pattern(100, 3));
    EXPECT_ERROR(invalid_device, "cudaMemcpyPeer", second_memory, 1, static_cast<const void*>(first_memory), 2,
                 u64{100});
    EXPECT_OK("cudaDeviceEnablePeerAccess", 0, 0U);
    EXPECT_ERROR(cuda::peer_access_already_enabled, "cudaDeviceEnablePeerAccess", 0, 0U);
    EXPECT_OK("cudaDeviceDisablePeerAccess", 0);
    EXPECT_OK("cudaFree", second_memory);
    EXPECT_OK("cudaSetDevice", 0);
    EXPECT_OK("cudaFree", first_memory);
}

void test_empty_allocations_succeed() {
    void* pointer = &pointer;
    EXPECT_OK("cudaMalloc", &pointer, u64{0});
    CHECK(pointer == nullptr);
    pointer = &pointer;
    EXPECT_OK("cudaMallocHost", &pointer, u64{0});
    CHECK(pointer == nullptr);
    EXPECT_OK("cudaFree", pointer);
    EXPECT_OK("cudaFreeHost", pointer);
    EXPECT_ERROR(memory_allocation, "cudaMalloc", &pointer, u64{1} << 60);
    EXPECT_ERROR(invalid_value, "cudaMalloc", static_cast<void**>(nullptr), u64{1});
    // The number of rows, 2^33 * 2^31, overflows 64 bits to 0.
    PitchedPointer volume{};
    EXPECT_ERROR(memory_allocation, "cudaMalloc3D", &volume, Extent{64, u64{1} << 33, u64{1} << 31});
    EXPECT_ERROR(invalid_value, "cudaFree", static_cast<void*>(&pointer));
}

void test_pointer_attributes_tell_the_type() {
    EXPECT_OK("cudaSetDevice", 1);
    void *host_memory = nullptr, *managed_memory = nullptr;
    void* const device_memory = allocate(100);
    EXPECT_OK("cudaHostAlloc", &host_memory, u64{100}, 0U);
    EXPECT_OK("cudaMallocManaged", &managed_memory, u64{100}, 1U); // cudaMemAttachGlobal
    int host_variable = 0;
    const auto query_attributes = [](void* pointer) {
        PointerAttributes attributes{};
        EXPECT_OK("cudaPointerGetAttributes", &attributes, static_cast<const void*>(pointer));
        return attributes;
    };
    CHECK(query_attributes(device_memory).type == cuda::memory_device && query_attributes(device_memory).device == 1);
    CHECK(query_attributes(device_memory).device_pointer == device_memory &&
          query_attributes(device_memory).host_pointer == nullptr);
    CHECK(query_attributes(host_memory).type == cuda::memory_host &&
          query_attributes(host_memory).host_pointer == host_memory);
    CHECK(query_attributes(managed_memory).type == memory_managed);
    CHECK(query_attributes(&host_variable).type == 0);
    EXPECT_OK("cudaHostRegister", static_cast<void*>(&host_variable), u64{sizeof host_variable}, 0U);
    CHECK(query_attributes(&host_variable).type == cuda::memory_host);
    EXPECT_OK("cudaHostUnregister", static_cast<void*>(&host_variable));
    EXPECT_OK("cudaFree", device_memory);
    EXPECT_OK("cudaFree", managed_memory);
    EXPECT_OK("cudaFreeHost", host_memory);
    EXPECT_OK("cudaSetDevice", 0);
}

void test_streams_and_events_order_work() {
    u64 stream = 0, event = 0, capture_id = 1;
    int capture_status = 9;
    unsigned flags = 9;
    EXPECT_OK("cudaStreamCreateWithFlags", &stream, 1U); // cudaStreamNonBlocking
    EXPECT_OK("cudaStreamGetFlags", stream, &flags);
    CHECK(flags == 1);
    EXPECT_OK("cudaEventCreateWithFlags", &event, 2U); // cudaEventDisableTiming
    void* host_memory = nullptr;
    void* const memory = allocate(100);
    EXPECT_OK("cudaMallocHost", &host_memory, u64{100});
    std::memset(host_memory, canary, 100);
    EXPECT_OK("cudaMemset", memory, 5, u64{100});
    EXPECT_OK("cudaDeviceSynchronize");
    Gate gate("cudaLaunchHostFunc", stream);
    EXPECT_OK("cudaMemcpyAsync", host_memory, static_cast<const void*>(memory), u64{100}, int{device_to_host}, stream);
    EXPECT_OK("cudaEventRecord", event, stream);
    EXPECT_ERROR(cuda::not_ready, "cudaEventQuery", event);
    // As the real runtime does, the twin also stores cudaErrorNotReady as the last error of the thread.
    EXPECT_ERROR(cuda::not_ready, "cudaGetLastError");
    EXPECT_ERROR(cuda::not_ready, "cudaStreamQuery", stream);
    EXPECT_OK("cudaStreamWaitEvent", u64{0}, event, 0U);
    EXPECT_ERROR(cuda::not_ready, "cudaStreamQuery", u64{0});
    CHECK(static_cast<unsigned char*>(host_memory)[99] == canary);
    gate.open();
    EXPECT_OK("cudaEventSynchronize", event);
    CHECK(static_cast<unsigned char*>(host_memory)[99] == 5);
    EXPECT_OK("cudaStreamSynchronize", u64{0});
    EXPECT_OK("cudaStreamIsCapturing", stream, &capture_status);
    CHECK(capture_status == 0);
    // In CUDA 12, this function takes only the first three arguments and ignores the others.
    constexpr const char* capture_query = "cudaStreamGetCaptureInfo";
    capture_status = 9;
    EXPECT_OK(capture_query, stream, &capture_status, &capture_id, nullptr, nullptr, nullptr, nullptr);
    CHECK(capture_status == 0 && capture_id == 0);
    EXPECT_OK("cudaEventDestroy", event);
    EXPECT_OK("cudaStreamDestroy", stream);
    EXPECT_OK("cudaFreeHost", host_memory);
    EXPECT_OK("cudaFree", memory);
    EXPECT_ERROR(cuda::not_ready, "cudaGetLastError");
    EXPECT_OK("cudaGetLastError");
}

// The functions with the suffix _ptsz use the default stream of the calling thread.
void test_default_stream_of_a_thread() {
    Gate gate("cudaLaunchHostFunc_ptsz", 0);
    EXPECT_ERROR(cuda::not_ready, "cudaStreamQuery_ptsz", u64{0});
    std::thread([] { EXPECT_OK("cudaStreamQuery_ptsz", u64{0}); }).join();
    gate.open();
    EXPECT_OK("cudaStreamSynchronize_ptsz", u64{0});
    EXPECT_ERROR(cuda::not_ready, "cudaGetLastError");
}

void test_memory_comes_from_pools() {
    u64 stream = 0, pool = 0, used_bytes = 0;
    void* pointer = nullptr;
    EXPECT_OK("cudaStreamCreate", &stream);
    EXPECT_OK("cudaDeviceGetDefaultMemPool", &pool, 0);
    EXPECT_OK("cudaMallocAsync", &pointer, u64{1000}, stream);
    EXPECT_OK("cudaMemPoolGetAttribute", pool, int{cuda::pool_used_current}, static_cast<void*>(&used_bytes));
    CHECK(used_bytes >= 1000);
    EXPECT_OK("cudaFreeAsync", pointer, stream);
    EXPECT_OK("cudaMallocFromPoolAsync", &pointer, u64{1000}, pool, stream);
    EXPECT_OK("cudaStreamSynchronize", stream);
    EXPECT_OK("cudaFree", pointer);
    EXPECT_OK("cudaStreamDestroy", stream);
}

void test_errors_belong_to_threads() {
    EXPECT_ERROR(invalid_device, "cudaSetDevice", 7);
    std::thread([] {
        EXPECT_OK("cudaPeekAtLastError");
        EXPECT_ERROR(invalid_value, "cudaFree", reinterpret_cast<void*>(8));
        EXPECT_ERROR(invalid_value, "cudaGetLastError");
    }).join();
    // A call that succeeds does not clear the error.
    CHECK(get_selected_device() == 0);
    EXPECT_ERROR(invalid_device, "cudaPeekAtLastError");
    EXPECT_ERROR(invalid_device, "cudaGetLastError");
    EXPECT_OK("cudaGetLastError");
}

// Programs that nvcc compiled register their kernels when they start. The twin refuses every launch of a kernel, and
// prints one line that names the kernel.
void test_launch_is_refused() {
    // The addresses of these variables stand for a fat binary and for the host functions of two kernels.
    static const char fat_binary[16] = {}, kernel = 0, unregistered_kernel = 0;
    const auto register_binary = reinterpret_cast<void** (*)(const void*)>(find_function("__cudaRegisterFatBinary"));
    void** const binary_handle = register_binary(fat_binary);
    CHECK(binary_handle != nullptr);
    reinterpret_cast<void (*)(void**, const void*, char*, const char*, int, void*, void*, void*, void*, int*)>(
        find_function("__cudaRegisterFunction"))(binary_handle, &kernel, nullptr, "_Z3addPfS_i", -1, nullptr, nullptr,
                                                 nullptr, nullptr, nullptr);
    reinterpret_cast<void (*)(void**)>(find_function("__cudaRegisterFatBinaryEnd"))(binary_handle);
    // For a launch by <<<...>>>, compiled code pushes the configuration of the launch, and pops it to launch the
    // kernel.
    const Dimensions grid{1, 2, 3}, block{4, 5, 6};
    Dimensions popped_grid{}, popped_block{};
    u64 shared_bytes = 0, stream = 0;
    CHECK(call_runtime("__cudaPushCallConfiguration", grid, block, u64{7}, u64{8}) == 0);
    EXPECT_OK("__cudaPopCallConfiguration", &popped_grid, &popped_block, &shared_bytes, &stream);
    CHECK(popped_grid.z == 3 && popped_block.x == 4 && shared_bytes == 7 && stream == 8);
    EXPECT_ERROR(missing_configuration, "__cudaPopCallConfiguration", &popped_grid, &popped_block, &shared_bytes,
                 &stream);
    const std::string stderr_text = capture_stderr([&] {
        for (const char* symbol : {"cudaLaunchKernel", "cudaLaunchKernel_ptsz", "cudaLaunchCooperativeKernel"}) {
            EXPECT_ERROR(not_supported, symbol, static_cast<const void*>(&kernel), grid, block,
                         static_cast<void**>(nullptr), u64{0}, u64{0});
        }
    });
    CHECK(stderr_text ==
          "gdrkit: the launch of the kernel add(float*, float*, int) fails with cudaErrorNotSupported: the "
          "software twin of CUDA runs no kernels\n");
    EXPECT_ERROR(not_supported, "cudaGetLastError");
    EXPECT_ERROR(invalid_device_function, "cudaLaunchKernel", static_cast<const void*>(&unregistered_kernel), grid,
                 block, static_cast<void**>(nullptr), u64{0}, u64{0});
    EXPECT_ERROR(invalid_device_function, "cudaGetLastError");
    reinterpret_cast<void (*)(void**)>(find_function("__cudaUnregisterFatBinary"))(binary_handle);
}

// A reset destroys the memory of the device. The next call creates a new context.
void test_reset_destroys_the_context() {
    EXPECT_OK("cudaSetDevice", 1);
    void* const memory = allocate(100);
    EXPECT_OK("cudaDeviceReset");
    EXPECT_ERROR(invalid_value, "cudaMemset", memory, 0, u64{100});
    EXPECT_OK("cudaFree", allocate(100));
    CHECK(get_selected_device() == 1);
    EXPECT_OK("cudaSetDevice", 0);
}

bool is_context_active(int device) {
    unsigned flags = 0;
    int is_active = 0;
    CHECK(cuda::call_driver("cuDevicePrimaryCtxGetState", device, &flags, &is_active) == 0);
    return is_active != 0;
}

// A reset of a device waits for the host functions in its streams. Meanwhile, other threads can use other devices.
void test_reset_does_not_block_other_threads() {
    EXPECT_OK("cudaSetDevice", 1);
    u64 stream = 0;
    EXPECT_OK("cudaStreamCreate", &stream);
    Gate gate("cudaLaunchHostFunc", stream);
    std::thread reset_thread([] {
        EXPECT_OK("cudaSetDevice", 1);
        EXPECT_OK("cudaDeviceReset");
    });
    while (is_context_active(1)) {
        std::this_thread::yield();
    }
    std::promise<void> done_promise;
    // The device 0 is selected in a new thread.
    std::thread other_thread([&] {
        EXPECT_OK("cudaFree", allocate(100));
        done_promise.set_value();
    });
    CHECK(done_promise.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready);
    gate.open();
    other_thread.join();
    reset_thread.join();
    EXPECT_OK("cudaSetDevice", 0);
}

// While one thread resets a device, a call for the device in another thread waits. So the reset does not destroy the
// memory that the call allocates.
void test_call_waits_for_a_reset_of_its_device() {
    EXPECT_OK("cudaSetDevice", 1);
    u64 stream = 0;
    EXPECT_OK("cudaStreamCreate", &stream);
    Gate gate("cudaLaunchHostFunc", stream);
    std::thread reset_thread([] {
        EXPECT_OK("cudaSetDevice", 1);
        EXPECT_OK("cudaDeviceReset");
    });
    while (is_context_active(1)) {
        std::this_thread::yield();
    }
    std::promise<void*> memory_promise;
    std::future<void*> memory_future = memory_promise.get_future();
    std::thread other_thread([&] {
        EXPECT_OK("cudaSetDevice", 1);
        memory_promise.set_value(allocate(100));
    });
    CHECK(memory_future.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
    EXPECT_OK("cudaSetDevice", 0); // other devices can be used meanwhile
    EXPECT_OK("cudaFree", allocate(100));
    gate.open();
    reset_thread.join();
    other_thread.join();
    EXPECT_OK("cudaFree", memory_future.get());
}

// The runtime asks the driver whether a primary context exists, because the program may have reset the context with the
// driver API.
void test_reset_by_the_driver_is_noticed() {
    EXPECT_OK("cudaSetDevice", 1);
    unsigned flags = 9, driver_flags = 9;
    CHECK(cuda::call_driver("cuDevicePrimaryCtxReset_v2", 1) == 0);
    CHECK(get_selected_device() == 1);
    EXPECT_OK("cudaFree", allocate(100));
    CHECK(is_context_active(1));
    EXPECT_OK("cudaDeviceReset");
    CHECK(!is_context_active(1));
    // cudaGetDeviceFlags returns the flags of the driver, and creates no context.
    int is_active = 9;
    CHECK(cuda::call_driver("cuDevicePrimaryCtxGetState", 1, &driver_flags, &is_active) == 0);
    EXPECT_OK("cudaGetDeviceFlags", &flags);
    CHECK(flags == driver_flags && !is_context_active(1));
    EXPECT_OK("cudaSetDevice", 0);
}

// If the current context is not the primary context of its device, a reset destroys neither of the two contexts.
void test_reset_keeps_other_contexts() {
    EXPECT_OK("cudaSetDevice", 1);
    void* const primary_memory = allocate(100);
    std::thread([] {
        Handle context = 0;
        CHECK(cuda::call_driver("cuCtxCreate_v2", &context, 0U, 1) == 0);
        void* const other_context_memory = allocate(100);
        EXPECT_OK("cudaDeviceReset");
        EXPECT_OK("cudaFree", other_context_memory);
        CHECK(cuda::call_driver("cuCtxDestroy_v2", context) == 0);
    }).join();
    EXPECT_OK("cudaFree", primary_memory);
    EXPECT_OK("cudaSetDevice", 0);
}

// If the program has made a context current with the driver API, the runtime uses this context. Each thread has its own
// selected device.
void test_current_context_is_used() {
    std::thread([] {
        Handle context = 0;
        CHECK(cuda::call_driver("cuCtxCreate_v2", &context, 0U, 1) == 0);
        CHECK(get_selected_device() == 1);
        EXPECT_OK("cudaFree", allocate(100));
        Handle current_context = 0;
        CHECK(cuda::call_driver("cuCtxGetCurrent", &current_context) == 0 && current_context == context);
        CHECK(cuda::call_driver("cuCtxDestroy_v2", context) == 0);
        CHECK(get_selected_device() == 0);
    }).join();
    CHECK(get_selected_device() == 0);
}

void test_forked_child_cannot_use_the_driver() {
    const int status = cuda::run_in_child([] {
        void* pointer = nullptr;
        _exit(call_runtime("cudaMalloc", &pointer, u64{1}) == cuda::not_initialized ? 0 : 1);
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// The process that owns the memory and the event runs this function.
int run_owner(int socket) {
    void* const memory = allocate(1000);
    write_memory(memory, make_pattern(1000, 4));
    cuda::IpcHandle memory_handle{}, event_handle{};
    u64 event = 0;
    EXPECT_OK("cudaEventCreateWithFlags", &event, 6U); // cudaEventDisableTiming and cudaEventInterprocess
    EXPECT_OK("cudaIpcGetMemHandle", &memory_handle, memory);
    EXPECT_OK("cudaIpcGetEventHandle", &event_handle, event);
    cuda::send_value(socket, memory_handle);
    cuda::send_value(socket, event_handle);
    cuda::receive_value<char>(socket); // the importer has recorded the event after its copy
    EXPECT_OK("cudaEventSynchronize", event);
    CHECK(read_memory(memory, 1000) == make_pattern(1000, 5));
    return 0;
}

void test_processes_share_memory_and_events() {
    cuda::ChildProcess owner;
    const auto memory_handle = cuda::receive_value<cuda::IpcHandle>(owner.socket());
    const auto event_handle = cuda::receive_value<cuda::IpcHandle>(owner.socket());
    void* memory = nullptr;
    u64 event = 0, stream = 0;
    EXPECT_OK("cudaIpcOpenMemHandle", &memory, memory_handle, 1U); // cudaIpcMemLazyEnablePeerAccess
    EXPECT_OK("cudaIpcOpenEventHandle", &event, event_handle);
    CHECK(read_memory(memory, 1000) == make_pattern(1000, 4));
    EXPECT_OK("cudaStreamCreate", &stream);
    const auto bytes = make_pattern(1000, 5);
    EXPECT_OK("cudaMemcpyAsync", memory, static_cast<const void*>(bytes.data()), u64{1000}, int{host_to_device},
              stream);
    EXPECT_OK("cudaEventRecord", event, stream);
    cuda::send_value(owner.socket(), 'r'); // tell the owner that the event is recorded
    EXPECT_OK("cudaStreamSynchronize", stream);
    EXPECT_OK("cudaIpcCloseMemHandle", memory);
    EXPECT_OK("cudaEventDestroy", event);
    EXPECT_OK("cudaStreamDestroy", stream);
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 3) {
        return run_owner(std::atoi(arguments[2]));
    }
    test_versions_and_devices();
    test_properties_fill_the_structure();
    test_ranges_are_copied();
    test_rows_and_volumes_are_copied();
    test_volumes_are_filled();
    test_devices_copy_to_each_other();
    test_volumes_are_ordered_between_devices();
    test_empty_allocations_succeed();
    test_pointer_attributes_tell_the_type();
    // The tests before leave this error. The call clears it, because the next test checks the last error.
    EXPECT_ERROR(invalid_value, "cudaGetLastError");
    test_streams_and_events_order_work();
    test_default_stream_of_a_thread();
    test_memory_comes_from_pools();
    test_errors_belong_to_threads();
    test_launch_is_refused();
    test_reset_destroys_the_context();
    test_reset_does_not_block_other_threads();
    test_call_waits_for_a_reset_of_its_device();
    test_reset_by_the_driver_is_noticed();
    test_reset_keeps_other_contexts();
    test_current_context_is_used();
    test_forked_child_cannot_use_the_driver();
    test_processes_share_memory_and_events();
}
