// A whole forward of a Llama-like model (RMSNorm, rotary positions, grouped heads, SiLU): follows vectors.c and
// attention.c in one unit. All threads go through all layers together and meet between steps, so that a
// step costs no call, no allocation and no waking of threads.
//
// Weights are packed in strips of 32 outputs, each in the order in which it is read. What they are is compiled in:
// WEIGHTS 32: float32. 16: bfloat16, multiplied as float32 with -DFLOAT32 (exactly what float32 weights that are bfloat16
// numbers give, for half the bytes), else by bfloat16 products. 8: whole numbers in groups of inputs, times a step, plus a
// least; a matrix has them in eight bits or in four, in groups of GROUP or of half as many. Inputs are rounded to eight
// bits by a step for each GROUP of each row. The order of sums is the same however many rows there are: what a row gives
// does not depend on the others.

#include <omp.h>
#include <sched.h>
#include <time.h>

#define GROUP 32
#define WIDE 2                  // lines beside each other: MOST_ROWS rows by so many are sums that stay in registers
#define STRIP (WIDE * LANES)    // outputs
#if WEIGHTS == 8
typedef int8_t Input;
#define JOINED 4                // inputs of one output beside each other
#define LINE (LANES * JOINED)   // bytes of a line: LANES outputs
#if LANES == 8 && !defined(DOT)
#define MOST_ROWS 3             // what products pass through takes registers, too, and there are 16
#else
#define MOST_ROWS (LANES == 16 ? 8 : 6)
#endif
#else
typedef Element Input;
#define JOINED (32 / WEIGHTS)
#define LINE (4 * LANES)
#define MOST_ROWS (LANES == 16 ? 12 : 6)
#endif
#define WIDENED (WEIGHTS == 16 && STEP == 1)  // bfloat16 weights for float32 inputs
#define TOLD 4        // numbers told of GROUP inputs of a row: their step, the sum of all, and that of either half
#define AHEAD 16384   // bytes from what is multiplied to what is fetched, where rows are one block

typedef struct {
    // (outputs / STRIP, inputs / JOINED, WIDE, LANES, JOINED), outputs padded; of whole numbers (outputs / STRIP, inputs /
    // group) groups of lines as above, then (WIDE, 2, LANES) halves: their steps and least weights, in `unit`s; or
    // (WIDE, LANES), steps alone, where a number is a weight of 0: `middle`, if it is not 0. Of four bits two lines are
    // one: the first in the lower half of its bytes, the second in the upper.
    const uint8_t *strips;
    const float *bias;  // (outputs,) or none
    int64_t inputs, outputs, bits, group;
    double unit, middle;
} Matrix;

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

const int64_t forward_sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch), LANES};

enum { LINEAR, ATTENTION, OTHER };

typedef struct {
    atomic_int waiting, round;
    atomic_long next;  // of the attention's units
    int threads;
    Units units;
    float *space;  // of the rows, behind that of the units
} Meeting;

static void meet_all(Meeting *meeting) {
    const int round = atomic_load(&meeting->round);
    if (atomic_fetch_add(&meeting->waiting, 1) == meeting->threads - 1) {
        atomic_store(&meeting->waiting, 0);
        atomic_store(&meeting->next, 0);
        atomic_fetch_add(&meeting->round, 1);
        return;
    }
    for (int spins = 0; atomic_load(&meeting->round) == round; spins++) {
        if (spins < 4000)
            rest_a_little();
        else
            sched_yield();
    }
}

// What becomes of a product: stored, added to what stands there, or silu(gate) * up, whose lines are beside each other.
typedef enum { STORE, ADD, GATE } Then;

static inline Floats silu(Floats x) {
    const Floats power = exponential(-absolute(x)), share = 1.0f / (1.0f + power);  // sigmoid(|x|)
    const Words negative = x < 0.0f;
    return x * (Floats)(((Words)(1.0f - share) & negative) | ((Words)share & ~negative));
}

#if WEIGHTS == 8
// Bytes of a group's steps, and least weights if there are any, of LANES outputs.
static inline int64_t scale_bytes(const Matrix *matrix) { return (matrix->middle != 0 ? 2 : 4) * LANES; }

static inline int64_t strip_bytes(const Matrix *matrix) {
    const int64_t lines = matrix->inputs / JOINED * LINE * matrix->bits / 8;
    return WIDE * (lines + matrix->inputs / matrix->group * scale_bytes(matrix));
}

typedef Words Sum;
static inline Words add_line(int bits, Words sum, Words inputs, Words weights) {
    return bits == 4 ? add_nibbles(sum, weights, inputs) : add_bytes(sum, weights, inputs);
}
#else
static inline int64_t strip_bytes(const Matrix *matrix) { return matrix->inputs / JOINED * WIDE * LINE; }

