// A whole forward of a Llama-like model (RMSNorm, rotary positions, grouped heads, SiLU). All threads go through all
// layers together, with a barrier after each step, so that a step costs no call, no allocation and no waking of threads.

#include <omp.h>
#include <time.h>

#include "attention.h"
#include "linear.h"
#include "threads.h"

typedef struct {
    Matrix qkv, out, gate_up, down;  // gate_up: LANES gates, LANES ups, and so on
    const float *norm_in, *norm_mlp, *norm_query, *norm_key;  // the last two (HEAD_DIM,) or none
    Element *keys, *values;
} Layer;

typedef struct {
    const Layer *layers;
    const Element *embedding;  // or none: rows are outputs of `table`, of whole numbers
    const float *norm;
    Matrix head, table;
    int64_t layer_count, hidden, intermediate, heads, kv_heads, kv_head_stride, slot_stride, turned;
    float epsilon, scale;
} Model;

typedef struct {
    const int64_t *tokens, *turns, *write, *keep;  // rows, rows, rows, kept
    const float *cosines, *sines;          // (turns, turned): row i is turned by number turns[i] of them
    float *logits;                         // (kept, vocabulary)
    float *states;                         // (kept, wanted, hidden): before these layers, and after the last's norm
    const int64_t *layers;                 // wanted
    float *space;
    double *seconds;                       // of the first thread: LINEAR, ATTENTION, OTHER
    Tiles tiles;
    int64_t rows, kept, wanted, threads;
} Batch;

const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};
const int64_t forward_sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch), LANES};

enum { LINEAR, ATTENTION, OTHER };

static void normalise(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    Floats squares = {0};
    for (int64_t i = 0; i < count; i += LANES) squares = add_product(squares, load(row + i), load(row + i));
    const float factor = 1.0f / sqrtf(sum_of(squares) / (float)count + epsilon);
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(weight + i) * (load(row + i) * factor));
}

