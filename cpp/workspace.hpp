// Memory of a kernel: zeros, aligned to lines of the cache, given back when it goes out of scope.
#pragma once

#include <stdint.h>

#include "level.hpp"

NEULA_BEGIN

class Workspace {
public:
    Workspace() = default;
    explicit Workspace(size_t doubles) { allocate(doubles); }
    ~Workspace() { free(memory_); }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    explicit operator bool() const { return memory_ != nullptr; }

    // Of a workspace without memory; false where there is too little.
    bool allocate(size_t doubles)
    {
        memory_ = calloc(doubles + LINE / sizeof(double), sizeof(double));
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

private:
    static constexpr size_t LINE = 64;
    void *memory_ = nullptr;
    double *next_ = nullptr;
};

NEULA_END
