// A queue in a ring buffer that reuses its memory. std::deque would allocate and free a block for every few elements,
// which is too slow for the request path of the verbs twin.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace gdrkit::twin {

template <typename T> class Fifo {
public:
    [[nodiscard]] bool empty() const { return count_ == 0; }
    [[nodiscard]] std::size_t size() const { return count_; }
    T& operator[](std::size_t index) { return slots_[(first_ + index) & mask()]; }
    const T& operator[](std::size_t index) const { return slots_[(first_ + index) & mask()]; }
    T& front() { return (*this)[0]; }
    const T& front() const { return (*this)[0]; }
    T& back() { return (*this)[count_ - 1]; }
    const T& back() const { return (*this)[count_ - 1]; }

    T& push_back(T item) {
        grow_if_full();
        ++count_;
        return back() = std::move(item);
    }
    T& push_front(T item) {
        grow_if_full();
        first_ = (first_ - 1) & mask();
        ++count_;
        return front() = std::move(item);
    }
    // A removed element is destroyed only when its slot is reused, so the caller moves it out before the removal.
    void pop_front() {
        first_ = (first_ + 1) & mask();
        --count_;
    }
    void pop_back() { --count_; }
    void clear() { *this = {}; }

private:
    [[nodiscard]] std::size_t mask() const { return slots_.size() - 1; } // the number of slots is a power of two
    void grow_if_full() {
        if (count_ != slots_.size()) {
            return;
        }
        std::vector<T> larger_slots(count_ == 0 ? 16 : 2 * count_);
        for (std::size_t index = 0; index < count_; ++index) {
            larger_slots[index] = std::move((*this)[index]);
        }
        slots_ = std::move(larger_slots);
        first_ = 0;
    }

    std::vector<T> slots_;
    std::size_t first_ = 0, count_ = 0;
};

} // namespace gdrkit::twin