// Dimension i goes with i + turned / 2 (RoFormer, section 3.2.2, in halves); a norm of the head before that, if any.
static void turn(float *head, const float *norm, float epsilon, const float *cosines, const float *sines,
                 int64_t turned, Element *out) {
    float whole[HEAD_DIM];
    if (norm) {
        normalise(head, norm, HEAD_DIM, epsilon, whole);
        head = whole;
    }
    const int64_t half = turned / 2;
    float done[HEAD_DIM];
    for (int64_t i = 0; i < half; i += LANES) {
#define AT(numbers) load_some((numbers) + i, half - i)
        const Floats a = AT(head), b = AT(head + half);
        store_some(done + i, add_product(-(b * AT(sines)), a, AT(cosines)), half - i);
        store_some(done + half + i, add_product(a * AT(sines + half), b, AT(cosines + half)), half - i);
    }
    for (int64_t i = turned; i < HEAD_DIM; i++) done[i] = head[i];
    for (int i = 0; i < HEAD_DIM; i += LANES) put(out + i, load(done + i));
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t batch_units_size(const Model *m, const Batch *b) {
    return units_size(&b->tiles, m->kv_heads, m->heads / m->kv_heads);
}

static int64_t widest_of(const Model *m) { return larger(larger(m->hidden, m->heads * HEAD_DIM), m->intermediate); }

// A row of the embedding.
static void embed(const Model *m, int64_t token, float *out) {
#if WEIGHTS == 8
    if (!m->embedding) {
        unpack(&m->table, token, out);
        return;
    }
#endif
    for (int64_t i = 0; i < m->hidden; i += LANES) store(out + i, get(m->embedding + token * m->hidden + i));
}

// Numbers of float32 that a batch needs as space, aligned to 64 bytes.
int64_t space_for(const Model *m, const Batch *b) {
    const int64_t queries = m->heads * HEAD_DIM, all = queries + 2 * m->kv_heads * HEAD_DIM, widest = widest_of(m);
    const int64_t rows = b->rows * (m->hidden + all + 2 * queries + 3 * widest + TOLD * (widest / GROUP + 1));
    return rows + batch_units_size(m, b) / (int64_t)sizeof(float);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Threads wait for each other; what went by since they last did was spent on `what`.
static void wait_and_count(const Batch *b, Barrier *barrier, int thread, int what, double *since) {
    wait_for_all(barrier);
    if (thread) return;
    const double time = now();
    b->seconds[what] += time - *since;
    *since = time;
}

// What the rows that are kept, from `from` to `to`, are before a layer: row r of the batch stands at states + r * hidden.
static void keep_states(const Batch *b, int64_t layer, const float *states, const int64_t *rows, int64_t hidden,
                        int64_t from, int64_t to) {
    for (int64_t i = 0; i < b->wanted; i++)
        if (b->layers[i] == layer)
            for (int64_t r = from; r < to; r++)
                memcpy(b->states + (r * b->wanted + i) * hidden, states + (rows ? rows[r] : r) * hidden,
                       hidden * sizeof(float));
}

static void layers(const Model *m, const Batch *b, Barrier *barrier, int thread) {
    const int threads = barrier->threads;
    double since = now();
    const int64_t rows = b->rows, hidden = m->hidden, queries = m->heads * HEAD_DIM, keys = m->kv_heads * HEAD_DIM;
    const int64_t all = queries + 2 * keys, widest = widest_of(m);
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    const int64_t from = b->kept * thread / threads, to = b->kept * (thread + 1) / threads;
    float *state = barrier->space;
    float *qkv = state + rows * hidden;
    float *normed = qkv + rows * all, *gated = normed + rows * widest;
    float *steps = gated + rows * widest, *rest = steps + rows * TOLD * (widest / GROUP + 1);
    Element *query = (Element *)rest, *seen = (Element *)(rest + rows * queries);
    Input *input = (Input *)(rest + 2 * rows * queries);
#if WEIGHTS != 8 && defined(FLOAT32)
#define INPUT(numbers) (numbers)  // as they are
#else
#define INPUT(numbers) input
#endif

    for (int64_t r = first; r < last; r++) embed(m, b->tokens[r], state + r * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        for (int64_t r = first; r < last; r++) {
            normalise(state + r * hidden, layer->norm_in, hidden, m->epsilon, normed + r * hidden);
            prepare(normed + r * hidden, hidden, INPUT(normed) + r * hidden, steps + r * TOLD * (hidden / GROUP));
        }
        wait_and_count(b, barrier, thread, OTHER, &since);
        keep_states(b, l, state, b->keep, hidden, from, to);
        multiply(&layer->qkv, INPUT(normed), steps, rows, STORE, qkv, all, thread, threads);
        wait_and_count(b, barrier, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            const float *cosines = b->cosines + b->turns[r] * m->turned, *sines = b->sines + b->turns[r] * m->turned;
            float *row = qkv + r * all;
            for (int64_t h = 0; h < m->heads; h++)
                turn(row + h * HEAD_DIM, layer->norm_query, m->epsilon, cosines, sines, m->turned,
                     query + r * queries + h * HEAD_DIM);
            for (int64_t h = 0; h < m->kv_heads; h++) {
                const int64_t place = h * m->kv_head_stride + b->write[r] * m->slot_stride;
                turn(row + queries + h * HEAD_DIM, layer->norm_key, m->epsilon, cosines, sines, m->turned,
                     layer->keys + place);
                for (int i = 0; i < HEAD_DIM; i += LANES)
                    put(layer->values + place + i, load(row + queries + keys + h * HEAD_DIM + i));
            }
        }
        wait_and_count(b, barrier, thread, OTHER, &since);
        const Attention attention = {
            query, layer->keys, layer->values, seen, HEAD_DIM, queries, m->kv_head_stride, m->slot_stride,
            rows, m->kv_heads, m->heads / m->kv_heads, m->scale, 0,
        };
        for (;;) {
            const int64_t number = atomic_fetch_add(&barrier->next, 1);
            if (number >= b->tiles.count * m->kv_heads * barrier->units.parts) break;
            unit(number, &attention, &b->tiles, &barrier->units);
        }
        wait_and_count(b, barrier, thread, ATTENTION, &since);
#if WEIGHTS == 8
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < queries; i += LANES) store(normed + r * queries + i, get(seen + r * queries + i));
            prepare(normed + r * queries, queries, input + r * queries, steps + r * TOLD * (queries / GROUP));
        }
        wait_and_count(b, barrier, thread, OTHER, &since);
        multiply(&layer->out, input, steps, rows, ADD, state, hidden, thread, threads);
#else
        multiply(&layer->out, seen, steps, rows, ADD, state, hidden, thread, threads);
#endif
        wait_and_count(b, barrier, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            normalise(state + r * hidden, layer->norm_mlp, hidden, m->epsilon, normed + r * hidden);
            prepare(normed + r * hidden, hidden, INPUT(normed) + r * hidden, steps + r * TOLD * (hidden / GROUP));
        }
        wait_and_count(b, barrier, thread, OTHER, &since);
        multiply(&layer->gate_up, INPUT(normed), steps, rows, GATE, gated, m->intermediate, thread, threads);
        wait_and_count(b, barrier, thread, LINEAR, &since);
        if (INPUT(gated) != (void *)gated) {
            for (int64_t r = first; r < last; r++)
                prepare(gated + r * m->intermediate, m->intermediate, input + r * m->intermediate,
                        steps + r * TOLD * (m->intermediate / GROUP));
            wait_and_count(b, barrier, thread, OTHER, &since);
        }
        multiply(&layer->down, INPUT(gated), steps, rows, ADD, state, hidden, thread, threads);
        wait_and_count(b, barrier, thread, LINEAR, &since);
    }
    for (int64_t r = from; r < to; r++) {
        normalise(state + b->keep[r] * hidden, m->norm, hidden, m->epsilon, normed + r * hidden);
        prepare(normed + r * hidden, hidden, INPUT(normed) + r * hidden, steps + r * TOLD * (hidden / GROUP));
    }
    keep_states(b, m->layer_count, normed, NULL, hidden, from, to);
    wait_and_count(b, barrier, thread, OTHER, &since);
    multiply(&m->head, INPUT(normed), steps, b->kept, STORE, b->logits, m->head.outputs, thread, threads);
    wait_and_count(b, barrier, thread, LINEAR, &since);
}

void forward(const Model *model, const Batch *batch) {
    Barrier barrier = {0};
    const int64_t size = batch_units_size(model, batch);
    barrier.units = units_in(size ? batch->space : NULL, &batch->tiles, model->kv_heads);
    barrier.space = batch->space + size / (int64_t)sizeof(float);
#pragma omp parallel num_threads(batch->threads)
    {
#pragma omp single
        barrier.threads = omp_get_num_threads();  // may be fewer than asked for
        layers(model, batch, &barrier, omp_get_thread_num());
    }
}
