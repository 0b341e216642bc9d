/* Parts of some work side by side. */
#ifndef NEULA_THREADS_H
#define NEULA_THREADS_H

#include <pthread.h>
#include <stddef.h>

#define MOST_THREADS 64

/* Call a function for each of some parts, which are so many bytes long: the first one in this thread, and so each for
 * which there is no other.
 */
static inline void side_by_side(void *(*work)(void *), void *parts, size_t size, long count)
{
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS];
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
