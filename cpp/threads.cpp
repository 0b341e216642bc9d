#include "threads.hpp"

#include <atomic>
#include <system_error>
#include <thread>

namespace neula {

namespace {

std::atomic<Pool> shared_pool{nullptr};

struct Parts {
    void (*work)(void *);
    char *first;
    size_t size;
    Index count;
    std::atomic<Index> next{0};
};

// Parts that no thread has begun, one after the other: how many threads come does not matter.
void take_parts(void *given)
{
    Parts &parts = *static_cast<Parts *>(given);
    for (Index t; (t = parts.next.fetch_add(1, std::memory_order_relaxed)) < parts.count;)
        parts.work(parts.first + t * parts.size);
}

}  // namespace

void share_threads(Pool pool) { shared_pool = pool; }

void run_parts(void (*work)(void *), void *given, size_t size, Index count)
{
    Parts parts{work, static_cast<char *>(given), size, count};
    if (Pool pool = shared_pool; pool != nullptr) {
        // All threads of the pool (0) are asked: OpenMP ends those that a smaller team does not need, and torch would have
        // to start them again.
        pool(take_parts, &parts, 0, 0);
        return;
    }
    std::thread others[MOST_THREADS];
    try {
        for (Index t = 1; t < count && t < MOST_THREADS; t++)
            others[t] = std::thread(take_parts, &parts);
    } catch (const std::system_error &) {
        // No more threads: those that there are take the parts.
    }
    take_parts(&parts);
    for (std::thread &other : others)
        if (other.joinable())
            other.join();
}

}  // namespace neula
