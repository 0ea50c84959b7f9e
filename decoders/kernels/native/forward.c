// The forward pass of a Llama-like model (RMSNorm, rotary embeddings, grouped-query attention, SiLU). All threads run
// all layers together, with a barrier after each step. A step costs no call, no allocation and no waking of threads.

#include <omp.h>
#include <time.h>

#include "attention.h"
#include "linear.h"
#include "threads.h"

typedef struct {
    Matrix qkv, out, gate_up, down;  // gate_up: LANES gates, LANES ups, ...
    const float *norm_in, *norm_mlp, *norm_query, *norm_key;  // the last two (HEAD_DIM,) or NULL
    Stored *keys, *values;
} Layer;

typedef struct {
    const Layer *layers;
    const Element *embedding;  // or NULL: rows are the outputs of `table`, of integers
    const float *norm;
    Matrix head, table;
    int64_t layer_count, hidden, intermediate, heads, kv_heads, kv_head_stride, slot_stride, rotary_dim;
    float epsilon, scale;
} Model;

typedef struct {
    const int64_t *tokens, *rope_rows, *write, *keep;  // rows, rows, rows, kept
    const float *cosines, *sines;          // (positions, rotary_dim): row i uses entry rope_rows[i]
    float *logits;                         // (kept, vocabulary)
    float *states;                         // (kept, state_count, hidden): inputs of these layers, or the final norm
    const int64_t *layers;                 // (state_count,)
    float *scratch;
    double *seconds;                       // (3,), measured by the first thread: LINEAR, ATTENTION, OTHER
    Tiles tiles;
    int64_t rows, kept, state_count, threads;
} Batch;

// Python compares these with the sizes of its own structures.
const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};
const int64_t forward_sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch), LANES};

enum { LINEAR, ATTENTION, OTHER };

static void rms_norm(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    Floats squares = {0};
    for (int64_t i = 0; i < count; i += LANES) squares = add_product(squares, load(row + i), load(row + i));
    const float factor = 1.0f / sqrtf(reduce_add(squares) / (float)count + epsilon);
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(weight + i) * (load(row + i) * factor));
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

static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t batch_units_size(const Model *m, const Batch *b) {
    return units_size(&b->tiles, m->kv_heads, m->heads / m->kv_heads);
}

static int64_t max_width_of(const Model *m) {
    return max_int64(max_int64(m->hidden, m->heads * HEAD_DIM), m->intermediate);
}

// Load a row of the embedding.
static void embed(const Model *m, int64_t token, float *out) {
#if WEIGHTS == 8
    if (!m->embedding) {
        dequantize(&m->table, token, out);
        return;
    }
#endif
    for (int64_t i = 0; i < m->hidden; i += LANES) store(out + i, load_elements(m->embedding + token * m->hidden + i));
}

