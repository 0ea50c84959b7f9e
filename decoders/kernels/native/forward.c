// The forward pass of a transformer: RMSNorm, rotary embeddings, grouped-query attention, gated linear units or a mixture
// of experts. What only some families have is NULL or 0 in the others. All threads run all layers together, with a
// barrier after each step. A step costs no call, no allocation and no waking of threads.

#include <omp.h>
#include <time.h>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "threads.h"

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
    float *states;                         // (kept, state_count, hidden): inputs of these layers, or the final norm
    const int64_t *layers;                 // (state_count,)
    float *scratch;
    double *seconds;                       // (3,), measured by the first thread: LINEAR, ATTENTION, OTHER
    Tiles tiles[KINDS];
    int64_t rows, kept, state_count, threads;
} Batch;

// Python compares these with the sizes of its own structures.
const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};
const int64_t forward_sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch), LANES};

enum { LINEAR, ATTENTION, OTHER };

// 1 / sqrt(mean(row^2) + epsilon)
static float rms_factor(const float *row, int64_t count, float epsilon) {
    Floats squares = {0};
    for (int64_t i = 0; i < count; i += LANES) squares = add_product(squares, load(row + i), load(row + i));
    return 1.0f / sqrtf(reduce_add(squares) / (float)count + epsilon);
}

static void rms_norm(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    const float factor = rms_factor(row, count, epsilon);
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(weight + i) * (load(row + i) * factor));
}

static void add_rms_norm(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    const float factor = rms_factor(row, count, epsilon);
    for (int64_t i = 0; i < count; i += LANES)
        store(out + i, load(out + i) + load(weight + i) * (load(row + i) * factor));
}

// Rotate dimensions i and i + rotary_dim / 2 (RoFormer, section 3.2.2, in halves), after the head's norm, if any.
static void apply_rope(float *head, const float *norm, float epsilon, const float *cosines, const float *sines,
                       int64_t rotary_dim, Element *out) {
    float normed[HEAD_DIM];
    if (norm) {
        rms_norm(head, norm, HEAD_DIM, epsilon, normed);
        head = normed;
    }
    const int64_t half = rotary_dim / 2;
    float rotated[HEAD_DIM];
    for (int64_t i = 0; i < half; i += LANES) {
#define LOAD_PART(numbers) load_partial((numbers) + i, half - i)
        const Floats a = LOAD_PART(head), b = LOAD_PART(head + half);
        store_partial(rotated + i, add_product(-(b * LOAD_PART(sines)), a, LOAD_PART(cosines)), half - i);
        store_partial(rotated + half + i, add_product(a * LOAD_PART(sines + half), b, LOAD_PART(cosines + half)),
                      half - i);
    }
    for (int64_t i = rotary_dim; i < HEAD_DIM; i++) rotated[i] = head[i];
    for (int i = 0; i < HEAD_DIM; i += LANES) store_elements(out + i, load(rotated + i));
}

// cap * tanh(x / cap) (Gemma 2, section 2).
static void cap_logits(float *logits, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES)
        store_partial(logits + i, soft_cap(load_partial(logits + i, count - i), cap), count - i);
}

static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t batch_units_size(const Model *m, const Batch *b) {
    int64_t size = 0;
    for (int kind = 0; kind < KINDS; kind++)
        size += units_size(b->tiles + kind, m->kv_heads, m->heads / m->kv_heads);
    return size;
}

static int64_t max_width_of(const Model *m) {
    return max_int64(max_int64(m->hidden, m->heads * HEAD_DIM), m->intermediate);
}

// Load a row of the embedding.
static void embed(const Model *m, int64_t token, float *out) {
#if WEIGHTS == 8
    if (!m->embedding) dequantize(&m->table, token, out);
#endif
    for (int64_t i = 0; i < m->hidden; i += LANES) {
        const Floats x = m->embedding ? load_elements(m->embedding + token * m->hidden + i) : load(out + i);
        store(out + i, x * m->embedding_scale);
    }
}

#define STATS_FLOATS(width) (STATS * ((width) / GROUP + 1))

