// A table that finds objects (streams, events, pools ...) by their handle. The table also enters the handles in the
// ledger of live handles.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/cuda_abi.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cuda {

template <typename Object> class Registry {
public:
    // `ledger_kind` is the name under which the ledger counts the objects. It must be a string literal.
    explicit Registry(std::string_view ledger_kind) : ledger_kind_(ledger_kind) {}

    void add(Handle handle, std::shared_ptr<Object> object) {
        std::lock_guard lock(mutex_);
        record_open_handle(ledger_kind_, handle);
        objects_.emplace(handle, std::move(object));
        removed_with_context_.erase(handle);
    }

    [[nodiscard]] std::shared_ptr<Object> find(Handle handle) {
        std::lock_guard lock(mutex_);
        const auto entry = objects_.find(handle);
        return entry == objects_.end() ? nullptr : entry->second;
    }

    // Call the function with each object, while the table is locked.
    template <typename Function> void for_each(Function&& function) {
        std::lock_guard lock(mutex_);
        for (const auto& [handle, object] : objects_) {
            function(*object);
        }
    }

    // Remove the object and return it; null if the handle is unknown or its context was destroyed. If the program has
    // released the handle before, the ledger ends the process (model/ledger.hpp).
    [[nodiscard]] std::shared_ptr<Object> take(Handle handle) {
        std::lock_guard lock(mutex_);
        if (removed_with_context_.contains(handle) || !record_closed_handle(ledger_kind_, handle)) {
            return nullptr;
        }
        const auto entry = objects_.find(handle);
        std::shared_ptr<Object> object = std::move(entry->second);
        objects_.erase(entry);
        return object;
    }

    // Remove and return all objects for which the predicate is true, for example the objects of a context that ends.
    template <typename Predicate> std::vector<std::shared_ptr<Object>> take_if(Predicate&& predicate) {
        std::vector<std::shared_ptr<Object>> removed_objects;
        std::lock_guard lock(mutex_);
        for (auto entry = objects_.begin(); entry != objects_.end();) {
            if (predicate(*entry->second) && record_closed_handle(ledger_kind_, entry->first)) {
                removed_with_context_.insert(entry->first);
                removed_objects.push_back(std::move(entry->second));
                entry = objects_.erase(entry);
            } else {
                ++entry;
            }
        }
        return removed_objects;
    }

private:
    const std::string_view ledger_kind_;
    std::mutex mutex_;
    std::map<Handle, std::shared_ptr<Object>> objects_;
    // Handles of objects that take_if has removed. The release of such a handle is an error, but not a double release.
    std::set<Handle> removed_with_context_;
};

} // namespace gdrkit::twin::cuda