// Floats of scratch memory that a batch needs, aligned to 64 bytes.
int64_t scratch_floats(const Model *m, const Batch *b) {
    const int64_t query_width = m->heads * HEAD_DIM, qkv_width = query_width + 2 * m->kv_heads * HEAD_DIM;
    const int64_t max_width = max_width_of(m), stats = STATS * (max_width / GROUP + 1);
    const int64_t rows = b->rows * (m->hidden + qkv_width + 2 * query_width + 3 * max_width + stats);
    return rows + batch_units_size(m, b) / (int64_t)sizeof(float);
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

static void run_layers(const Model *m, const Batch *b, Barrier *barrier, int thread) {
    const int threads = barrier->threads;
    double since = now();
    const int64_t rows = b->rows, hidden = m->hidden, query_width = m->heads * HEAD_DIM, keys = m->kv_heads * HEAD_DIM;
    const int64_t qkv_width = query_width + 2 * keys, max_width = max_width_of(m);
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    const int64_t from = b->kept * thread / threads, to = b->kept * (thread + 1) / threads;
    float *state = barrier->scratch;
    float *qkv = state + rows * hidden;
    float *normed = qkv + rows * qkv_width, *gated = normed + rows * max_width;
    float *stats = gated + rows * max_width, *buffers = stats + rows * STATS * (max_width / GROUP + 1);
    Element *query = (Element *)buffers, *attended = (Element *)(buffers + rows * query_width);
    Input *input = (Input *)(buffers + 2 * rows * query_width);
#if WEIGHTS != 8 && defined(FLOAT32)
#define INPUT(numbers) (numbers)  // used in place
#else
#define INPUT(numbers) input
#endif

    for (int64_t r = first; r < last; r++) embed(m, b->tokens[r], state + r * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        for (int64_t r = first; r < last; r++) {
            rms_norm(state + r * hidden, layer->norm_in, hidden, m->epsilon, normed + r * hidden);
            convert_inputs(normed + r * hidden, hidden, INPUT(normed) + r * hidden,
                           stats + r * STATS * (hidden / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        copy_states(b, l, state, b->keep, hidden, from, to);
        multiply(&layer->qkv, INPUT(normed), stats, rows, STORE, qkv, qkv_width, thread, threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            const float *cosines = b->cosines + b->rope_rows[r] * m->rotary_dim;
            const float *sines = b->sines + b->rope_rows[r] * m->rotary_dim;
            float *row = qkv + r * qkv_width;
            for (int64_t h = 0; h < m->heads; h++)
                apply_rope(row + h * HEAD_DIM, layer->norm_query, m->epsilon, cosines, sines, m->rotary_dim,
                           query + r * query_width + h * HEAD_DIM);
            for (int64_t h = 0; h < m->kv_heads; h++) {
                const int64_t offset = h * m->kv_head_stride + b->write[r] * m->slot_stride;
                Element head[HEAD_DIM];
                apply_rope(row + query_width + h * HEAD_DIM, layer->norm_key, m->epsilon, cosines, sines, m->rotary_dim,
                           head);
                store_head(layer->keys + offset, head);
                for (int i = 0; i < HEAD_DIM; i += LANES)
                    store_elements(head + i, load(row + query_width + keys + h * HEAD_DIM + i));
                store_head(layer->values + offset, head);
            }
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        const Attention attention = {
            query, layer->keys, layer->values, attended, HEAD_DIM, query_width, m->kv_head_stride, m->slot_stride,
            rows, m->kv_heads, m->heads / m->kv_heads, m->scale, 0,
        };
        for (;;) {
            const int64_t number = atomic_fetch_add(&barrier->next, 1);
            if (number >= b->tiles.count * m->kv_heads * barrier->units.parts) break;
            attend_unit(number, &attention, &b->tiles, &barrier->units);
        }
        barrier_and_time(b, barrier, thread, ATTENTION, &since);
#if WEIGHTS == 8
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < query_width; i += LANES)
                store(normed + r * query_width + i, load_elements(attended + r * query_width + i));
            convert_inputs(normed + r * query_width, query_width, input + r * query_width,
                           stats + r * STATS * (query_width / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        multiply(&layer->out, input, stats, rows, ADD, state, hidden, thread, threads);
#else
        multiply(&layer->out, attended, stats, rows, ADD, state, hidden, thread, threads);
#endif
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            rms_norm(state + r * hidden, layer->norm_mlp, hidden, m->epsilon, normed + r * hidden);
            convert_inputs(normed + r * hidden, hidden, INPUT(normed) + r * hidden,
                           stats + r * STATS * (hidden / GROUP));
        }
        barrier_and_time(b, barrier, thread, OTHER, &since);
        multiply(&layer->gate_up, INPUT(normed), stats, rows, GATE, gated, m->intermediate, thread, threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
        if (INPUT(gated) != (void *)gated) {
            for (int64_t r = first; r < last; r++)
                convert_inputs(gated + r * m->intermediate, m->intermediate, input + r * m->intermediate,
                               stats + r * STATS * (m->intermediate / GROUP));
            barrier_and_time(b, barrier, thread, OTHER, &since);
        }
        multiply(&layer->down, INPUT(gated), stats, rows, ADD, state, hidden, thread, threads);
        barrier_and_time(b, barrier, thread, LINEAR, &since);
    }
    for (int64_t r = from; r < to; r++) {
        rms_norm(state + b->keep[r] * hidden, m->norm, hidden, m->epsilon, normed + r * hidden);
        convert_inputs(normed + r * hidden, hidden, INPUT(normed) + r * hidden,
                       stats + r * STATS * (hidden / GROUP));
    }
    copy_states(b, m->layer_count, normed, NULL, hidden, from, to);
    barrier_and_time(b, barrier, thread, OTHER, &since);
    multiply(&m->head, INPUT(normed), stats, b->kept, STORE, b->logits, m->head.outputs, thread, threads);
    barrier_and_time(b, barrier, thread, LINEAR, &since);
}

void forward(const Model *model, const Batch *batch) {
    Barrier barrier = {0};
    const int64_t size = batch_units_size(model, batch);
    barrier.units = units_in(size ? batch->scratch : NULL, &batch->tiles, model->kv_heads);
    barrier.scratch = batch->scratch + size / (int64_t)sizeof(float);
#pragma omp parallel num_threads(batch->threads)
    {
#pragma omp single
        barrier.threads = omp_get_num_threads();  // may be fewer than requested
        run_layers(model, batch, &barrier, omp_get_thread_num());
    }
}
