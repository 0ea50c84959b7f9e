// A model and a batch of rows, as Python describes them: RMSNorm, rotary embeddings, grouped-query attention, gated
// linear units or a mixture of experts. Parts that only some families have are NULL or 0 in the others.

#pragma once

#include "attention.h"
#include "experts.h"
#include "linear.h"

#define KINDS 2  // of windows and of rotary embeddings: some families have local and global layers

typedef struct {
    Matrix qkv, out, gate_up, down;        // gate_up: LANES gates, LANES ups, ...; the last two of all experts
    const float *norm_in, *norm_mlp;       // before attention, and before the rest of the layer
    const float *norm_attended, *norm_done;  // of their results, or NULL
    const float *norm_query, *norm_key;    // (HEAD_DIM,) or NULL
    const float *sinks;                    // (heads,) or NULL
    Router router;
    Stored *keys, *values;
    int64_t window, rope;                  // number of its tiles; number of its rotary tables, or -1 for none
} Layer;

typedef struct {
    const Layer *layers;
    const Element *embedding;  // or NULL: rows are the outputs of `table`, of integers
    const float *norm;
    Matrix head, table;
    int64_t layer_count, hidden, intermediate, heads, kv_heads, kv_head_stride, slot_stride, rotary_dim;
    int64_t activation, experts, chosen, normalized;  // of `experts` a row has `chosen`; 0 if there is no mixture
    float epsilon, scale, attention_cap, embedding_scale, logit_cap;  // caps are 0 for none
} Model;

typedef struct {
    const int64_t *tokens, *rope_rows, *write, *keep;  // rows, rows, rows, kept
    const float *cosines[KINDS], *sines[KINDS];  // (positions, rotary_dim): row i uses entry rope_rows[i]
    float *logits;                         // (kept, vocabulary)
    float *scratch;
    Tiles tiles[KINDS];
    int64_t rows, kept, threads;
    atomic_int *saturated;                 // number of keys and values beyond the range in which they are stored
} Batch;