typedef Floats Sum;
#define add_line(bits, sum, inputs, weights) multiply_add(sum, inputs, weights)
#endif

// Adds word number `word` of each row times the lines of a strip.
static inline __attribute__((always_inline)) void add_word(int rows, int bits, const Input *input, int64_t inputs,
                                                           int64_t word, const Words *lines, Sum (*sums)[WIDE]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const Words both = each_word(((const int32_t *)(input + r * inputs))[word]);
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] = add_line(bits, sums[r][p], both, lines[p]);
    }
}

// `rows` rows against one strip, which begins at `line`, while what stands `ahead` bytes from it is fetched. `bits` and
// `group` as the matrix has them; input (rows, inputs); out by its stride in numbers.
static inline __attribute__((always_inline)) void block(int rows, int bits, int group, const Matrix *matrix,
                                                        const uint8_t *line, int64_t strip, int64_t ahead,
                                                        const Input *input, const float *input_steps, Then then,
                                                        float *out, int64_t out_stride) {
    const int64_t inputs = matrix->inputs;
    Floats sums[MOST_ROWS][WIDE];
    Words lines[WIDE];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] = (Floats){0};
#if WEIGHTS == 8
    const int64_t groups = inputs / GROUP, scales = scale_bytes(matrix);
    const int parts = GROUP / group, words = group / JOINED;
    const float zero = -(float)matrix->middle;  // what the number 0 stands for, in steps
    for (int64_t g = 0; g < groups * parts; g++) {
        Words whole[MOST_ROWS][WIDE];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) whole[r][p] = (Words){0};
#pragma GCC unroll 4
        for (int64_t word = g * words; word < (g + 1) * words; word += 8 / bits, line += WIDE * LINE) {
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) {
                lines[p] = load_words(line + p * LINE);
                if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + ahead, 0, 2);
            }
            if (bits == 4) {
                Words lower[WIDE];
#pragma GCC unroll 2
                for (int p = 0; p < WIDE; p++) {
                    lower[p] = lines[p] & 0x0f0f0f0f;
                    lines[p] = (lines[p] >> 4) & 0x0f0f0f0f;
                }
                add_word(rows, bits, input, inputs, word, lower, whole);
                add_word(rows, bits, input, inputs, word + 1, lines, whole);
            } else
                add_word(rows, bits, input, inputs, word, lines, whole);
        }
        for (int at = 0; at < WIDE * scales; at += 64) __builtin_prefetch(line + at + ahead, 0, 2);
        const int of_sum = parts == 1 ? 1 : 2 + (int)(g % 2);
#define TOLD_OF(r) (input_steps + TOLD * ((r) * groups + g / parts))
#define WHOLE(r, p) __builtin_convertvector(bits == 4 ? of_nibbles(whole[r][p]) : whole[r][p], Floats)
        if (zero != 0) {
            const Floats step[WIDE] = {load_halves(line), load_halves(line + scales)};
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const Floats times = each(TOLD_OF(r)[0]), more = each(zero * TOLD_OF(r)[of_sum]);
#pragma GCC unroll 2
                for (int p = 0; p < WIDE; p++)
                    sums[r][p] = add_product(sums[r][p], step[p], add_product(more, WHOLE(r, p), times));
            }
        } else {
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) {
                const Floats step = load_halves(line + p * scales), least = load_halves(line + p * scales + 2 * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    sums[r][p] = add_product(sums[r][p], least, each(TOLD_OF(r)[of_sum]));
                    sums[r][p] = add_product(sums[r][p], step, WHOLE(r, p) * TOLD_OF(r)[0]);
                }
            }
        }
        line += WIDE * scales;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] *= (float)matrix->unit;
#else
    for (int64_t word = 0; word < inputs / JOINED; word++, line += WIDE * LINE) {
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) {
            lines[p] = load_words(line + p * LINE);
            if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + ahead, 0, 2);
        }
#if WIDENED
        // The first of two bfloat16 is the lower half of a word: its bits are a float32's upper ones.
        Words halves[WIDE];
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) halves[p] = lines[p] << 16;
        add_word(rows, 0, input, inputs, 2 * word, halves, sums);
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) halves[p] = lines[p] & (int32_t)0xffff0000;
        add_word(rows, 0, input, inputs, 2 * word + 1, halves, sums);
#else
        add_word(rows, 0, input, inputs, word, lines, sums);
#endif
    }
#endif
#pragma GCC unroll 2
    for (int p = 0; p < WIDE; p++) {
        const int64_t column = STRIP * strip + LANES * p, left = matrix->outputs - column;
        if (left <= 0) break;
        if (matrix->bias) {
            const Floats bias = load_some(matrix->bias + column, left);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sums[r][p] += bias;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float *place = out + r * out_stride + column;
            if (then == ADD)
                store_some(place, load_some(place, left) + sums[r][p], left);
            else if (then == STORE)
                store_some(place, sums[r][p], left);
            else if (p % 2)
                store(out + r * out_stride + LANES * strip, silu(sums[r][p - 1]) * sums[r][p]);
        }
    }
}

