// cuMemcpyBatchAsync: many copies by one call.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The arguments of one call. A copy uses the attributes with the largest start index that is not above its own index.
struct CopyBatch {
    const DevicePointer* to = nullptr;
    const DevicePointer* from = nullptr;
    const std::size_t* lengths_bytes = nullptr;
    std::size_t count = 0;
    const CopyAttributes* attributes = nullptr;
    const std::size_t* attribute_starts = nullptr;
    std::size_t attribute_count = 0;
};

bool is_well_formed(const CopyBatch& batch) {
    if (batch.to == nullptr || batch.from == nullptr || batch.lengths_bytes == nullptr || batch.count == 0 ||
        batch.attributes == nullptr || batch.attribute_starts == nullptr || batch.attribute_count == 0 ||
        batch.attribute_count > batch.count || batch.attribute_starts[0] != 0) {
        return false;
    }
    for (std::size_t index = 0; index < batch.attribute_count; ++index) {
        const int order = batch.attributes[index].source_order;
        const bool increasing = index == 0 || batch.attribute_starts[index] > batch.attribute_starts[index - 1];
        if (!increasing || batch.attribute_starts[index] >= batch.count || order < copy_order_stream ||
            order > copy_order_any) {
            return false;
        }
    }
    return std::all_of(batch.lengths_bytes, batch.lengths_bytes + batch.count, [](std::size_t size) { return size; });
}

// Queue the copies of a batch. Like the real driver it refuses the default streams. The copies before a refused one
// stay queued.
Result copy_batch(const ContextRef& context, const CopyBatch& batch, Handle stream) {
    if (stream == stream_default || stream == stream_legacy || stream == stream_per_thread || !is_well_formed(batch)) {
        return invalid_value;
    }
    for (std::size_t index = 0; index < batch.count; ++index) {
        const CopyRequest request{batch.to[index], batch.from[index], batch.lengths_bytes[index], OperandSide::any,
                                  OperandSide::any};
        if (const Result result = enqueue_copy(context, request, stream); result != success) {
            return result;
        }
    }
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpyBatchAsync(const DevicePointer* to, const DevicePointer* from,
                                            const std::size_t* lengths_bytes, std::size_t count,
                                            const CopyAttributes* attributes, const std::size_t* attribute_starts,
                                            std::size_t attribute_count, std::size_t* failed_index, Handle stream) {
    return entry_in_context("cuMemcpyBatchAsync", [&](const ContextRef& context) {
        const CopyBatch batch{to, from, lengths_bytes, count, attributes, attribute_starts, attribute_count};
        const Result result = copy_batch(context, batch, stream);
        if (result != success && failed_index != nullptr) {
            // SIZE_MAX means that the whole call failed, not one of its copies.
            *failed_index = SIZE_MAX;
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyBatchAsync_v2(const DevicePointer* to, const DevicePointer* from,
                                               const std::size_t* lengths_bytes, std::size_t count,
                                               const CopyAttributes* attributes, const std::size_t* attribute_starts,
                                               std::size_t attribute_count, Handle stream) {
    return entry_in_context("cuMemcpyBatchAsync_v2", [&](const ContextRef& context) {
        return copy_batch(context, {to, from, lengths_bytes, count, attributes, attribute_starts, attribute_count},
                          stream);
    });
}

} // namespace gdrkit::twin::cuda