// The scratch memory of a batch. An entry is a row, or in a mixture a row of one expert.
typedef struct {
    float *state, *qkv, *normed, *gated, *added, *stats;  // added: (entries, hidden), results that are added to the state later
    Element *query, *attended;
    Input *input;
    float *scores;    // (rows, chosen): weights of the chosen experts
    int32_t *chosen;  // (rows, chosen)
    int32_t *groups;  // (threads, experts + 1 + entries): Groups of each thread
} Scratch;

// Place the scratch memory at `next`. Returns its end.
static float *place_scratch(const Model *m, const Batch *b, float *next, Scratch *scratch) {
    const int64_t rows = b->rows, choices = rows * m->chosen, entries = max_int64(rows, choices);
    const int64_t query_width = m->heads * HEAD_DIM, max_width = max_width_of(m);
#define PLACE(field, floats)                                                                                           \
    scratch->field = (void *)next;                                                                                     \
    next += ((floats) + 15) / 16 * 16
    PLACE(state, rows * m->hidden);
    PLACE(qkv, rows * (query_width + 2 * m->kv_heads * HEAD_DIM));
    PLACE(normed, rows * max_width);
    PLACE(gated, entries * m->intermediate);
    PLACE(added, m->experts || m->layers->norm_attended ? entries * m->hidden : 0);
    PLACE(stats, entries * STATS_FLOATS(max_width));
    PLACE(query, rows * query_width);
    PLACE(attended, rows * query_width);
    PLACE(input, entries * max_width);
    PLACE(scores, choices);
    PLACE(chosen, choices);
    PLACE(groups, b->threads * (m->experts + 1 + choices));
    return next;
}

