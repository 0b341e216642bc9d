/* LU with partial pivoting of matrices of float and of double, in the place of their columns. */
#ifndef NEULA_LU_BLOCKS_H
#define NEULA_LU_BLOCKS_H

#define BLOCK 32        /* columns */
#define MOST_BLOCKS 128 /* of a matrix */
#define PATIENT 1000    /* looks for something to do before another process may have the processor */
#define LINE 64         /* bytes of a line of the cache */

/* A matrix, and how far its blocks of columns are. */
struct blocks {
    void *a;
    long n, apart; /* numbers from a column to the next: whole lines of the cache, with zeros below row n */
    long count, threads;
    int *pivots; /* counted from 0 */
    /* What threads write, apart from what they only read. */
    _Alignas(LINE) long factorized;
    long finished, joined, singular;
    struct {
        _Alignas(LINE) long applied; /* panels, interchanges of those that come later included */
        long busy;                   /* whether a thread is at it */
    } block[MOST_BLOCKS];
};

/* Work of one of some threads on the blocks of a matrix, until all is done or a pivot vanishes. */
void *take_blocks_of_doubles(void *blocks);
void *take_blocks_of_floats(void *blocks);

#endif
