// CUDA C++ on a CPU: a coroutine for each thread of a thread block, far slower, the same steps.
//
// They take turns, from the first to the last and back again, each as far as a barrier that others have not
// reached. So results do not depend on the machine, and where a barrier is missing between two threads, either is
// ahead of the other now and then. A context only begins a thread: to swap contexts is a call of the system, ten times
// as long as a jump.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct float4 {
    float x, y, z, w;
};

struct Index {
    int x;
};

static Index threadIdx;

[[maybe_unused]] static unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

[[maybe_unused]] static float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

struct Barrier {
    int count, missing;
    unsigned passed = 0;

    explicit Barrier(int count) : count(count), missing(count) {}
    void arrive_and_wait();
};

struct Thread {
    ucontext_t beginning;
    jmp_buf place;
    bool begun = false;
    const Barrier* waits_at = nullptr;
    unsigned passed = 0;
    bool done = false;

    bool can_go_on() const { return !done && (!waits_at || waits_at->passed != passed); }
};

constexpr int STACK_BYTES = 1 << 17;

static std::vector<Thread> threads;
static std::vector<std::unique_ptr<char[]>> stacks;  // kept from one launch to the next
static jmp_buf scheduler;
static std::function<void()> program;
static std::unique_ptr<Barrier> of_all;
static std::vector<std::unique_ptr<Barrier>> of_warps;

void Barrier::arrive_and_wait() {
    if (--missing == 0) {
        missing = count;
        ++passed;
        return;
    }
    Thread& self = threads[threadIdx.x];
    self.waits_at = this;
    self.passed = passed;
    if (!_setjmp(self.place)) _longjmp(scheduler, 1);
    self.waits_at = nullptr;
}

static inline void __syncthreads() { of_all->arrive_and_wait(); }
static inline void __syncwarp() { of_warps[threadIdx.x / 32]->arrive_and_wait(); }

static void run_program() {
    program();
    threads[threadIdx.x].done = true;
    _longjmp(scheduler, 1);
}

static bool go_on(int i) {
    Thread& thread = threads[i];
    if (!thread.can_go_on()) return false;
    threadIdx.x = i;
    if (_setjmp(scheduler)) return true;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.beginning);
    std::abort();  // a context cannot be lost
}

template <class Body>
static void run_together(int count, Body body) {
    program = body;
    of_all = std::make_unique<Barrier>(count);
    of_warps.clear();
    for (int i = 0; i < count / 32; ++i) of_warps.push_back(std::make_unique<Barrier>(32));
    threads = std::vector<Thread>(count);
    for (int i = 0; i < count; ++i) {
        if (i == int(stacks.size())) stacks.emplace_back(new char[STACK_BYTES]);
        ucontext_t& context = threads[i].beginning;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks[i].get();
        context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&context, run_program, 0);
    }
    for (bool some = true; some;) {
        some = false;
        for (int i = 0; i < count; ++i) some |= go_on(i);
        for (int i = count; i-- > 0;) some |= go_on(i);
    }
}
