// CUDA driver calls with which the engine's tests, like an application, allocate and check device memory. They work
// with a real GPU and with the software twin of libcuda.
#pragma once

#include <dlfcn.h>

#include "engine/tests/fixture.hpp"

namespace gdrkit::engine::test {

// Calls a driver function by its symbol. The arguments must have the types of the API: lengths and addresses are u64.
template <typename... Arguments> int call_driver(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const function_address = dlsym(library, symbol);
    CHECK(function_address != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(function_address)(arguments...);
}

// Every byte of a new DeviceMemory has this value.
constexpr std::byte filler{0xa5};

// Memory of one device, initially filled with `filler`. Each method makes the primary context of the device current,
// and restores the previous context.
class DeviceMemory {
public:
    DeviceMemory(int device, u64 length) : device_(device), length_(length) {
        CHECK(call_driver("cuInit", 0U) == 0);
        CHECK(call_driver("cuDevicePrimaryCtxRetain", &context_, device) == 0);
        call_in_context([&] { CHECK(call_driver("cuMemAlloc_v2", &address_, length) == 0); });
        fill();
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        call_in_context([&] { CHECK(call_driver("cuMemFree_v2", address_) == 0); });
        CHECK(call_driver("cuDevicePrimaryCtxRelease_v2", device_) == 0);
    }
    u64 address() const { return address_; }
    int device() const { return device_; }
    void fill() { write(Bytes(length_, filler)); }
    void write(const Bytes& bytes) {
        call_in_context([&] {
            CHECK(call_driver("cuMemcpyHtoD_v2", address_, static_cast<const void*>(bytes.data()), u64{bytes.size()}) ==
                  0);
        });
    }
    // Waits for all work on the device.
    void synchronize() {
        call_in_context([&] { CHECK(call_driver("cuCtxSynchronize") == 0); });
    }
    Bytes read(u64 offset, u64 length) {
        Bytes bytes(length);
        call_in_context([&] {
            CHECK(call_driver("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), address_ + offset, length) == 0);
        });
        return bytes;
    }

private:
    template <typename Function> void call_in_context(const Function& function) {
        CHECK(call_driver("cuCtxPushCurrent_v2", context_) == 0);
        function();
        void* popped_context = nullptr;
        CHECK(call_driver("cuCtxPopCurrent_v2", &popped_context) == 0);
    }

    const int device_;
    const u64 length_;
    void* context_ = nullptr;
    u64 address_ = 0;
};

inline void* get_current_context() {
    void* context = nullptr;
    CHECK(call_driver("cuCtxGetCurrent", &context) == 0);
    return context;
}

} // namespace gdrkit::engine::test
