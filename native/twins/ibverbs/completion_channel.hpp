// Completion channels: where a completion queue that was asked to tells that something is in it.
#pragma once

#include <atomic>
#include <memory>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct CompletionEvent {
    ibv_cq* cq = nullptr;
    std::shared_ptr<EventAccount> account;
};

struct CompletionChannel {
    ibv_comp_channel abi{};
    Context* context = nullptr;
    EventQueue<CompletionEvent> events;
    std::atomic<int> users{0};
};

inline CompletionChannel* find_channel(ibv_comp_channel* channel) {
    return reinterpret_cast<CompletionChannel*>(channel);
}

} // namespace gdrkit::twin::verbs
