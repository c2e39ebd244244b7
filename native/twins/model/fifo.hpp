// A queue of things that come and go all the time: its memory grows to what was ever in it at once, and is then used
// again and again, where a deque takes and frees a block for every few of them.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace gdrkit::twin {

template <typename T> class Fifo {
public:
    [[nodiscard]] bool empty() const { return count_ == 0; }
    [[nodiscard]] std::size_t size() const { return count_; }
    T& operator[](std::size_t index) { return places_[(first_ + index) & mask()]; }
    const T& operator[](std::size_t index) const { return places_[(first_ + index) & mask()]; }
    T& front() { return (*this)[0]; }
    const T& front() const { return (*this)[0]; }
    T& back() { return (*this)[count_ - 1]; }
    const T& back() const { return (*this)[count_ - 1]; }

    T& push_back(T thing) {
        grow();
        ++count_;
        return back() = std::move(thing);
    }
    T& push_front(T thing) {
        grow();
        first_ = (first_ - 1) & mask();
        ++count_;
        return front() = std::move(thing);
    }
    // What was there before stays in its place until another comes: take it out by a move.
    void pop_front() {
        first_ = (first_ + 1) & mask();
        --count_;
    }
    void pop_back() { --count_; }
    void clear() { *this = {}; }

private:
    [[nodiscard]] std::size_t mask() const { return places_.size() - 1; } // Their number is a power of two.
    void grow() {
        if (count_ != places_.size()) {
            return;
        }
        std::vector<T> more(count_ == 0 ? 16 : 2 * count_);
        for (std::size_t index = 0; index < count_; ++index) {
            more[index] = std::move((*this)[index]);
        }
        places_ = std::move(more);
        first_ = 0;
    }

    std::vector<T> places_;
    std::size_t first_ = 0, count_ = 0;
};

} // namespace gdrkit::twin
