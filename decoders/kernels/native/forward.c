// The forward pass of a transformer: RMSNorm, rotary embeddings, grouped-query attention, gated linear units or a
// mixture of experts. What only some families have is NULL or 0 in the others. All threads run all layers together, in
// steps. A step costs no call, no allocation and no waking of threads. One thread computes each number whole, so the
// result does not depend on the number of threads.

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"
#include "threads.h"

#define KINDS 2  // of windows and of rotary embeddings: some families have local and global layers

typedef struct {
    Matrix qkv, out, gate_up, down;        // gate_up: LANES gates, LANES ups, ...; the last two of all experts
    const float *norm_in, *norm_mlp;       // before attention, and before the rest of the layer
    const float *norm_attended, *norm_done;  // of their results, or NULL
    const float *norm_query, *norm_key;    // (HEAD_DIM,) or NULL
    const float *sinks;                    // (heads,) or NULL
    Router router;
    Element *keys, *values;
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

static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

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

#define FEW_ROWS 8         // up to this number each thread prepares all rows for itself, which is cheaper than to wait
#define MOST_BYTES 262144  // weights that a thread takes at once, if there are few rows
#define STATS_FLOATS(width) (STATS * ((width) / GROUP + 1))

// The inputs of a product, one row after another.
typedef struct {
    Input *numbers;
    float *stats;
} Inputs;

// The scratch memory of a batch. An entry is a row, or in a mixture a row of one expert.
typedef struct {
    Step *steps;
    void *units[KINDS];                           // of attention
    float *state, *qkv, *normed, *gated, *added;  // added: (entries, hidden), results to add to the state later
    Element *query, *attended;
    Inputs input, gated_input;
    float *scores;               // (rows, chosen): weights of the chosen experts
    int32_t *chosen;             // (rows, chosen)
    Groups groups;
    float *own;                  // (threads, own_floats): floats, numbers and stats of FEW_ROWS rows
    int64_t own_floats, floats;  // of a thread, of all
} Scratch;

typedef struct {
    const Model *model;
    const Batch *batch;
    Scratch scratch;
    Units units[KINDS];
} Job;

static int64_t units_floats(const Model *m, const Batch *b, int kind) {
    return units_size(b->tiles + kind, m->kv_heads, m->heads / m->kv_heads) / (int64_t)sizeof(float);
}

// Steps of a forward pass, at most.
static int64_t steps_of(const Model *m, const Batch *b) { return 13 * m->layer_count + b->state_count + 3; }

static Scratch scratch_at(float *memory, const Model *m, const Batch *b) {
    const int64_t rows = b->rows, choices = rows * m->chosen, entries = max_int64(rows, choices);
    const int64_t query_width = m->heads * HEAD_DIM, width = max_width_of(m);
    Scratch s = {.own_floats = FEW_ROWS * (2 * width + STATS_FLOATS(width))};
#define PLACE(field, count)                                                                                            \
    s.field = (void *)(memory + s.floats);                                                                             \
    s.floats += ((count) + 15) / 16 * 16
    PLACE(steps, steps_of(m, b) * (int64_t)(sizeof(Step) / sizeof(float)));
    for (int kind = 0; kind < KINDS; kind++) {
        PLACE(units[kind], units_floats(m, b, kind));
    }
    PLACE(state, rows * m->hidden);
    PLACE(qkv, rows * (query_width + 2 * m->kv_heads * HEAD_DIM));
    PLACE(normed, rows * width);
    PLACE(gated, entries * m->intermediate);
    PLACE(added, m->experts || m->layers->norm_attended ? entries * m->hidden : 0);
    PLACE(query, rows * query_width);
    PLACE(attended, rows * query_width);
    PLACE(input.numbers, entries * width);
    PLACE(input.stats, entries * STATS_FLOATS(width));
    PLACE(gated_input.numbers, entries * m->intermediate);
    PLACE(gated_input.stats, entries * STATS_FLOATS(m->intermediate));
    PLACE(scores, choices);
    PLACE(chosen, choices);
    PLACE(groups.starts, m->experts + 1);
    PLACE(groups.entries, choices);
    PLACE(groups.active, m->experts + 1);
    PLACE(own, b->threads * s.own_floats);
    return s;
}

// Floats of scratch memory that a batch needs, aligned to 64 bytes.
int64_t scratch_floats(const Model *m, const Batch *b) { return scratch_at(NULL, m, b).floats; }

#if WEIGHTS != 8 && defined(FLOAT32)
#define INPUT(floats, converted) (floats)  // used in place
#else
#define INPUT(floats, converted) (converted)
#endif

static Inputs gated_inputs(const Scratch *s) {
    return (Inputs){INPUT(s->gated, s->gated_input.numbers), s->gated_input.stats};
}

// Convert the floats [from, to) of row r, `width` wide.
static void convert_part(float *floats, Inputs inputs, int64_t r, int64_t width, int64_t from, int64_t to) {
    const int64_t at = r * width + from;
    convert_inputs(floats + at, to - from, INPUT(floats, inputs.numbers) + at,
                   inputs.stats + STATS * (r * (width / GROUP) + from / GROUP));
}

// Norm row r, or without `norm` load its elements, and convert it to inputs of a product.
static void prepare_row(const Model *m, const void *rows, const float *norm, int64_t r, int64_t width, float *floats,
                        Inputs inputs) {
    float *row = floats + r * width;
    if (norm)
        rms_norm((const float *)rows + r * width, norm, width, m->epsilon, row);
    else
        for (int64_t i = 0; i < width; i += LANES) store(row + i, load_elements((const Element *)rows + r * width + i));
    convert_part(floats, inputs, r, width, 0, width);
}

// Prepare all rows as inputs of the next step, which has `units` units. Each thread prepares a few rows for itself. Many
// rows are a step of their own.
static Inputs prepare(const Job *job, Worker *worker, const void *rows, const float *norm, int64_t width,
                      int64_t units) {
    const int64_t count = job->batch->rows, max_width = max_width_of(job->model);
    float *floats = job->scratch.normed;
    Inputs inputs = job->scratch.input;
    if (count <= FEW_ROWS) {
        floats = job->scratch.own + worker->thread * job->scratch.own_floats;
        inputs = (Inputs){(Input *)(floats + FEW_ROWS * max_width), floats + 2 * FEW_ROWS * max_width};
        for (int64_t r = 0; r < count && !is_taken(worker, units); r++)
            prepare_row(job->model, rows, norm, r, width, floats, inputs);
    } else {
        EACH_UNIT(worker, OTHER, count, row) prepare_row(job->model, rows, norm, row, width, floats, inputs);
    }
    return (Inputs){INPUT(floats, inputs.numbers), inputs.stats};
}

// Copy the states of the kept rows before `layer`, if requested.
static void copy_states(const Job *job, Worker *worker, int64_t layer) {
    const Batch *b = job->batch;
    const int64_t hidden = job->model->hidden;
    for (int64_t i = 0; i < b->state_count; i++)
        if (b->layers[i] == layer)
            EACH_UNIT(worker, OTHER, b->kept, kept)
                memcpy(b->states + (kept * b->state_count + i) * hidden, job->scratch.state + b->keep[kept] * hidden,
                       hidden * sizeof(float));
}

static int64_t units_of(int64_t strips, int64_t unit) { return (strips + unit - 1) / unit; }

// Take the next of a product's `total` strips, in units of `unit` strips: fewer at once if they are large.
static int next_strips(Worker *worker, const Matrix *matrix, int64_t total, int64_t unit, int64_t rows, Span *strips) {
    Span units = {strips->from / unit, (strips->to + unit - 1) / unit};
    const int64_t most = MOST_BYTES / (unit * strip_bytes(matrix) * (rows / MAX_ROWS + 1));
    const int more = next_span(worker, LINEAR, units_of(total, unit), max_int64(most, 1), &units);
    *strips = (Span){units.from * unit, min_int64(units.to * unit, total)};
    return more;
}

#define EACH_STRIPS(worker, matrix, total, unit, rows, strips)                                                         \
    for (Span strips = {0}; next_strips(worker, matrix, total, unit, rows, &strips);)

// Strips that hold whole heads, and strips of gates and ups that hold whole groups of inputs.
#define HEAD_STRIPS (STRIP % HEAD_DIM == 0 ? 1 : HEAD_DIM % STRIP == 0 ? HEAD_DIM / STRIP : HEAD_DIM / 16)
#define GATE_STRIPS (GROUP > LANES ? GROUP / LANES : 1)

// Place the heads [from, to) of queries, keys and values: rotate queries and keys, and store keys and values.
static void place_heads(const Job *job, const Layer *layer, int64_t from, int64_t to) {
    const Model *m = job->model;
    const Batch *b = job->batch;
    const int64_t all = m->heads + 2 * m->kv_heads;
    const int64_t rotary_dim = layer->rope < 0 ? 0 : m->rotary_dim, kind = layer->rope < 0 ? 0 : layer->rope;
    for (int64_t r = 0; r < b->rows; r++) {
        const float *cosines = b->cosines[kind] + b->rope_rows[r] * m->rotary_dim;
        const float *sines = b->sines[kind] + b->rope_rows[r] * m->rotary_dim;
        for (int64_t h = from; h < to; h++) {
            float *head = job->scratch.qkv + (r * all + h) * HEAD_DIM;
            const int64_t key_head = h - m->heads, value_head = key_head - m->kv_heads, slot = b->write[r];
            if (key_head < 0)
                apply_rope(head, layer->norm_query, m->epsilon, cosines, sines, rotary_dim,
                           job->scratch.query + (r * m->heads + h) * HEAD_DIM);
            else if (value_head < 0)
                apply_rope(head, layer->norm_key, m->epsilon, cosines, sines, rotary_dim,
                           layer->keys + key_head * m->kv_head_stride + slot * m->slot_stride);
            else
                for (int i = 0; i < HEAD_DIM; i += LANES)
                    store_elements(layer->values + value_head * m->kv_head_stride + slot * m->slot_stride + i,
                                   load(head + i));
        }
    }
}

// Multiply the inputs of the entries [first, last) by some strips. Outputs of gates are converted to inputs.
static void multiply_entries(const Job *job, const Matrix *matrix, Inputs inputs, int64_t first, int64_t last,
                             Epilogue epilogue, float *out, int64_t width, Span strips) {
    multiply(matrix, inputs.numbers + first * matrix->inputs, inputs.stats + first * STATS * (matrix->inputs / GROUP),
             last - first, epilogue, out + first * width, width, strips.from, strips.to);
    if (epilogue != STORE && epilogue != ADD)
        for (int64_t e = first; e < last; e++)
            convert_part(out, job->scratch.gated_input, e, width, strips.from * LANES, strips.to * LANES);
}

// Multiply the entries of each chosen expert by its weights.
static void multiply_experts(const Job *job, Worker *worker, const Matrix *all, int64_t unit, Inputs inputs,
                             Epilogue epilogue, float *out, int64_t width) {
    const Groups *groups = &job->scratch.groups;
    const int64_t experts = job->model->experts, choices = job->batch->rows * job->model->chosen;
    const int64_t each = strips_of(all) / experts;  // strips of one expert
    // The number of units must not depend on the choices, which may change while a late thread is here.
    EACH_STRIPS(worker, all, min_int64(experts, choices) * each, unit, choices / experts, strips)
        for (int64_t at = strips.from, end; at < strips.to && at / each < groups->active[experts]; at = end) {
            const int64_t i = at / each, expert = groups->active[i];
            end = min_int64((i + 1) * each, strips.to);
            const Matrix matrix = expert_matrix(all, experts, expert);
            multiply_entries(job, &matrix, inputs, groups->starts[expert], groups->starts[expert + 1], epilogue, out,
                             width, (Span){at - i * each, end - i * each});
        }
}

// Add the result of the layer's second half for row r to `out`.
static void finish_layer(const Model *m, const Layer *layer, const Scratch *s, int64_t r, float *out) {
    const int64_t hidden = m->hidden;
    if (m->experts) {
        for (int64_t k = r * m->chosen; k < (r + 1) * m->chosen; k++) {
            const float *added = s->added + s->groups.entries[k] * hidden;
            const Floats weight = splat(s->scores[k]);
            for (int64_t i = 0; i < hidden; i += LANES)
                store(out + i, add_product(load(out + i), load(added + i), weight));
        }
    } else if (layer->norm_done) {
        add_rms_norm(s->added + r * hidden, layer->norm_done, hidden, m->epsilon, out);
    }
}

// The second half of a layer as a mixture of experts: its results are in `added`.
static void mix_experts(const Job *job, Worker *worker, const Layer *layer) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    const int64_t rows = job->batch->rows, hidden = m->hidden;
    EACH_UNIT(worker, OTHER, rows, r) {
        float *row = s->normed + r * hidden;
        rms_norm(s->state + r * hidden, layer->norm_mlp, hidden, m->epsilon, row);
        choose_experts(&layer->router, row, hidden, m->experts, m->chosen, m->normalized, s->chosen + r * m->chosen,
                       s->scores + r * m->chosen);
    }
    EACH_UNIT(worker, OTHER, 1, all) group_choices(s->chosen, rows, m->experts, m->chosen, s->groups);
    EACH_UNIT(worker, OTHER, rows * m->chosen, k) {
        const int64_t entry = s->groups.entries[k];
        convert_inputs(s->normed + k / m->chosen * hidden, hidden, s->input.numbers + entry * hidden,
                       s->input.stats + STATS * entry * (hidden / GROUP));
    }
    multiply_experts(job, worker, &layer->gate_up, GATE_STRIPS, s->input, m->activation, s->gated, m->intermediate);
    multiply_experts(job, worker, &layer->down, 1, gated_inputs(s), STORE, s->added, hidden);
}

