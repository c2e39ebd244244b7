// Calls of the CUDA driver by an application beside the engine, for a real GPU and for the software twin of libcuda.
#pragma once

#include <dlfcn.h>

#include "engine/tests/fixture.hpp"

namespace gdrkit::engine::test {

// Calls a driver function by its symbol. The arguments must have the types of the API: lengths and addresses are u64.
template <typename... Arguments> int cu(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const entry = dlsym(library, symbol);
    CHECK(entry != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(entry)(arguments...);
}

// Memory of one device. Its context is current during each access.
class Memory {
public:
    Memory(int device, u64 length) : device_(device), length_(length) {
        CHECK(cu("cuInit", 0U) == 0);
        CHECK(cu("cuDevicePrimaryCtxRetain", &context_, device) == 0);
        in_context([&] { CHECK(cu("cuMemAlloc_v2", &address_, length) == 0); });
        fill();
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() {
        in_context([&] { CHECK(cu("cuMemFree_v2", address_) == 0); });
        CHECK(cu("cuDevicePrimaryCtxRelease_v2", device_) == 0);
    }
    u64 address() const { return address_; }
    int device() const { return device_; }
    void fill() { write(Bytes(length_, std::byte{0xa5})); }
    void write(const Bytes& bytes) {
        in_context([&] {
            CHECK(cu("cuMemcpyHtoD_v2", address_, static_cast<const void*>(bytes.data()), u64{bytes.size()}) == 0);
        });
    }
    // Waits for all work on the device.
    void synchronize() {
        in_context([&] { CHECK(cu("cuCtxSynchronize") == 0); });
    }
    Bytes read(u64 at, u64 length) {
        Bytes bytes(length);
        in_context([&] { CHECK(cu("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), address_ + at, length) == 0); });
        return bytes;
    }

private:
    template <typename Function> void in_context(const Function& function) {
        CHECK(cu("cuCtxPushCurrent_v2", context_) == 0);
        function();
        void* popped = nullptr;
        CHECK(cu("cuCtxPopCurrent_v2", &popped) == 0);
    }

    const int device_;
    const u64 length_;
    void* context_ = nullptr;
    u64 address_ = 0;
};

inline void* current_context() {
    void* context = nullptr;
    CHECK(cu("cuCtxGetCurrent", &context) == 0);
    return context;
}

} // namespace gdrkit::engine::test
