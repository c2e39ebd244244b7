// Completion channels: the file descriptor on which a client waits for a completion queue that it has armed.
#pragma once

#include <atomic>
#include <memory>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct CompletionEvent {
    ibv_cq* cq = nullptr;
    std::shared_ptr<EventCounter> counter;
};

struct CompletionChannel {
    ibv_comp_channel abi{};
    Context* context = nullptr;
    EventQueue<CompletionEvent> events;
    std::atomic<int> users{0};
};

inline CompletionChannel* channel_of(ibv_comp_channel* channel) {
    return reinterpret_cast<CompletionChannel*>(channel);
}

} // namespace gdrkit::twin::verbs