static inline __attribute__((always_inline)) void blocks_of(int bits, int group, const Matrix *matrix,
                                                            const Input *input, const float *input_steps, int64_t rows,
                                                            Then then, float *out, int64_t out_stride, int thread,
                                                            int threads) {
    if (rows == 0) return;
    const int64_t strips = (matrix->outputs + STRIP - 1) / STRIP, blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t most = (rows + blocks - 1) / blocks;
    const int64_t ahead = blocks > 1 ? strip_bytes(matrix) : AHEAD;
    for (int64_t strip = strips * thread / threads; strip < strips * (thread + 1) / threads; strip++) {
        const uint8_t *line = matrix->strips + strip * strip_bytes(matrix);
        for (int64_t row = 0; row < rows; row += most) {
            const int64_t count = rows - row < most ? rows - row : most;
            const Input *from = input + row * matrix->inputs;
            const float *steps = input_steps + row * TOLD * (matrix->inputs / GROUP);
            float *to = out + row * out_stride;
            // The number is a constant in each, so that loops are unrolled.
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        block(n, bits, group, matrix, line, strip, ahead, from, steps, then, to, out_stride);                                \
        break;
            switch (count) {
                CASE(1)
                CASE(2)
                CASE(3)
#if MOST_ROWS > 3
                CASE(4)
                CASE(5)
                CASE(6)
#endif
#if MOST_ROWS > 6
                CASE(7)
                CASE(8)
#endif
#if MOST_ROWS > 8
                CASE(9)
                CASE(10)
                CASE(11)
                CASE(12)
#endif
            }
        }
    }
}

// One thread's share of the outputs: (rows, inputs) by (inputs, outputs).
static void multiply(const Matrix *matrix, const Input *input, const float *input_steps, int64_t rows, Then then,
                     float *out, int64_t out_stride, int thread, int threads) {
    // These are constants in each, so that what only some need is left out of the others.
#define BLOCKS_OF(bits, group)                                                                                         \
    blocks_of(bits, group, matrix, input, input_steps, rows, then, out, out_stride, thread, threads)
#if WEIGHTS == 8
    if (matrix->bits == 4)
        BLOCKS_OF(4, GROUP);
    else if (matrix->group == GROUP / 2)
        BLOCKS_OF(8, GROUP / 2);
    else
#endif
        BLOCKS_OF(8, GROUP);
}

// Numbers of one row as inputs of a product; `steps` are for whole numbers only, TOLD for each GROUP of them. Where inputs
// are such numbers, that is all.
static void prepare(const float *numbers, int64_t count, Input *inputs, float *steps) {
#if WEIGHTS == 8
    typedef Input Rounded __attribute__((vector_size(sizeof(Input) * LANES)));
    const float top = 127.0f;
    for (int64_t g = 0; g < count / GROUP; g++) {
        const float *group = numbers + g * GROUP;
        Floats sizes = {0}, damage = {0};  // NaN where one of them is: the largest may pass it over
        for (int i = 0; i < GROUP; i += LANES) {
            sizes = larger_of(sizes, absolute(load(group + i)));
            damage += load(group + i) - load(group + i);
        }
        const float most = largest_of(sizes) + sum_of(damage);
        const float factor = most > 0 ? top / most : 0.0f;
        float *told = steps + TOLD * g;
        told[0] = most / top;
        for (int half = 0; half < 2; half++) {
            Words sum = {0};
            for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i += LANES) {
                const Words whole = nearest(load(group + i) * factor);
                const Rounded rounded = __builtin_convertvector(whole, Rounded);
                memcpy(inputs + g * GROUP + i, &rounded, sizeof rounded);
                sum += whole;
            }
            told[2 + half] = told[0] * sum_of(__builtin_convertvector(sum, Floats));
        }
        told[1] = told[2] + told[3];
    }
#else
    if ((const void *)inputs != numbers)
        for (int64_t i = 0; i < count; i += LANES) put(inputs + i, load(numbers + i));
#endif
}

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

