// A mixture of experts: each row is multiplied by the weights of the few experts that a router chooses for it.
//
// The chosen rows of an expert are multiplied together, so that its weights are read once, and weights of experts that
// no row chooses are not read. A row's result does not depend on the other rows.

#pragma once

#include "linear.h"

#define MAX_EXPERTS 4096

typedef struct {
    const float *weight, *bias;  // (experts, hidden); (experts,) or NULL
} Router;

// The rows of each expert. Entry e is a row of one expert; the entries of an expert follow each other.
typedef struct {
    float *weights;    // (rows, chosen): the weights of the chosen experts
    int32_t *entries;  // (rows, chosen): the entry of each choice
    int32_t *starts;   // (experts + 1,): the first entry of each expert
    int32_t *experts;  // (used,): the experts that have entries
    int64_t used;
} Groups;

// Floats of the memory for groups.
static int64_t groups_floats(int64_t rows, int64_t experts, int64_t chosen) {
    return experts ? 2 * rows * chosen + 2 * experts + 1 : 0;
}

// Compute the router's scores of the experts [from, to) for one row.
static void score_experts(const Router *router, const float *row, int64_t hidden, int64_t from, int64_t to,
                          float *scores) {
    for (int64_t e = from; e < to; e++) {
        Floats sum = {0};
        for (int64_t i = 0; i < hidden; i += LANES)
            sum = add_product(sum, load(row + i), load(router->weight + e * hidden + i));
        scores[e] = reduce_add(sum) + (router->bias ? router->bias[e] : 0.0f);
    }
}

// Choose `chosen` experts for one row by their scores. Their weights are the softmax of the scores, over the chosen
// experts alone if `normalized`.
static void choose_experts(const float *scores, int64_t experts, int64_t chosen, int normalized, int32_t *choices,
                           float *weights) {
    uint8_t taken[MAX_EXPERTS] = {0};
    float sum = 0;
    for (int64_t k = 0; k < chosen; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (!taken[e] && (best < 0 || scores[e] > scores[best])) best = e;
        taken[best] = 1;
        choices[k] = (int32_t)best;
        weights[k] = expf(scores[best] - scores[choices[0]]);
        sum += weights[k];
    }
    for (int64_t e = 0; !normalized && e < experts; e++)
        if (!taken[e]) sum += expf(scores[e] - scores[choices[0]]);
    for (int64_t k = 0; k < chosen; k++) weights[k] /= sum;
}

// Choose the experts of all rows by their scores (rows, experts), and group the rows by expert, in `memory`.
static Groups group_rows(float *memory, const float *scores, int64_t rows, int64_t experts, int64_t chosen,
                         int normalized) {
    int32_t *entries = (int32_t *)memory + rows * chosen, *starts = entries + rows * chosen;
    Groups groups = {memory, entries, starts, starts + experts + 1, 0};
    memset(starts, 0, (experts + 1) * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++)
        choose_experts(scores + r * experts, experts, chosen, normalized, entries + r * chosen,
                       groups.weights + r * chosen);
    for (int64_t i = 0; i < rows * chosen; i++) starts[entries[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
        if (starts[e + 1]) groups.experts[groups.used++] = (int32_t)e;
        starts[e + 1] += starts[e];
    }
    for (int64_t i = 0; i < rows * chosen; i++) entries[i] = starts[entries[i]]++;  // starts of the next expert
    memmove(starts + 1, starts, experts * sizeof(int32_t));
    starts[0] = 0;
    return groups;
}

// The weights of one expert, in the matrix of all experts: its outputs are a multiple of STRIP.
static Matrix expert_matrix(const Matrix *all, int64_t experts, int64_t expert) {
    Matrix matrix = *all;
    matrix.outputs = all->outputs / experts;
    matrix.strips += expert * (matrix.outputs / STRIP) * strip_bytes(all);
    if (matrix.bias) matrix.bias += expert * matrix.outputs;
    return matrix;
}
