// cuMemcpyBatchAsync: many copies by one call.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The arguments of one call of cuMemcpyBatchAsync. attributes[i] applies to the copies with the indices from
// attribute_starts[i] to attribute_starts[i + 1] - 1.
struct CopyBatch {
    const DevicePointer* to = nullptr;
    const DevicePointer* from = nullptr;
    const std::size_t* lengths_bytes = nullptr;
    std::size_t copy_count = 0;
    const CopyAttributes* attributes = nullptr;
    const std::size_t* attribute_starts = nullptr;
    std::size_t attribute_count = 0;
};

bool is_well_formed(const CopyBatch& batch) {
    if (batch.to == nullptr || batch.from == nullptr || batch.lengths_bytes == nullptr || batch.copy_count == 0 ||
        batch.attributes == nullptr || batch.attribute_starts == nullptr || batch.attribute_count == 0 ||
        batch.attribute_count > batch.copy_count || batch.attribute_starts[0] != 0) {
        return false;
    }
    for (std::size_t index = 0; index < batch.attribute_count; ++index) {
        const int source_order = batch.attributes[index].source_order;
        const bool is_increasing = index == 0 || batch.attribute_starts[index] > batch.attribute_starts[index - 1];
        if (!is_increasing || batch.attribute_starts[index] >= batch.copy_count || source_order < copy_order_stream ||
            source_order > copy_order_any) {
            return false;
        }
    }
    return std::all_of(batch.lengths_bytes, batch.lengths_bytes + batch.copy_count,
                       [](std::size_t length_bytes) { return length_bytes != 0; });
}

// Queue the copies of a batch. The twin refuses the default streams, as the real driver does. If a copy is refused, the
// copies before it stay queued.
Result copy_batch(const ContextRef& context, const CopyBatch& batch, Handle stream) {
    if (stream == default_stream_handle || stream == legacy_stream_handle || stream == per_thread_stream_handle ||
        !is_well_formed(batch)) {
        return invalid_value;
    }
    for (std::size_t index = 0; index < batch.copy_count; ++index) {
        const CopyRequest request =
            make_contiguous_copy(batch.to[index], batch.from[index], batch.lengths_bytes[index]);
        if (const Result result = enqueue_copy(context, request, stream); result != success) {
            return result;
        }
    }
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpyBatchAsync(const DevicePointer* to, const DevicePointer* from,
                                            const std::size_t* lengths_bytes, std::size_t copy_count,
                                            const CopyAttributes* attributes, const std::size_t* attribute_starts,
                                            std::size_t attribute_count, std::size_t* failed_index, Handle stream) {
    return run_entry_in_context("cuMemcpyBatchAsync", [&](const ContextRef& context) {
        const CopyBatch batch{to, from, lengths_bytes, copy_count, attributes, attribute_starts, attribute_count};
        const Result result = copy_batch(context, batch, stream);
        if (result != success && failed_index != nullptr) {
            // The twin never reports which copy failed. In CUDA, SIZE_MAX means that the error concerns the whole call.
            *failed_index = SIZE_MAX;
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyBatchAsync_v2(const DevicePointer* to, const DevicePointer* from,
                                               const std::size_t* lengths_bytes, std::size_t copy_count,
                                               const CopyAttributes* attributes, const std::size_t* attribute_starts,
                                               std::size_t attribute_count, Handle stream) {
    return run_entry_in_context("cuMemcpyBatchAsync_v2", [&](const ContextRef& context) {
        return copy_batch(context, {to, from, lengths_bytes, copy_count, attributes, attribute_starts, attribute_count},
                          stream);
    });
}

} // namespace gdrkit::twin::cuda
