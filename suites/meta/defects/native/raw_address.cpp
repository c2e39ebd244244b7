// Defect d: the link contains the virtual address in the owner's process.
#include "usrbio/client/gpu_publish.hpp"

#include <cstring>

namespace gdrkit::usrbio {

GpuTarget link_target(const GpuIov& gpu, const Dmabuf&) {
    IpcBytes address{};
    std::memcpy(address.data(), &gpu.pointer, sizeof gpu.pointer);
    return {gpu.device, gpu.size_bytes, 0, gpu.size_bytes, address};
}

} // namespace gdrkit::usrbio
