// User objects: resources of the program that live as long as a graph, or an executable graph, refers to them.
#include "cuda/graph.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr unsigned no_destructor_sync = 1; // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
constexpr unsigned move_references = 1;    // CU_GRAPH_USER_OBJECT_MOVE

// A user object to which the program has references, and the number of these references.
struct OwnedObject {
    std::shared_ptr<UserObject> object;
    unsigned reference_count = 0;
};

Registry<OwnedObject>& owned_objects() {
    static auto* const instance = new Registry<OwnedObject>("cuda_user_object");
    return *instance;
}

// Release references of the program. Without such references, the handle is only valid for cuGraphReleaseUserObject.
Result release_references(Handle handle, unsigned count) {
    const auto owned_object = owned_objects().find(handle);
    if (!owned_object || count == 0 || count > owned_object->reference_count) {
        return invalid_value;
    }
    owned_object->reference_count -= count;
    if (owned_object->reference_count == 0) {
        (void)owned_objects().take(handle);
    }
    return success;
}

// Add references of a graph to a user object. With move_references, the references of the program become the graph's.
Result retain_in_graph(Handle graph_handle, Handle object_handle, unsigned count, unsigned flags) {
    const GraphRef graph = find_graph(graph_handle);
    const auto owned_object = owned_objects().find(object_handle);
    if (!graph || !owned_object || count == 0 || (flags & ~move_references) != 0 ||
        (flags == move_references && count > owned_object->reference_count)) {
        return invalid_value;
    }
    GraphObject& graph_object = graph->user_objects[object_handle];
    graph_object.object = owned_object->object;
    graph_object.reference_count += count;
    return flags == move_references ? release_references(object_handle, count) : success;
}

} // namespace

UserObject::~UserObject() {
    // destroy() runs in a thread of its own, because the caller may hold locks that destroy() needs.
    start_signal_blocking_thread([work = make_host_function_work(destroy, pointer)] { work(); }).detach();
}

GDRKIT_CUDA_ENTRY Result cuUserObjectCreate(Handle* handle, void* pointer, void (*destroy)(void*), unsigned count,
                                            unsigned flags) {
    return run_entry_with_graph_lock("cuUserObjectCreate", [&] {
        if (handle == nullptr || destroy == nullptr || count == 0 || flags != no_destructor_sync) {
            return invalid_value;
        }
        auto owned_object = std::make_shared<OwnedObject>();
        owned_object->object = std::make_shared<UserObject>(destroy, pointer);
        owned_object->reference_count = count;
        *handle = make_handle();
        owned_objects().add(*handle, std::move(owned_object));
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuUserObjectRetain(Handle handle, unsigned count) {
    return run_entry_with_graph_lock("cuUserObjectRetain", [&] {
        const auto owned_object = owned_objects().find(handle);
        if (!owned_object || count == 0) {
            return invalid_value;
        }
        owned_object->reference_count += count;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuUserObjectRelease(Handle handle, unsigned count) {
    return run_entry_with_graph_lock("cuUserObjectRelease", [&] { return release_references(handle, count); });
}

GDRKIT_CUDA_ENTRY Result cuGraphRetainUserObject(Handle graph, Handle object, unsigned count, unsigned flags) {
    return run_entry_with_graph_lock("cuGraphRetainUserObject",
                                     [&] { return retain_in_graph(graph, object, count, flags); });
}

GDRKIT_CUDA_ENTRY Result cuGraphReleaseUserObject(Handle graph_handle, Handle object, unsigned count) {
    return run_with_graph("cuGraphReleaseUserObject", graph_handle, [&](const GraphRef& graph) {
        const auto entry = graph->user_objects.find(object);
        if (entry == graph->user_objects.end() || count == 0 || count > entry->second.reference_count) {
            return invalid_value;
        }
        entry->second.reference_count -= count;
        if (entry->second.reference_count == 0) {
            graph->user_objects.erase(entry);
        }
        return success;
    });
}

} // namespace gdrkit::twin::cuda
