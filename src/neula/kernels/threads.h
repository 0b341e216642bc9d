/* Parts of some work side by side. */
#ifndef NEULA_THREADS_H
#define NEULA_THREADS_H

#include <pthread.h>
#include <stddef.h>

#define MOST_THREADS 64

typedef struct {
    void *(*work)(void *);
    char *parts;
    size_t size;
    long count;
} Team;

#ifdef __ELF__
/* OpenMP's pool of threads, which is torch's, where the process has one: what GCC compiles calls these. Its threads
 * wait busily for a while after each use, so that others beside them would share their cores, and they begin sooner. */
extern void GOMP_parallel(void (*work)(void *), void *of, unsigned threads, unsigned flags) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

/* The parts of one thread of the pool, however many there are. */
static void take_parts(void *of)
{
    const Team *team = of;
    for (long t = omp_get_thread_num(); t < team->count; t += omp_get_num_threads())
        team->work(team->parts + t * team->size);
}

/* Whether there is a pool, which has done the work. All of it is asked: it ends threads that a team does not need. */
static int by_pool(Team *team)
{
    if (GOMP_parallel == NULL || omp_get_thread_num == NULL || omp_get_num_threads == NULL)
        return 0;
    GOMP_parallel(take_parts, team, 0, 0);
    return 1;
}
#else
static int by_pool(Team *team)
{
    (void)team;
    return 0;
}
#endif

/* By threads of their own: the first part in this thread, and so each for which there is no other. */
static void start_threads(const Team *team)
{
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS];
    for (long t = 1; t < team->count; t++)
        started[t] = pthread_create(&others[t], NULL, team->work, team->parts + t * team->size) == 0;
    team->work(team->parts);
    for (long t = 1; t < team->count; t++) {
        if (started[t])
            pthread_join(others[t], NULL);
        else
            team->work(team->parts + t * team->size);
    }
}

/* Call a function for each of some parts, which are so many bytes long. */
static inline void side_by_side(void *(*work)(void *), void *parts, size_t size, long count)
{
    Team team = {work, parts, size, count};
    if (count == 1)
        work(parts);
    else if (!by_pool(&team))
        start_threads(&team);
}

#endif
