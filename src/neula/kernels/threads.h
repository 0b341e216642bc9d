/* Parts of some work side by side. */
#ifndef NEULA_THREADS_H
#define NEULA_THREADS_H

#include <pthread.h>
#include <stddef.h>

#define MOST_THREADS 64

typedef void (*Pool)(void (*)(void *), void *, unsigned, unsigned);

/* GOMP_parallel, which calls a function in each of some threads of OpenMP, those that torch multiplies by: they are there,
 * and wait busily, where others would first have to take the processors from them.
 */
static Pool pool = NULL;

void share_threads(Pool of_torch)
{
    pool = of_torch;
}

typedef struct {
    void *(*work)(void *);
    char *parts;
    size_t size;
    long count, next;
} Shared;

/* The next part, as long as there is one: so it does not matter how many threads come. */
static inline void take_parts(void *given)
{
    Shared *shared = given;
    for (long t; (t = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->count;)
        shared->work(shared->parts + t * shared->size);
}

/* Call a function for each of some parts, which are so many bytes long: in threads of the pool, or else the first one in
 * this thread, and so each for which there is no other.
 */
static inline void side_by_side(void *(*work)(void *), void *parts, size_t size, long count)
{
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS];
    Shared shared = {work, parts, size, count, 0};
    if (pool != NULL && count > 1) {
        pool(take_parts, &shared, count, 0);
        return;
    }
    for (long t = 1; t < count; t++)
        started[t] = pthread_create(&others[t], NULL, work, (char *)parts + t * size) == 0;
    work(parts);
    for (long t = 1; t < count; t++) {
        if (started[t])
            pthread_join(others[t], NULL);
        else
            work((char *)parts + t * size);
    }
}

#endif
