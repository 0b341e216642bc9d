// Memory of a kernel, aligned to lines of the cache, given back when it goes out of scope. It is filled with zeros unless the
// kernel does without.
#pragma once

#include <stdint.h>

#include "level.hpp"

NEULA_BEGIN

enum class Filled { zeros, no };

class Workspace {
public:
    Workspace() = default;
    explicit Workspace(size_t doubles, Filled filled = Filled::zeros) { allocate(doubles, filled); }
    ~Workspace() { free(memory_); }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    explicit operator bool() const { return memory_ != nullptr; }

    // Of a workspace without memory; false where there is too little.
    bool allocate(size_t doubles, Filled filled = Filled::zeros)
    {
        size_t size = (doubles + LINE / sizeof(double)) * sizeof(double);
        memory_ = filled == Filled::zeros ? calloc(size, 1) : malloc(size);
        uintptr_t first = reinterpret_cast<uintptr_t>(memory_);
        next_ = reinterpret_cast<double *>((first + LINE - 1) & ~uintptr_t(LINE - 1));
        return memory_ != nullptr;
    }

    // The next part of it.
    double *take(Index doubles)
    {
        double *part = next_;
        next_ += doubles;
        return part;
    }

    // The next parts, as large as so many doubles each.
    template <typename... T> void take(Index doubles, T *&...parts) { ((parts = reinterpret_cast<T *>(take(doubles))), ...); }

private:
    static constexpr size_t LINE = 64;
    void *memory_ = nullptr;
    double *next_ = nullptr;
};

NEULA_END