// Floats of scratch memory that a batch needs, aligned to 64 bytes.
int64_t scratch_floats(const Model *m, const Batch *b) {
    Scratch scratch;
    float start;
    return place_scratch(m, b, &start, &scratch) - &start + batch_units_size(m, b) / (int64_t)sizeof(float);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Wait for all threads. The first one adds the seconds since its last call to `phase`.
static void barrier_and_time(const Batch *b, Barrier *barrier, int thread, int phase, double *since) {
    barrier_wait(barrier);
    if (thread) return;
    const double time = now();
    b->seconds[phase] += time - *since;
    *since = time;
}

// Copy the states of the kept rows [from, to) before `layer`, if requested. Kept row r is row rows[r] of `states`, or r
// if rows is NULL.
static void copy_states(const Batch *b, int64_t layer, const float *states, const int64_t *rows, int64_t hidden,
                        int64_t from, int64_t to) {
    for (int64_t i = 0; i < b->state_count; i++)
        if (b->layers[i] == layer)
            for (int64_t r = from; r < to; r++)
                memcpy(b->states + (r * b->state_count + i) * hidden, states + (rows ? rows[r] : r) * hidden,
                       hidden * sizeof(float));
}

#if WEIGHTS != 8 && defined(FLOAT32)
#define INPUT(numbers) (numbers)  // used in place
#else
#define INPUT(numbers) scratch->input
#endif

// The groups of one thread: each computes them for itself, which costs less than waiting for another.
static Groups groups_of(const Model *m, const Batch *b, const Scratch *scratch, int thread) {
    int32_t *starts = scratch->groups + thread * (m->experts + 1 + b->rows * m->chosen);
    return (Groups){starts, starts + m->experts + 1};
}

// Add the result of the layer's second half for row r to the state, and write the sum to `out`.
static void finish_layer(const Model *m, const Layer *layer, const Scratch *scratch, const Groups *groups, int64_t r,
                         float *out) {
    const int64_t hidden = m->hidden;
    const float *state = scratch->state + r * hidden;
    if (out != state) memcpy(out, state, hidden * sizeof(float));
    if (m->experts) {
        for (int64_t k = r * m->chosen; k < (r + 1) * m->chosen; k++) {
            const float *added = scratch->added + groups->entries[k] * hidden;
            const Floats weight = splat(scratch->scores[k]);
            for (int64_t i = 0; i < hidden; i += LANES)
                store(out + i, add_product(load(out + i), load(added + i), weight));
        }
    } else if (layer->norm_done) {
        add_rms_norm(scratch->added + r * hidden, layer->norm_done, hidden, m->epsilon, out);
    }
}

static void run_layers(const Model *m, const Batch *b, Barrier *barrier, int thread) {
    const int threads = barrier->threads;
    double since = now();
    const int64_t rows = b->rows, hidden = m->hidden, query_width = m->heads * HEAD_DIM, keys = m->kv_heads * HEAD_DIM;
    const int64_t qkv_width = query_width + 2 * keys, inner = m->intermediate;
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    const int64_t from = b->kept * thread / threads, to = b->kept * (thread + 1) / threads;
    Scratch place, *scratch = &place;
    place_scratch(m, b, barrier->scratch, scratch);
    float *state = scratch->state, *qkv = scratch->qkv, *normed = scratch->normed, *stats = scratch->stats;
    Input *input = scratch->input;
    const Groups groups = groups_of(m, b, scratch, thread);

    for (int64_t r = first; r < last; r++) embed(m, b->tokens[r], state + r * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        for (int64_t r = first; r < last; r++) {
            if (l) finish_layer(m, layer - 1, scratch, &groups, r, state + r * hidden);
            rms_norm(state + r * hidden, layer->norm_in, hidden, m->epsilon, normed + r * hidden);
            convert_inputs(normed + r * hidden, hidden, INPUT(normed) + r * hidden,
                           stats + r * STATS * (hidden / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        copy_states(b, l, state, b->keep, hidden, from, to);
        multiply(&layer->qkv, INPUT(normed), stats, rows, STORE, qkv, qkv_width, thread, threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        const int64_t rotary_dim = layer->rope < 0 ? 0 : m->rotary_dim, kind = layer->rope < 0 ? 0 : layer->rope;
        for (int64_t r = first; r < last; r++) {
            const float *cosines = b->cosines[kind] + b->rope_rows[r] * m->rotary_dim;
            const float *sines = b->sines[kind] + b->rope_rows[r] * m->rotary_dim;
            float *row = qkv + r * qkv_width;
            for (int64_t h = 0; h < m->heads; h++)
                apply_rope(row + h * HEAD_DIM, layer->norm_query, m->epsilon, cosines, sines, rotary_dim,
                           scratch->query + r * query_width + h * HEAD_DIM);
            for (int64_t h = 0; h < m->kv_heads; h++) {
                const int64_t offset = h * m->kv_head_stride + b->write[r] * m->slot_stride;
                Element head[HEAD_DIM];
                apply_rope(row + query_width + h * HEAD_DIM, layer->norm_key, m->epsilon, cosines, sines, rotary_dim,
                           head);
                store_head(layer->keys + offset, head);
                for (int i = 0; i < HEAD_DIM; i += LANES)
                    store_elements(head + i, load(row + query_width + keys + h * HEAD_DIM + i));
                store_head(layer->values + offset, head);
            }
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        const Attention attention = {
            scratch->query, layer->keys, layer->values, scratch->attended, HEAD_DIM, query_width, m->kv_head_stride,
            m->slot_stride, rows, m->kv_heads, m->heads / m->kv_heads, layer->sinks, m->scale, m->attention_cap,
        };
        const Tiles *tiles = b->tiles + layer->window;
        const Units *units = barrier->units + layer->window;
        for (;;) {
            const int64_t number = atomic_fetch_add(&barrier->next, 1);
            if (number >= tiles->count * m->kv_heads * units->parts) break;
            attend_unit(number, &attention, tiles, units);
        }
        barrier_and_time(b, barrier, thread, ATTENTION, &since);
        // If the result is normed before it is added, it is stored apart.
        float *const target = layer->norm_attended ? scratch->added : state;
        const Epilogue epilogue = layer->norm_attended ? STORE : ADD;
#if WEIGHTS == 8
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < query_width; i += LANES)
                store(normed + r * query_width + i, load_elements(scratch->attended + r * query_width + i));
            convert_inputs(normed + r * query_width, query_width, input + r * query_width,
                           stats + r * STATS * (query_width / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        multiply(&layer->out, input, stats, rows, epilogue, target, hidden, thread, threads);
#else
        multiply(&layer->out, scratch->attended, stats, rows, epilogue, target, hidden, thread, threads);
#endif
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            if (layer->norm_attended)
                add_rms_norm(scratch->added + r * hidden, layer->norm_attended, hidden, m->epsilon,
                             state + r * hidden);
            rms_norm(state + r * hidden, layer->norm_mlp, hidden, m->epsilon, normed + r * hidden);
            if (m->experts)
                choose_experts(&layer->router, normed + r * hidden, hidden, m->experts, m->chosen, m->normalized,
                               scratch->chosen + r * m->chosen, scratch->scores + r * m->chosen);
            else
                convert_inputs(normed + r * hidden, hidden, INPUT(normed) + r * hidden,
                               stats + r * STATS * (hidden / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        if (m->experts) {
            group_choices(scratch->chosen, rows, m->experts, m->chosen, groups);
            for (int64_t k = first * m->chosen; k < last * m->chosen; k++) {
                const int64_t entry = groups.entries[k];
                convert_inputs(normed + k / m->chosen * hidden, hidden, input + entry * hidden,
                               stats + entry * STATS * (hidden / GROUP));
            }
            barrier_and_time(b, barrier, thread, OTHER, &since);
            multiply_experts(&layer->gate_up, m->experts, &groups, input, stats, m->activation, scratch->gated, inner,
                             thread, threads);
        } else
            multiply(&layer->gate_up, INPUT(normed), stats, rows, m->activation, scratch->gated, inner, thread,
                     threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        if (INPUT(scratch->gated) != (void *)scratch->gated) {
            const int64_t per_row = m->experts ? m->chosen : 1;
            for (int64_t e = first * per_row; e < last * per_row; e++)
                convert_inputs(scratch->gated + e * inner, inner, input + e * inner,
                               stats + e * STATS * (inner / GROUP));
            barrier_and_time(b, barrier, thread, OTHER, &since);
        }
        if (m->experts)
            multiply_experts(&layer->down, m->experts, &groups, INPUT(scratch->gated), stats, STORE, scratch->added,
                             hidden, thread, threads);
        else if (layer->norm_done)
            multiply(&layer->down, INPUT(scratch->gated), stats, rows, STORE, scratch->added, hidden, thread, threads);
        else
            multiply(&layer->down, INPUT(scratch->gated), stats, rows, ADD, state, hidden, thread, threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
    }
    for (int64_t i = from; i < to; i++) {
        float *row = normed + i * hidden;
        finish_layer(m, m->layers + m->layer_count - 1, scratch, &groups, b->keep[i], row);
        rms_norm(row, m->norm, hidden, m->epsilon, row);
        convert_inputs(row, hidden, INPUT(normed) + i * hidden, stats + i * STATS * (hidden / GROUP));
    }
    copy_states(b, m->layer_count, normed, NULL, hidden, from, to);
    barrier_and_time(b, barrier, thread, OTHER, &since);
    multiply(&m->head, INPUT(normed), stats, b->kept, STORE, b->logits, m->head.outputs, thread, threads);
    barrier_and_time(b, barrier, thread, LINEAR, &since);
    for (int64_t i = from; m->logit_cap > 0 && i < to; i++)
        cap_logits(b->logits + i * m->head.outputs, m->head.outputs, m->logit_cap);
}

void forward(const Model *model, const Batch *batch) {
    Barrier barrier = {0};
    barrier.scratch = batch->scratch;
    for (int kind = 0; kind < KINDS; kind++) {
        const Tiles *tiles = batch->tiles + kind;
        const int64_t size = units_size(tiles, model->kv_heads, model->heads / model->kv_heads);
        barrier.units[kind] = units_in(size ? barrier.scratch : NULL, tiles, model->kv_heads);
        barrier.scratch += size / (int64_t)sizeof(float);
    }
#pragma omp parallel num_threads(batch->threads)
    {
#pragma omp single
        barrier.threads = omp_get_num_threads();  // may be fewer than requested
        run_layers(model, batch, &barrier, omp_get_thread_num());
    }
}
