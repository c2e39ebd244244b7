// Defect d: what is published is the address in the process that has it.
#include "usrbio/client/gpu_publish.hpp"

#include <cstring>

namespace gdrkit::usrbio {

GpuTarget target_of(const GpuIov& gpu, const Dmabuf&) {
    IpcBytes address{};
    std::memcpy(address.data(), &gpu.pointer, sizeof gpu.pointer);
    return {gpu.device, gpu.size_bytes, 0, gpu.size_bytes, address};
}

} // namespace gdrkit::usrbio
