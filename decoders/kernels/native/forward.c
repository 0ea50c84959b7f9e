// The forward pass of a Llama-like model (RMSNorm, rotary embeddings, grouped-query attention, SiLU). All threads run
// all layers together, in steps. A step costs no call, no allocation and no waking of threads. Each result is computed
// whole by one thread, so it does not depend on their number.

#include "attention.h"
#include "linear.h"
#include "threads.h"

typedef struct {
    Matrix qkv, out, gate_up, down;  // gate_up: LANES gates, LANES ups, ...
    const float *norm_in, *norm_mlp, *norm_query, *norm_key;  // the last two (HEAD_DIM,) or NULL
    Element *keys, *values;
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
static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

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

// Where the rows' states and the inputs of products are in scratch memory, in this order. Rows have `max_width` numbers.
typedef struct {
    Step *steps;
    void *units;                 // of the attention
    float *state, *qkv, *gated;  // (rows, hidden), (rows, qkv_width), (rows, intermediate)
    Element *query, *attended;   // (rows, query_width)
    float *normed, *stats, *gated_stats;
    Input *input, *gated_input;
    float *own;                  // (threads, own_floats)
    int64_t own_floats;          // of one thread: normed, input and stats of FEW_ROWS rows
    int64_t floats;              // of all
} Scratch;

#define FEW_ROWS 8        // up to this number each thread prepares all rows for itself, which is cheaper than to wait
#define MOST_BYTES 262144 // weights that a thread takes at once, if there are few rows

// Steps of a forward pass, at most.
static int64_t steps_of(const Model *m, const Batch *b) { return 8 * m->layer_count + b->state_count + 3; }

static Scratch scratch_at(float *memory, const Model *m, const Batch *b) {
    const int64_t query_width = m->heads * HEAD_DIM, max_width = max_width_of(m), rows = b->rows;
    const int64_t stats = STATS * (max_width / GROUP + 1), prepared = 2 * max_width + stats;
    Scratch s = {.own_floats = (FEW_ROWS * prepared + 15) / 16 * 16};
#define PLACE(type, field, count)                                                                                      \
    s.field = (type)(memory + s.floats);                                                                               \
    s.floats += ((count) + 15) / 16 * 16;
    PLACE(Step *, steps, steps_of(m, b) * (int64_t)(sizeof(Step) / sizeof(float)))
    PLACE(void *, units, batch_units_size(m, b) / (int64_t)sizeof(float))
    PLACE(float *, state, rows * m->hidden)
    PLACE(float *, qkv, rows * (query_width + 2 * m->kv_heads * HEAD_DIM))
    PLACE(float *, gated, rows * m->intermediate)
    PLACE(Element *, query, rows * query_width)
    PLACE(Element *, attended, rows * query_width)
    PLACE(float *, normed, rows * max_width)
    PLACE(float *, stats, rows * stats)
    PLACE(float *, gated_stats, rows * stats)
    PLACE(Input *, input, rows * max_width)
    PLACE(Input *, gated_input, rows * max_width)
    PLACE(float *, own, b->threads * s.own_floats)
    return s;
}

// Floats of scratch memory that a batch needs, aligned to 64 bytes.
int64_t scratch_floats(const Model *m, const Batch *b) { return scratch_at(NULL, m, b).floats; }

#if WEIGHTS != 8 && defined(FLOAT32)
#define INPUT(numbers, converted) (numbers)  // used in place
#else
#define INPUT(numbers, converted) (converted)
#endif

// The inputs of a product, one row after another.
typedef struct {
    const Input *numbers;
    const float *stats;
} Inputs;

typedef struct {
    const Model *model;
    const Batch *batch;
    Scratch scratch;
    Units units;
} Job;

// RMS-norm a row of floats, or without `norm` load a row of elements, and convert it to inputs of a product.
static void prepare_row(const Model *m, const void *row, const float *norm, int64_t width, float *normed, Input *input,
                        float *stats) {
    if (norm)
        rms_norm(row, norm, width, m->epsilon, normed);
    else
        for (int64_t i = 0; i < width; i += LANES) store(normed + i, load_elements((const Element *)row + i));
    convert_inputs(normed, width, INPUT(normed, input), stats);
}

// Prepare all rows, `width` wide. A few rows are prepared by each thread for itself, many in a step.
static Inputs prepare(const Job *job, Worker *worker, const void *rows, int64_t row_bytes, const float *norm,
                      int64_t width, int64_t units) {
    const Scratch *s = &job->scratch;
    const int64_t count = job->batch->rows, groups = STATS * (width / GROUP);
    float *normed = s->normed, *stats = s->stats;
    Input *input = s->input;
#define PREPARE(r)                                                                                                     \
    prepare_row(job->model, (const char *)rows + (r) * row_bytes, norm, width, normed + (r) * width,                   \
                input + (r) * width, stats + (r) * groups)
    if (count <= FEW_ROWS) {
        const int64_t max_width = max_width_of(job->model);
        normed = s->own + worker->thread * s->own_floats;
        input = (Input *)(normed + FEW_ROWS * max_width);
        stats = normed + 2 * FEW_ROWS * max_width;
        for (int64_t r = 0; r < count && !is_taken(worker, units); r++) PREPARE(r);
    } else
        for (Span row = {0}; next_span(worker, OTHER, count, 1, &row);) PREPARE(row.from);
    return (Inputs){INPUT(normed, input), stats};
}

// Copy the states of the kept rows before `layer`, if requested.
static void copy_states(const Job *job, Worker *worker, int64_t layer) {
    const Batch *b = job->batch;
    const int64_t hidden = job->model->hidden;
    for (int64_t i = 0; i < b->state_count; i++)
        if (b->layers[i] == layer)
            for (Span kept = {0}; next_span(worker, OTHER, b->kept, 1, &kept);)
                memcpy(b->states + (kept.from * b->state_count + i) * hidden,
                       job->scratch.state + b->keep[kept.from] * hidden, hidden * sizeof(float));
}

static int64_t units_of(const Matrix *matrix, int64_t unit) {
    return (strips_of(matrix) + unit - 1) / unit;
}

// Units of strips that a thread takes at once: more if they are small.
static int64_t most_units(const Matrix *matrix, int64_t unit, int64_t rows) {
    const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return max_int64(1, MOST_BYTES / (unit * strip_bytes(matrix) * max_int64(blocks, 1)));
}

// For each span of a product's strips, in units of `unit` strips.
#define EACH_STRIPS(span, matrix, unit)                                                                                \
    for (Span span = {0};                                                                                              \
         next_span(&worker, LINEAR, units_of(matrix, unit), most_units(matrix, unit, rows), &span);)

// The heads [from, to) of the product of queries, keys and values: rotate queries and keys, and keep keys and values.
static void place_heads(const Job *job, const Layer *layer, int64_t from, int64_t to) {
    const Model *m = job->model;
    const Batch *b = job->batch;
    const int64_t qkv_heads = m->heads + 2 * m->kv_heads;
    for (int64_t r = 0; r < b->rows; r++) {
        const float *cosines = b->cosines + b->rope_rows[r] * m->rotary_dim;
        const float *sines = b->sines + b->rope_rows[r] * m->rotary_dim;
        for (int64_t h = from; h < to; h++) {
            float *head = job->scratch.qkv + (r * qkv_heads + h) * HEAD_DIM;
            const int64_t kv_head = h < m->heads + m->kv_heads ? h - m->heads : h - m->heads - m->kv_heads;
            const int64_t offset = kv_head * m->kv_head_stride + b->write[r] * m->slot_stride;
            if (h < m->heads)
                apply_rope(head, layer->norm_query, m->epsilon, cosines, sines, m->rotary_dim,
                           job->scratch.query + (r * m->heads + h) * HEAD_DIM);
            else if (h < m->heads + m->kv_heads)
                apply_rope(head, layer->norm_key, m->epsilon, cosines, sines, m->rotary_dim, layer->keys + offset);
            else
                for (int i = 0; i < HEAD_DIM; i += LANES) store_elements(layer->values + offset + i, load(head + i));
        }
    }
}

// Strips that hold whole heads, and strips of gates and ups that hold whole groups of inputs.
#define HEAD_STRIPS (STRIP % HEAD_DIM == 0 ? 1 : HEAD_DIM % STRIP == 0 ? HEAD_DIM / STRIP : HEAD_DIM / 16)
#define GATE_STRIPS (GROUP > LANES ? GROUP / LANES : 1)

static void run_layers(void *argument, int thread) {
    const Job *job = argument;
    const Model *m = job->model;
    const Batch *b = job->batch;
    const Scratch *s = &job->scratch;
    const int64_t rows = b->rows, hidden = m->hidden, width = m->heads * HEAD_DIM, inner = m->intermediate;
    const int64_t qkv_width = width + 2 * m->kv_heads * HEAD_DIM;
    Worker worker = worker_of(s->steps, thread, (int)b->threads, b->seconds);

    for (Span row = {0}; next_span(&worker, OTHER, rows, 1, &row);)
        embed(m, b->tokens[row.from], s->state + row.from * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        copy_states(job, &worker, l);
        Inputs input = prepare(job, &worker, s->state, hidden * sizeof(float), layer->norm_in, hidden,
                               units_of(&layer->qkv, HEAD_STRIPS));
        EACH_STRIPS(span, &layer->qkv, HEAD_STRIPS) {
            const int64_t first = span.from * HEAD_STRIPS;
            const int64_t last = min_int64(span.to * HEAD_STRIPS, strips_of(&layer->qkv));
            multiply(&layer->qkv, input.numbers, input.stats, rows, STORE, s->qkv, qkv_width, first, last);
            place_heads(job, layer, first * STRIP / HEAD_DIM, min_int64(last * STRIP, qkv_width) / HEAD_DIM);
        }
        const Attention attention = {
            s->query, layer->keys, layer->values, s->attended, HEAD_DIM, width, m->kv_head_stride, m->slot_stride,
            rows, m->kv_heads, m->heads / m->kv_heads, m->scale, 0,
        };
        for (Span unit = {0}; next_span(&worker, ATTENTION, unit_count(&b->tiles, &attention, &job->units), 1, &unit);)
            attend_unit(unit.from, &attention, &b->tiles, &job->units);
#if WEIGHTS == 8
        input = prepare(job, &worker, s->attended, width * sizeof(Element), NULL, width, strips_of(&layer->out));
#else
        input = (Inputs){s->attended, NULL};
#endif
        EACH_STRIPS(span, &layer->out, 1)
            multiply(&layer->out, input.numbers, input.stats, rows, ADD, s->state, hidden, span.from, span.to);
        input = prepare(job, &worker, s->state, hidden * sizeof(float), layer->norm_mlp, hidden,
                        units_of(&layer->gate_up, GATE_STRIPS));
        EACH_STRIPS(span, &layer->gate_up, GATE_STRIPS) {
            const int64_t first = span.from * GATE_STRIPS;
            const int64_t last = min_int64(span.to * GATE_STRIPS, strips_of(&layer->gate_up));
            multiply(&layer->gate_up, input.numbers, input.stats, rows, GATE, s->gated, inner, first, last);
            if (INPUT(s->gated, s->gated_input) != (void *)s->gated)
                for (int64_t r = 0; r < rows; r++)
                    convert_inputs(s->gated + r * inner + first * LANES, (last - first) * LANES,
                                   s->gated_input + r * inner + first * LANES,
                                   s->gated_stats + STATS * (r * (inner / GROUP) + first * LANES / GROUP));
        }
        EACH_STRIPS(span, &layer->down, 1)
            multiply(&layer->down, INPUT(s->gated, s->gated_input), s->gated_stats, rows, ADD, s->state, hidden,
                     span.from, span.to);
    }
    for (Span kept = {0}; next_span(&worker, OTHER, b->kept, 1, &kept);) {
        const int64_t r = kept.from;
        float *normed = s->normed + r * hidden;
        prepare_row(m, s->state + b->keep[r] * hidden, m->norm, hidden, normed, s->input + r * hidden,
                    s->stats + r * STATS * (hidden / GROUP));
        for (int64_t i = 0; i < b->state_count; i++)
            if (b->layers[i] == m->layer_count)
                memcpy(b->states + (r * b->state_count + i) * hidden, normed, hidden * sizeof(float));
    }
    EACH_STRIPS(span, &m->head, 1)
        multiply(&m->head, INPUT(s->normed, s->input), s->stats, b->kept, STORE, b->logits, m->head.outputs, span.from,
                 span.to);
}

void forward(const Model *model, const Batch *batch) {
    Job job = {.model = model, .batch = batch, .scratch = scratch_at(batch->scratch, model, batch)};
    const int64_t units = batch_units_size(model, batch);
    job.units = units_in(units ? job.scratch.units : NULL, &batch->tiles, model->kv_heads);
    memset(job.scratch.steps, 0, steps_of(model, batch) * sizeof(Step));
    run_parallel(run_layers, &job, (int)batch->threads);
}
