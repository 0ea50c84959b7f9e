// A mixture of experts: each row is multiplied by the weights of the few experts that a router chooses for it.
//
// The chosen rows of an expert are multiplied together, so that its weights are read once, and weights of experts that
// no row chooses are not read. A row's result does not depend on the other rows.

#pragma once

#include "linear.h"

#define MAX_EXPERTS 4096
#define MAX_CHOSEN 64

typedef struct {
    const float *weight, *bias;  // (experts, hidden); (experts,) or NULL
} Router;

// The rows of each expert. Entry e is a row of one expert; the entries of an expert follow each other.
typedef struct {
    int32_t *starts;   // (experts + 1,): the first entry of each expert
    int32_t *entries;  // (rows, chosen): the entry of each choice
} Groups;

// Choose `chosen` of `experts` for one row. Their weights are the softmax of the router's scores, over the chosen
// experts alone if `normalized`.
static void choose_experts(const Router *router, const float *row, int64_t hidden, int64_t experts, int64_t chosen,
                           int normalized, int32_t *choices, float *weights) {
    float scores[MAX_EXPERTS];
    for (int64_t e = 0; e < experts; e++) {
        Floats sum = {0};
        for (int64_t i = 0; i < hidden; i += LANES)
            sum = add_product(sum, load(row + i), load(router->weight + e * hidden + i));
        scores[e] = reduce_add(sum) + (router->bias ? router->bias[e] : 0.0f);
    }
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

// Group the choices (rows, chosen) by expert.
static void group_choices(const int32_t *choices, int64_t rows, int64_t experts, int64_t chosen, Groups groups) {
    memset(groups.starts, 0, (experts + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < rows * chosen; i++) groups.starts[choices[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) groups.starts[e + 1] += groups.starts[e];
    for (int64_t i = 0; i < rows * chosen; i++) groups.entries[i] = groups.starts[choices[i]]++;
    for (int64_t e = experts; e > 0; e--) groups.starts[e] = groups.starts[e - 1];
    groups.starts[0] = 0;
}

// The weights of one expert, in the matrix of all experts: its outputs are a multiple of STRIP.
static Matrix expert_matrix(const Matrix *all, int64_t experts, int64_t expert) {
    Matrix matrix = *all;
    matrix.outputs = all->outputs / experts;
    matrix.strips += expert * (matrix.outputs / STRIP) * strip_bytes(all);
    if (matrix.bias) matrix.bias += expert * matrix.outputs;
    return matrix;
}

// Multiply the entries (entries, inputs) of each expert by its weights: one thread's share.
static void multiply_experts(const Matrix *all, int64_t experts, const Groups *groups, const Input *input,
                             const float *stats, Epilogue epilogue, float *out, int64_t out_stride, int thread,
                             int threads) {
    for (int64_t e = 0; e < experts; e++) {
        const int64_t first = groups->starts[e], count = groups->starts[e + 1] - first;
        if (count == 0) continue;
        const Matrix matrix = expert_matrix(all, experts, e);
        multiply(&matrix, input + first * all->inputs, stats + first * STATS * (all->inputs / GROUP), count, epilogue,
                 out + first * out_stride, out_stride, thread, threads);
    }
}