#if WEIGHTS == 8
// The weights of one output: of its strip one lane in every line.
static void unpack(const Matrix *matrix, int64_t output, float *out) {
    const int64_t lane = output % LANES, p = output / LANES % WIDE, bits = matrix->bits;
    const int64_t words = matrix->group / JOINED, lines = words * bits / 8 * WIDE * LINE;
    const uint8_t *group = matrix->strips + output / STRIP * strip_bytes(matrix);
    for (int64_t g = 0; g < matrix->inputs / matrix->group; g++, group += lines + WIDE * scale_bytes(matrix)) {
        const uint8_t *scales = group + lines + p * scale_bytes(matrix);
        const float step = load_halves(scales)[lane];
        const float least = matrix->middle != 0 ? step * -(float)matrix->middle : load_halves(scales + 2 * LANES)[lane];
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < JOINED; i++) {
                const int byte = group[(word * bits / 8 * WIDE + p) * LINE + lane * JOINED + i];
                const int number = bits == 8 ? byte : word % 2 ? byte >> 4 : byte & 15;
                *out++ = (float)matrix->unit * (least + step * (float)number);
            }
    }
}
#endif

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
static void meet_after(const Batch *b, Meeting *meeting, int thread, int what, double *since) {
    meet_all(meeting);
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

static void layers(const Model *m, const Batch *b, Meeting *meeting, int thread) {
    const int threads = meeting->threads;
    double since = now();
    const int64_t rows = b->rows, hidden = m->hidden, queries = m->heads * HEAD_DIM, keys = m->kv_heads * HEAD_DIM;
    const int64_t all = queries + 2 * keys, widest = widest_of(m);
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    const int64_t from = b->kept * thread / threads, to = b->kept * (thread + 1) / threads;
    float *state = meeting->space;
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
        meet_after(b, meeting, thread, OTHER, &since);
        keep_states(b, l, state, b->keep, hidden, from, to);
        multiply(&layer->qkv, INPUT(normed), steps, rows, STORE, qkv, all, thread, threads);
        meet_after(b, meeting, thread, LINEAR, &since);
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
        meet_after(b, meeting, thread, OTHER, &since);
        const Attention attention = {
            query, layer->keys, layer->values, seen, HEAD_DIM, queries, m->kv_head_stride, m->slot_stride,
            rows, m->kv_heads, m->heads / m->kv_heads, m->scale, 0,
        };
        for (;;) {
            const int64_t number = atomic_fetch_add(&meeting->next, 1);
            if (number >= b->tiles.count * m->kv_heads * meeting->units.parts) break;
            unit(number, &attention, &b->tiles, &meeting->units);
        }
        meet_after(b, meeting, thread, ATTENTION, &since);
#if WEIGHTS == 8
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < queries; i += LANES) store(normed + r * queries + i, get(seen + r * queries + i));
            prepare(normed + r * queries, queries, input + r * queries, steps + r * TOLD * (queries / GROUP));
        }
        meet_after(b, meeting, thread, OTHER, &since);
        multiply(&layer->out, input, steps, rows, ADD, state, hidden, thread, threads);
#else
        multiply(&layer->out, seen, steps, rows, ADD, state, hidden, thread, threads);
#endif
        meet_after(b, meeting, thread, LINEAR, &since);
        for (int64_t r = first; r < last; r++) {
            normalise(state + r * hidden, layer->norm_mlp, hidden, m->epsilon, normed + r * hidden);
            prepare(normed + r * hidden, hidden, INPUT(normed) + r * hidden, steps + r * TOLD * (hidden / GROUP));
        }
        meet_after(b, meeting, thread, OTHER, &since);
        multiply(&layer->gate_up, INPUT(normed), steps, rows, GATE, gated, m->intermediate, thread, threads);
        meet_after(b, meeting, thread, LINEAR, &since);
        if (INPUT(gated) != (void *)gated) {
            for (int64_t r = first; r < last; r++)
                prepare(gated + r * m->intermediate, m->intermediate, input + r * m->intermediate,
                        steps + r * TOLD * (m->intermediate / GROUP));
            meet_after(b, meeting, thread, OTHER, &since);
        }
        multiply(&layer->down, INPUT(gated), steps, rows, ADD, state, hidden, thread, threads);
        meet_after(b, meeting, thread, LINEAR, &since);
    }
    for (int64_t r = from; r < to; r++) {
        normalise(state + b->keep[r] * hidden, m->norm, hidden, m->epsilon, normed + r * hidden);
        prepare(normed + r * hidden, hidden, INPUT(normed) + r * hidden, steps + r * TOLD * (hidden / GROUP));
    }
    keep_states(b, m->layer_count, normed, NULL, hidden, from, to);
    meet_after(b, meeting, thread, OTHER, &since);
    multiply(&m->head, INPUT(normed), steps, b->kept, STORE, b->logits, m->head.outputs, thread, threads);
    meet_after(b, meeting, thread, LINEAR, &since);
}

void forward(const Model *model, const Batch *batch) {
    Meeting meeting = {0};
    const int64_t size = batch_units_size(model, batch);
    meeting.units = units_in(size ? batch->space : NULL, &batch->tiles, model->kv_heads);
    meeting.space = batch->space + size / (int64_t)sizeof(float);
#pragma omp parallel num_threads(batch->threads)
    {
#pragma omp single
        meeting.threads = omp_get_num_threads();  // may be fewer than asked for
        layers(model, batch, &meeting, omp_get_thread_num());
    }
}
