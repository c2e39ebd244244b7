#include "usrbio/client/gpu_publish.hpp"

namespace gdrkit::usrbio {

GpuTarget link_target(const GpuIov& gpu, const Dmabuf& dmabuf) {
    if (gpu.ipc) {
        return {gpu.device, gpu.allocation.bytes, gpu.pointer - gpu.allocation.base, gpu.size_bytes, gpu.ipc};
    }
    return {gpu.device, dmabuf.size_bytes, dmabuf.offset_bytes, gpu.size_bytes, std::nullopt};
}

} // namespace gdrkit::usrbio
