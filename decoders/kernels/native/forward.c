// The forward pass of a transformer. All threads run all layers together, in steps. A step costs no call, no allocation
// and no waking of threads. Each result is computed whole by one thread, so it does not depend on their number.

#include "experts.h"
#include "model.h"
#include "rows.h"
#include "threads.h"

static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

// Floats of the scratch memory of the attention over tiles of one kind.
static int64_t units_floats(const Model *m, const Tiles *tiles) {
    return units_size(tiles, m->kv_heads, m->heads / m->kv_heads) / (int64_t)sizeof(float);
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

// Where the rows' states and the inputs of products are in scratch memory, in this order. Rows have `max_width` numbers.
// Entries are rows, or in a mixture the rows of each expert.
typedef struct {
    Step *steps;
    float *units[KINDS];         // of the attention
    float *state, *qkv, *gated;  // (rows, hidden), (rows, qkv_width), (entries, intermediate)
    float *added;                // (entries, hidden): results that are added to the state in a later step
    Element *query, *attended;   // (rows, query_width)
    float *normed, *stats, *gated_stats;
    Input *input, *gated_input;
    float *scores;               // (rows, experts), of the router
    Input *entry_input;          // (entries, hidden), with entry_stats
    float *entry_stats;
    float *own;                  // (threads, own_floats)
    int64_t own_floats;          // of one thread: normed, input and stats of FEW_ROWS rows, groups, workspace
    int64_t groups, workspace;   // where these begin
    int64_t floats;              // of all
} Scratch;

#define FEW_ROWS 8        // up to this number each thread prepares all rows for itself, which is cheaper than to wait
#define MOST_BYTES 1048576 // weights that a thread takes at once, if there are few rows

// Steps of a forward pass, at most.
static int64_t steps_of(const Model *m) { return 12 * m->layer_count + 5; }

static Scratch scratch_at(float *memory, const Model *m, const Batch *b) {
    const int64_t query_width = m->heads * HEAD_DIM, max_width = max_width_of(m), rows = b->rows;
    const int64_t stats = STATS * (max_width / GROUP + 1), prepared = 2 * max_width + stats;
    const int64_t choices = rows * m->chosen, entries = max_int64(rows, choices);
    const int adds_later = m->experts || m->layers->norm_attended;
    Scratch s = {.groups = FEW_ROWS * prepared};
    s.workspace = (s.groups + groups_floats(rows, m->experts, m->chosen) + 15) / 16 * 16;
    s.own_floats = s.workspace + (are_tiled(rows) ? workspace_bytes(rows) / 4 : 0);
#define PLACE(type, field, count)                                                                                      \
    s.field = (type)(memory + s.floats);                                                                               \
    s.floats += ((count) + 15) / 16 * 16;
    PLACE(Step *, steps, steps_of(m) * (int64_t)(sizeof(Step) / sizeof(float)))
    for (int kind = 0; kind < KINDS; kind++) {
        PLACE(float *, units[kind], units_floats(m, b->tiles + kind))
    }
    PLACE(float *, state, rows * m->hidden)
    PLACE(float *, qkv, rows * (query_width + 2 * m->kv_heads * HEAD_DIM))
    PLACE(float *, gated, entries * m->intermediate)
    PLACE(float *, added, adds_later ? entries * m->hidden : 0)
    PLACE(Element *, query, rows * query_width)
    PLACE(Element *, attended, rows * query_width)
    PLACE(float *, normed, rows * max_width)
    PLACE(float *, stats, rows * stats)
    PLACE(float *, gated_stats, entries * STATS * (m->intermediate / GROUP + 1))
    PLACE(Input *, input, rows * max_width)
    PLACE(Input *, gated_input, entries * m->intermediate)
    PLACE(float *, scores, rows * m->experts)
    PLACE(Input *, entry_input, choices * m->hidden)
    PLACE(float *, entry_stats, choices * STATS * (m->hidden / GROUP + 1))
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
    Units units[KINDS];
    int tiled;  // whether the products of the layers use tiles
} Job;

// The thread's memory for products with tiles, if they are used.
static void *workspace_of(const Job *job, const Worker *worker, int tiled) {
    return tiled ? job->scratch.own + worker->thread * job->scratch.own_floats + job->scratch.workspace : NULL;
}

// RMS-norm a row of floats, or without `norm` load a row of elements, and convert it to inputs of a product.
static void prepare_row(const Model *m, int tiled, const void *row, const float *norm, int64_t width, float *normed,
                        Input *input, float *stats) {
    if (norm)
        rms_norm(row, norm, width, m->epsilon, normed);
    else
        for (int64_t i = 0; i < width; i += LANES) store(normed + i, load_elements((const Element *)row + i));
    convert_inputs(tiled, normed, width, INPUT(normed, input), stats);
}

// Prepare all rows, `width` wide, for the `units` of the next step. Up to `few` rows are prepared by each thread for
// itself, more in a step.
static Inputs prepare(const Job *job, Worker *worker, const void *rows, int64_t row_bytes, const float *norm,
                      int64_t width, int64_t units, int64_t few) {
    const Scratch *s = &job->scratch;
    const int64_t count = job->batch->rows, groups = STATS * (width / GROUP);
    float *normed = s->normed, *stats = s->stats;
    Input *input = s->input;
#define PREPARE(r)                                                                                                     \
    prepare_row(job->model, job->tiled, (const char *)rows + (r) * row_bytes, norm, width, normed + (r) * width,       \
                input_at(input, (r) * width, job->tiled), stats + (r) * groups)
    if (count <= few) {
        const int64_t max_width = max_width_of(job->model);
        normed = s->own + worker->thread * s->own_floats;
        input = (Input *)(normed + FEW_ROWS * max_width);
        stats = normed + 2 * FEW_ROWS * max_width;
        for (int64_t r = 0; r < count && !is_taken(worker, units); r++) PREPARE(r);
    } else
        for (Span row = {0}; next_span(worker, count, 1, &row);) PREPARE(row.from);
    return (Inputs){INPUT(normed, input), stats};
}

static int64_t units_of(const Matrix *matrix, int64_t unit) {
    return (strips_of(matrix) + unit - 1) / unit;
}

// Units of strips that a thread takes at once: more if they are small.
static int64_t most_units(const Matrix *matrix, int64_t unit, int64_t rows, int tiled) {
    if (tiled) return max_int64(1, PANEL_STRIPS / unit);
    const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return max_int64(1, MOST_BYTES / (unit * strip_bytes(matrix) * max_int64(blocks, 1)));
}

// For each span of a product's strips, in units of `unit` strips.
#define EACH_STRIPS(span, matrix, unit, tiled)                                                                         \
    for (Span span = {0};                                                                                              \
         next_span(&worker, units_of(matrix, unit), most_units(matrix, unit, rows, tiled), &span);)

// The heads [from, to) of the product of queries, keys and values: rotate queries and keys, and keep keys and values.
static void place_heads(const Job *job, const Layer *layer, int64_t from, int64_t to) {
    const Model *m = job->model;
    const Batch *b = job->batch;
    const int64_t qkv_heads = m->heads + 2 * m->kv_heads;
    const int64_t rotary_dim = layer->rope < 0 ? 0 : m->rotary_dim, kind = max_int64(layer->rope, 0);
    int saturated = 0;
    for (int64_t r = 0; r < b->rows; r++) {
        const float *cosines = b->cosines[kind] + b->rope_rows[r] * m->rotary_dim;
        const float *sines = b->sines[kind] + b->rope_rows[r] * m->rotary_dim;
        for (int64_t h = from; h < to; h++) {
            float *head = job->scratch.qkv + (r * qkv_heads + h) * HEAD_DIM;
            const int64_t kv_head = h < m->heads + m->kv_heads ? h - m->heads : h - m->heads - m->kv_heads;
            const int64_t offset = kv_head * m->kv_head_stride + b->write[r] * m->slot_stride;
            Element elements[HEAD_DIM];
            if (h < m->heads) {
                apply_rope(head, layer->norm_query, m->epsilon, cosines, sines, rotary_dim,
                           job->scratch.query + (r * m->heads + h) * HEAD_DIM);
            } else if (h < m->heads + m->kv_heads) {
                apply_rope(head, layer->norm_key, m->epsilon, cosines, sines, rotary_dim, elements);
                saturated += store_head(layer->keys + offset, elements);
            } else {
                for (int i = 0; i < HEAD_DIM; i += LANES) store_elements(elements + i, load(head + i));
                saturated += store_head(layer->values + offset, elements);
            }
        }
    }
    if (saturated) atomic_fetch_add(b->saturated, saturated);
}

// Strips that hold whole heads, and strips of gates and ups that hold whole groups of inputs.
#define HEAD_STRIPS (STRIP % HEAD_DIM == 0 ? 1 : HEAD_DIM % STRIP == 0 ? HEAD_DIM / STRIP : HEAD_DIM / 16)
#define GATE_STRIPS (GROUP > LANES ? GROUP / LANES : 1)

// Add the stored results of one half of a layer, if any, to a row of the state, and write the sum to `out`.
static void add_stored(const Job *job, const float *norm, const Groups *groups, int64_t r, float *out) {
    const Model *m = job->model;
    const int64_t hidden = m->hidden;
    const float *state = job->scratch.state + r * hidden, *added = job->scratch.added;
    if (out != state) memcpy(out, state, hidden * sizeof(float));
    if (groups)
        for (int64_t k = r * m->chosen; k < (r + 1) * m->chosen; k++)
            add_scaled(out, added + groups->entries[k] * hidden, groups->weights[k], hidden);
    else if (norm)
        add_rms_norm(added + r * hidden, norm, hidden, m->epsilon, out);
}

// A step that adds the stored results to the state of all rows, if there are any.
static void add_all_stored(const Job *job, Worker *worker, const float *norm, const Groups *groups) {
    if (norm || groups)
        for (Span row = {0}; next_span(worker, job->batch->rows, 1, &row);)
            add_stored(job, norm, groups, row.from, job->scratch.state + row.from * job->model->hidden);
}

// Convert the outputs of the gate and up strips [first, last) of some entries to inputs of the next product.
static void convert_gated(const Job *job, int64_t from, int64_t to, int64_t first, int64_t last) {
    const Scratch *s = &job->scratch;
    const int64_t inner = job->model->intermediate;
    if (INPUT(s->gated, s->gated_input) != (void *)s->gated)
        for (int64_t e = from; e < to; e++)
            convert_inputs(job->tiled, s->gated + e * inner + first * LANES, (last - first) * LANES,
                           input_at(s->gated_input, e * inner + first * LANES, job->tiled),
                           s->gated_stats + STATS * (e * (inner / GROUP) + first * LANES / GROUP));
}

// Multiply the entries of each expert by its weights. The units of all experts that have entries follow each other.
static void multiply_entries(const Job *job, Worker *worker, const Matrix *all, const Groups *groups, int64_t unit,
                             const Input *input, const float *stats, Epilogue epilogue, float *out, int64_t width) {
    const int64_t experts = job->model->experts, row_stats = STATS * (all->inputs / GROUP);
    const Matrix one = expert_matrix(all, experts, 0);
    const int64_t strips = strips_of(&one), units = units_of(&one, unit);
    // A late thread may have groups of a later layer, so the number of units must not depend on them.
    const int64_t most_used = min_int64(experts, job->batch->rows * job->model->chosen);
    for (Span span = {0}; next_span(worker, units * most_used, most_units(&one, unit, 1, job->tiled), &span);)
        for (int64_t begin = span.from / units * units; begin < span.to && begin / units < groups->used;
             begin += units) {
            const int64_t expert = groups->experts[begin / units];
            const int64_t from = groups->starts[expert], to = groups->starts[expert + 1];
            const int64_t first = max_int64(span.from - begin, 0) * unit;
            const int64_t last = min_int64((span.to - begin) * unit, strips);
            const Matrix matrix = expert_matrix(all, experts, expert);
            multiply(&matrix, input_at(input, from * all->inputs, job->tiled), stats + from * row_stats, to - from,
                     epilogue, out + from * width, width, first, last, workspace_of(job, worker, job->tiled));
            if (epilogue != STORE) convert_gated(job, from, to, first, last);
        }
}

// The mixture of experts of a layer, for all rows. Results are stored in `added`, by entry.
static void run_experts(const Job *job, Worker *worker, const Layer *layer, Groups *groups) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    const int64_t rows = job->batch->rows, hidden = m->hidden, inner = m->intermediate;
    const int64_t row_stats = STATS * (hidden / GROUP);
    const Inputs input = prepare(job, worker, s->state, hidden * sizeof(float), layer->norm_mlp, hidden, 0, 0);
    for (Span expert = {0}; next_span(worker, m->experts, MOST_BYTES / (4 * hidden) + 1, &expert);)
        for (int64_t r = 0; r < rows; r++)
            score_experts(&layer->router, s->normed + r * hidden, hidden, expert.from, expert.to,
                          s->scores + r * m->experts);
    *groups = group_rows(s->own + worker->thread * s->own_floats + s->groups, s->scores, rows, m->experts, m->chosen,
                         (int)m->normalized);
    for (Span choice = {0}; next_span(worker, rows * m->chosen, 8, &choice);)
        for (int64_t k = choice.from; k < choice.to; k++) {
            const int64_t r = k / m->chosen, entry = groups->entries[k];
            const Input *from = input_at(input.numbers, r * hidden, job->tiled);
            const Input *end = input_at(input.numbers, (r + 1) * hidden, job->tiled);
            memcpy(input_at(s->entry_input, entry * hidden, job->tiled), from, (const char *)end - (const char *)from);
            memcpy(s->entry_stats + entry * row_stats, input.stats + r * row_stats, row_stats * sizeof(float));
        }
    multiply_entries(job, worker, &layer->gate_up, groups, GATE_STRIPS, s->entry_input, s->entry_stats, m->activation,
                     s->gated, inner);
    multiply_entries(job, worker, &layer->down, groups, 1, INPUT(s->gated, s->gated_input), s->gated_stats, STORE,
                     s->added, hidden);
}

