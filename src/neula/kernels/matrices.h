/* Matrices of a batch as torch has them: of float or of double, with any strides. */
#ifndef NEULA_MATRICES_H
#define NEULA_MATRICES_H

typedef struct {
    void *first;
    long single, member, row, column;
} Matrices;

static inline double element(const Matrices *x, long member, long i, long j)
{
    long place = member * x->member + i * x->row + j * x->column;
    return x->single ? (double)((const float *)x->first)[place] : ((const double *)x->first)[place];
}

static inline void set(const Matrices *x, long member, long i, long j, double to)
{
    long place = member * x->member + i * x->row + j * x->column;
    if (x->single)
        ((float *)x->first)[place] = (float)to;
    else
        ((double *)x->first)[place] = to;
}

static inline void *place_of(const Matrices *x, long member, long i, long j)
{
    long place = member * x->member + i * x->row + j * x->column;
    return x->single ? (void *)((float *)x->first + place) : (void *)((double *)x->first + place);
}

/* The rows of one from some row on. */
static inline Matrices from_row(Matrices x, long member, long first)
{
    x.first = place_of(&x, member, first, 0);
    return x;
}

#endif