static void run_layers(void *argument, int thread) {
    const Job *job = argument;
    const Model *m = job->model;
    const Batch *b = job->batch;
    const Scratch *s = &job->scratch;
    const int64_t rows = b->rows, hidden = m->hidden, width = m->heads * HEAD_DIM, inner = m->intermediate;
    const int64_t qkv_width = width + 2 * m->kv_heads * HEAD_DIM;
    const int stored_apart = m->experts || m->layers->norm_done;
    Worker state = worker_of(s->steps, thread, (int)b->threads, b->seconds), *worker = &state;

    EACH_UNIT(worker, OTHER, rows, r) embed(m, b->tokens[r], s->state + r * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        if (l && stored_apart)
            EACH_UNIT(worker, OTHER, rows, r) finish_layer(m, layer - 1, s, r, s->state + r * hidden);
        copy_states(job, worker, l);
        const int64_t strips_of_qkv = strips_of(&layer->qkv), strips_of_gates = strips_of(&layer->gate_up);
        Inputs input = prepare(job, worker, s->state, layer->norm_in, hidden, units_of(strips_of_qkv, HEAD_STRIPS));
        EACH_STRIPS(worker, &layer->qkv, strips_of_qkv, HEAD_STRIPS, rows, strips) {
            multiply_entries(job, &layer->qkv, input, 0, rows, STORE, s->qkv, qkv_width, strips);
            place_heads(job, layer, strips.from * STRIP / HEAD_DIM,
                        min_int64(strips.to * STRIP, qkv_width) / HEAD_DIM);
        }
        const Attention attention = {
            s->query, layer->keys, layer->values, s->attended, HEAD_DIM, width, m->kv_head_stride,
            m->slot_stride, rows, m->kv_heads, m->heads / m->kv_heads, layer->sinks, m->scale, m->attention_cap,
        };
        const Tiles *tiles = b->tiles + layer->window;
        const Units *units = job->units + layer->window;
        EACH_UNIT(worker, ATTENTION, tiles->count * m->kv_heads * units->parts, unit)
            attend_unit(unit, &attention, tiles, units);
#if WEIGHTS == 8
        input = prepare(job, worker, s->attended, NULL, width, strips_of(&layer->out));
#else
        input = (Inputs){s->attended, s->input.stats};
#endif
        // If the result is normed before it is added, it is stored apart.
        EACH_STRIPS(worker, &layer->out, strips_of(&layer->out), 1, rows, strips)
            multiply_entries(job, &layer->out, input, 0, rows, layer->norm_attended ? STORE : ADD,
                             layer->norm_attended ? s->added : s->state, hidden, strips);
        if (layer->norm_attended)
            EACH_UNIT(worker, OTHER, rows, r)
                add_rms_norm(s->added + r * hidden, layer->norm_attended, hidden, m->epsilon, s->state + r * hidden);
        if (m->experts) {
            mix_experts(job, worker, layer);
            continue;
        }
        input = prepare(job, worker, s->state, layer->norm_mlp, hidden, units_of(strips_of_gates, GATE_STRIPS));
        EACH_STRIPS(worker, &layer->gate_up, strips_of_gates, GATE_STRIPS, rows, strips)
            multiply_entries(job, &layer->gate_up, input, 0, rows, m->activation, s->gated, inner, strips);
        EACH_STRIPS(worker, &layer->down, strips_of(&layer->down), 1, rows, strips)
            multiply_entries(job, &layer->down, gated_inputs(s), 0, rows, layer->norm_done ? STORE : ADD,
                             layer->norm_done ? s->added : s->state, hidden, strips);
    }
    EACH_UNIT(worker, OTHER, b->kept, i) {
        float *row = s->normed + i * hidden;
        memcpy(row, s->state + b->keep[i] * hidden, hidden * sizeof(float));
        finish_layer(m, m->layers + m->layer_count - 1, s, b->keep[i], row);
        prepare_row(m, s->normed, m->norm, i, hidden, s->normed, s->input);
        for (int64_t k = 0; k < b->state_count; k++)
            if (b->layers[k] == m->layer_count)
                memcpy(b->states + (i * b->state_count + k) * hidden, row, hidden * sizeof(float));
    }
    const Inputs kept = {INPUT(s->normed, s->input.numbers), s->input.stats};
    EACH_STRIPS(worker, &m->head, strips_of(&m->head), 1, b->kept, strips) {
        multiply_entries(job, &m->head, kept, 0, b->kept, STORE, b->logits, m->head.outputs, strips);
        const int64_t from = strips.from * STRIP, to = min_int64(strips.to * STRIP, m->head.outputs);
        for (int64_t i = 0; m->logit_cap > 0 && i < b->kept; i++)
            cap_logits(b->logits + i * m->head.outputs + from, to - from, m->logit_cap);
    }
}

void forward(const Model *model, const Batch *batch) {
    Job job = {.model = model, .batch = batch, .scratch = scratch_at(batch->scratch, model, batch)};
    for (int kind = 0; kind < KINDS; kind++) {
        const int apart = units_floats(model, batch, kind) > 0;
        job.units[kind] = units_in(apart ? job.scratch.units[kind] : NULL, batch->tiles + kind, model->kv_heads);
    }
    memset(job.scratch.steps, 0, steps_of(model, batch) * sizeof(Step));
    run_parallel(run_layers, &job, (int)batch->threads);
}