static void run_layers(void *argument, int thread) {
    const Job *job = argument;
    const Model *m = job->model;
    const Batch *b = job->batch;
    const Scratch *s = &job->scratch;
    const int64_t rows = b->rows, hidden = m->hidden, width = m->heads * HEAD_DIM, inner = m->intermediate;
    const int64_t qkv_width = width + 2 * m->kv_heads * HEAD_DIM;
    Worker worker = worker_of(s->steps, thread, (int)b->threads);
    void *workspace = workspace_of(job, &worker, job->tiled);
    Groups own, *groups = NULL;   // of the layer before
    const float *norm_done = NULL;

    for (Span row = {0}; next_span(&worker, rows, 1, &row);)
        embed(m, b->tokens[row.from], s->state + row.from * hidden);
    for (int64_t l = 0; l < m->layer_count; l++) {
        const Layer *layer = m->layers + l;
        add_all_stored(job, &worker, norm_done, groups);
        Inputs input = prepare(job, &worker, s->state, hidden * sizeof(float), layer->norm_in, hidden,
                               units_of(&layer->qkv, HEAD_STRIPS), FEW_ROWS);
        EACH_STRIPS(span, &layer->qkv, HEAD_STRIPS, job->tiled) {
            const int64_t first = span.from * HEAD_STRIPS;
            const int64_t last = min_int64(span.to * HEAD_STRIPS, strips_of(&layer->qkv));
            multiply(&layer->qkv, input.numbers, input.stats, rows, STORE, s->qkv, qkv_width, first, last, workspace);
            place_heads(job, layer, first * STRIP / HEAD_DIM, min_int64(last * STRIP, qkv_width) / HEAD_DIM);
        }
        const Attention attention = {
            s->query, layer->keys, layer->values, s->attended, HEAD_DIM, width, m->kv_head_stride, m->slot_stride,
            rows, m->kv_heads, m->heads / m->kv_heads, layer->sinks, m->scale, m->attention_cap,
        };
        const Tiles *tiles = b->tiles + layer->window;
        const Units *units = job->units + layer->window;
        for (Span unit = {0}; next_span(&worker, unit_count(tiles, &attention, units), 1, &unit);)
            attend_unit(unit.from, &attention, tiles, units);
#if WEIGHTS == 8
        input = prepare(job, &worker, s->attended, width * sizeof(Element), NULL, width, strips_of(&layer->out),
                        FEW_ROWS);
#else
        input = (Inputs){s->attended, NULL};
#endif
        EACH_STRIPS(span, &layer->out, 1, job->tiled)
            multiply(&layer->out, input.numbers, input.stats, rows, layer->norm_attended ? STORE : ADD,
                     layer->norm_attended ? s->added : s->state, hidden, span.from, span.to, workspace);
        add_all_stored(job, &worker, layer->norm_attended, NULL);
        norm_done = layer->norm_done;
        if (m->experts) {
            run_experts(job, &worker, layer, groups = &own);
            continue;
        }
        input = prepare(job, &worker, s->state, hidden * sizeof(float), layer->norm_mlp, hidden,
                        units_of(&layer->gate_up, GATE_STRIPS), FEW_ROWS);
        EACH_STRIPS(span, &layer->gate_up, GATE_STRIPS, job->tiled) {
            const int64_t first = span.from * GATE_STRIPS;
            const int64_t last = min_int64(span.to * GATE_STRIPS, strips_of(&layer->gate_up));
            multiply(&layer->gate_up, input.numbers, input.stats, rows, m->activation, s->gated, inner, first, last,
                     workspace);
            convert_gated(job, 0, rows, first, last);
        }
        EACH_STRIPS(span, &layer->down, 1, job->tiled)
            multiply(&layer->down, INPUT(s->gated, s->gated_input), s->gated_stats, rows, norm_done ? STORE : ADD,
                     norm_done ? s->added : s->state, hidden, span.from, span.to, workspace);
    }
    const int tiled = are_tiled(b->kept);
    for (Span kept = {0}; next_span(&worker, b->kept, 1, &kept);) {
        const int64_t r = kept.from;
        float *normed = s->normed + r * hidden;
        add_stored(job, norm_done, groups, b->keep[r], normed);
        prepare_row(m, tiled, normed, m->norm, hidden, normed, input_at(s->input, r * hidden, tiled),
                    s->stats + r * STATS * (hidden / GROUP));
    }
    EACH_STRIPS(span, &m->head, 1, tiled)
        multiply(&m->head, INPUT(s->normed, s->input), s->stats, b->kept, STORE, b->logits, m->head.outputs, span.from,
                 span.to, workspace_of(job, &worker, tiled));
    if (m->logit_cap > 0)
        for (Span kept = {0}; next_span(&worker, b->kept, 1, &kept);)
            cap_logits(b->logits + kept.from * m->head.outputs, m->head.outputs, m->logit_cap);
}

void forward(const Model *model, const Batch *batch) {
    Job job = {.model = model, .batch = batch, .scratch = scratch_at(batch->scratch, model, batch)};
    // Of a mixture, the experts must have enough rows on average.
    job.tiled = are_tiled(model->experts ? batch->rows * model->chosen / model->experts : batch->rows);
    for (int kind = 0; kind < KINDS; kind++) {
        const Tiles *tiles = batch->tiles + kind;
        job.units[kind] = units_in(units_floats(model, tiles) ? job.scratch.units[kind] : NULL, tiles, model->kv_heads);
    }
    memset(job.scratch.steps, 0, steps_of(model) * sizeof(Step));
    tot_run_parallel(run_layers, &job, (int)batch->threads);
}
