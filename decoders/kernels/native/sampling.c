// Gumbel-max sampling from rows of logits, after filters, and normalisers of log-probabilities. For any CPU.
//
// The noise is the same as in sampling.py. For the whole vocabulary the noise is only bounded, in integers and without
// logarithms; it is computed for the few tokens that can still be first. Filters are one threshold, selected without a
// sort. They keep exactly the same tokens as sampling.py, so products are not contracted with sums (-ffp-contract=off).
// The compiler vectorizes loops over LANES numbers.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

#define BLOCK 256
#define LANES 16
#define GROUP 32
#define BINS 2048

static inline int32_t bits_of(float number) {
    int32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float number_of(int32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// 24 uniform bits from a key and a hashed token.
static inline uint32_t uniform_bits(uint32_t hash, uint32_t low, uint32_t high) {
    uint32_t word = hash ^ low;
    word ^= word >> 16;
    word *= 0x85EBCA6Bu;
    word ^= word >> 13;
    word *= 0xC2B2AE35u;
    word ^= word >> 16;
    word ^= high;
    word *= 0x9E3779B9u;
    return (word ^ (word >> 15)) & 0xFFFFFFu;
}

static float max_of(const float *numbers, int64_t count) {
    float max[LANES];
    for (int lane = 0; lane < LANES; lane++) max[lane] = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            max[lane] = numbers[at + lane] > max[lane] ? numbers[at + lane] : max[lane];
    for (; at < count; at++) max[0] = numbers[at] > max[0] ? numbers[at] : max[0];
    for (int lane = 1; lane < LANES; lane++) max[0] = max[lane] > max[0] ? max[lane] : max[0];
    return max[0];
}

// e^x for x <= 0, as 2^(x / ln 2). A series for the fraction, error 1e-7; NaN stays NaN.
static inline float exponential(float x) {
    float scaled = x * 1.44269504f;
    scaled = scaled < -126.0f ? -126.0f : scaled;
    const float shifted = scaled + 12582912.0f;  // 1.5 * 2^23 rounds to integers, in the last bits
    const float rest = scaled - (shifted - 12582912.0f);
    float sum = 1.5252734e-5f;
    sum = sum * rest + 1.5403530e-4f;
    sum = sum * rest + 1.3333558e-3f;
    sum = sum * rest + 9.6181291e-3f;
    sum = sum * rest + 5.5504109e-2f;
    sum = sum * rest + 2.4022651e-1f;
    sum = sum * rest + 6.9314718e-1f;
    sum = sum * rest + 1.0f;
    return sum * number_of((int32_t)((uint32_t)(bits_of(shifted) - 0x4B400000 + 127) << 23));
}

// e^(score - top), rounded to multiples of 2^-35, so that sums of doubles are exact in any order; 0 below `min`.
static inline float weight(float score, float top, float min) {
    const float power = (exponential(score - top) + 0x1p-12f) - 0x1p-12f;
    return score < min ? 0.0f : power;
}

// The sampling options of a row. min_p is a logarithm. No filter: top_k 0, top_p 1, min_p -infinity. Bit t of mask, from
// the lowest of its first word, allows token t; NULL allows all.
typedef struct {
    float temperature;
    float min_p;
    double top_p;
    int64_t top_k;
    int64_t key;
    const uint32_t *mask;
} Sampling;

// The tokens that filters keep: score / temperature above `score`, or equal to it and the token id at most `last`.
typedef struct {
    float score;
    int64_t last;
} Threshold;

// The scratch memory of a thread, for one row.
typedef struct {
    float *scaled;     // (vocabulary,): score / temperature
    float *weights;    // (vocabulary,)
    int32_t *tokens;   // (vocabulary,)
    float *group_max;  // (vocabulary,): the maximum of each GROUP of `scaled`, then of each GROUP of these
    float *allowed;    // (vocabulary,): scores, -infinity where the mask forbids the token
} Scratch;

// Integers in the order of the floats; -0 equals 0.
static inline uint32_t sort_key(float number) {
    const uint32_t bits = (uint32_t)bits_of(number + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float from_sort_key(uint32_t order) {
    return number_of((int32_t)(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order));
}

// The threshold of the first tokens (by score, then by token id) whose weights sum to `mass`, out of the tokens with a
// score of at least `min`; `max` is the highest score. A radix selection: each pass narrows the range to one bin.
static Threshold filter_by_mass(Scratch scratch, int64_t vocabulary, double mass, float min, float max) {
    int32_t *tokens = scratch.tokens;
    int64_t count = 0;
    for (int64_t first = 0; first < vocabulary; first += GROUP) {
        if (!(scratch.group_max[first / GROUP] >= min)) continue;
        const int64_t last = vocabulary - first < GROUP ? vocabulary : first + GROUP;
        for (int64_t token = first; token < last; token++) {
            tokens[count] = (int32_t)token;
            count += scratch.scaled[token] >= min;
        }
    }
    double total = 0;
    uint32_t low = sort_key(min), range = sort_key(max) - low;
    while (range > 0 && count > 0) {
        int shift = 0;
        while (range >> shift >= BINS) shift++;
        double sums[BINS] = {0};
        for (int64_t i = 0; i < count; i++)
            sums[(sort_key(scratch.scaled[tokens[i]]) - low) >> shift] += scratch.weights[tokens[i]];
        uint32_t bin = range >> shift;
        for (; bin > 0 && total + sums[bin] < mass; bin--) total += sums[bin];
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            tokens[left] = tokens[i];
            left += (sort_key(scratch.scaled[tokens[i]]) - low) >> shift == bin;
        }
        count = left;
        low += bin << shift;
        range = ((uint32_t)1 << shift) - 1;
    }
    Threshold threshold = {from_sort_key(low), -1};
    for (int64_t i = 0; i < count && total < mass; i++) {
        total += scratch.weights[tokens[i]];
        threshold.last = tokens[i];
    }
    return threshold;
}

static Scratch scratch_of(float *scratch, int64_t vocabulary, int thread) {
    float *own = scratch + 5 * vocabulary * thread;
    return (Scratch){own, own + vocabulary, (int32_t *)(own + 2 * vocabulary), own + 3 * vocabulary,
                     own + 4 * vocabulary};
}

static const float *masked(const float *scores, int64_t vocabulary, const uint32_t *mask, float *allowed) {
    for (int64_t token = 0; token < vocabulary; token++)
        allowed[token] = mask[token >> 5] >> (token & 31) & 1 ? scores[token] : -INFINITY;
    return allowed;
}

static Threshold filter_tokens(const float *scores, int64_t vocabulary, Sampling sampling, Scratch scratch) {
    Threshold threshold = {-INFINITY, INT64_MAX};
    const int has_top_k = sampling.top_k > 0 && sampling.top_k < vocabulary;
    if (sampling.temperature == 0 || !(has_top_k || sampling.top_p < 1 || sampling.min_p > -INFINITY)) return threshold;
    for (int64_t token = 0; token < vocabulary; token++) scratch.scaled[token] = scores[token] / sampling.temperature;
    const int64_t groups = (vocabulary + GROUP - 1) / GROUP;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t left = vocabulary - group * GROUP;
        scratch.group_max[group] = max_of(scratch.scaled + group * GROUP, left < GROUP ? left : GROUP);
    }
    const float top = max_of(scratch.group_max, groups);
    if (has_top_k) {  // keeps ties of the last token
        for (int64_t token = 0; token < vocabulary; token++) scratch.weights[token] = 1.0f;
        if (sampling.top_k <= groups) {  // the k-th largest maximum of a group is a lower bound
            const Scratch above = {scratch.group_max, scratch.weights, scratch.tokens, scratch.group_max + groups, NULL};
            for (int64_t group = 0; group < groups; group += GROUP) above.group_max[group / GROUP] = top;
            threshold.score = filter_by_mass(above, groups, (double)sampling.top_k, -INFINITY, top).score;
        }
        threshold.score = filter_by_mass(scratch, vocabulary, (double)sampling.top_k, threshold.score, top).score;
    }
    if (sampling.top_p < 1) {
        for (int64_t token = 0; token < vocabulary; token++)
            scratch.weights[token] = weight(scratch.scaled[token], top, threshold.score);
        double sums[LANES] = {0};
        int64_t at = 0;
        for (; at + LANES <= vocabulary; at += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += scratch.weights[at + lane];
        for (; at < vocabulary; at++) sums[0] += scratch.weights[at];
        for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
        // The last kept token and all after it weigh more than (1 - top_p) of the sum, so the last kept token weighs
        // more than 1 / (2 * vocabulary) of that.
        const float min = top + (float)log((1 - sampling.top_p) * sums[0] / (2 * (double)vocabulary));
        threshold = filter_by_mass(scratch, vocabulary, sampling.top_p * sums[0],
                                   min > threshold.score ? min : threshold.score, top);
    }
    if (threshold.score < top + sampling.min_p) threshold = (Threshold){top + sampling.min_p, INT64_MAX};
    return threshold;
}

// Write the first `count` tokens by score / temperature + noise, best first, then by token id, to `tokens`; -1 if fewer
// have a score above -infinity. At temperature 0 by score only. Skips NaN.
static void top_tokens(const float *scores, int64_t vocabulary, const uint32_t *hashes, Sampling sampling,
                       Scratch scratch, int64_t count, int64_t *tokens) {
    const uint32_t low = (uint32_t)sampling.key, high = (uint32_t)((uint64_t)sampling.key >> 32);
    const float temperature = sampling.temperature, divisor = temperature > 0 ? temperature : 1.0f;
    const Threshold threshold = filter_tokens(scores, vocabulary, sampling, scratch);
    double perturbed[count];
    float cutoff = -INFINITY;  // tokens at or below it are not among the first
    int64_t found = 0;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int size = vocabulary - first < BLOCK ? (int)(vocabulary - first) : BLOCK;
        float scaled[BLOCK], bound[BLOCK];
        int32_t any = 0;
        for (int i = 0; i < size; i++) {
            scaled[i] = scores[first + i] / divisor;
            // Noise is at most -log((bits + 1/2) / 2^24), which the exponent of (bits + 1/2) bounds.
            const float half = (float)(int32_t)uniform_bits(hashes[first + i], low, high) + 0.5f;
            const float noise = (float)(24 + 127 - (bits_of(half) >> 23)) * 0.6931473f;
            bound[i] = scaled[i] + (temperature > 0 ? noise : 0.0f);
            bound[i] = scaled[i] < threshold.score ? -INFINITY : bound[i];
            any |= bound[i] > cutoff;
        }
        if (!any) continue;
        for (int i = 0; i < size; i++) {
            if (!(bound[i] > cutoff) || (scaled[i] == threshold.score && first + i > threshold.last)) continue;
            double value = scaled[i];
            if (temperature > 0) {
                const double half = uniform_bits(hashes[first + i], low, high) + 0.5;
                value -= log(-log1p(-half / (1 << 24)));
            }
            if (found == count && !(value > perturbed[count - 1])) continue;
            int64_t place = found < count ? found++ : count - 1;
            for (; place > 0 && perturbed[place - 1] < value; place--) {
                perturbed[place] = perturbed[place - 1];
                tokens[place] = tokens[place - 1];
            }
            perturbed[place] = value;
            tokens[place] = first + i;
            if (found == count) {
                cutoff = (float)perturbed[count - 1];
                if (temperature > 0) cutoff -= 1e-6f * fabsf(cutoff) + 1e-3f;  // float32 rounds; err downwards
            }
        }
    }
    for (; found < count; found++) tokens[found] = -1;
}

static float normaliser(const float *scores, int64_t vocabulary) {
    const float top = max_of(scores, vocabulary);
    double total = 0;
    int64_t at;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int64_t last = vocabulary - first < BLOCK ? vocabulary : first + BLOCK;
        float sums[LANES] = {0};
        for (at = first; at + LANES <= last; at += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += exponential(scores[at + lane] - top);
        for (; at < last; at++) sums[0] += exponential(scores[at] - top);
        for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    }
    return (float)(top + log(total));
}

// Rows of logits to read. Shapes: logits (rows, vocabulary); hashes (vocabulary,), of token ids; draws (rows,); tokens
// (rows, count); logprobs (rows,) or NULL; scratch (threads, 5, vocabulary).
typedef struct {
    const float *logits;
    int64_t rows, vocabulary;
    const uint32_t *hashes;
    const Sampling *draws;
    int64_t count, *tokens;
    float *logprobs, *scratch;
    int64_t threads;
    Step step;
} Job;

static void read_row(const Job *job, int64_t row, int thread) {
    const float *scores = job->logits + row * job->vocabulary;
    int64_t *tokens = job->tokens + row * job->count;
    if (!job->logprobs || tokens[0] < 0) {
        const Scratch scratch = scratch_of(job->scratch, job->vocabulary, thread);
        const uint32_t *mask = job->draws[row].mask;
        top_tokens(mask ? masked(scores, job->vocabulary, mask, scratch.allowed) : scores, job->vocabulary, job->hashes,
                   job->draws[row], scratch, job->count, tokens);
    }
    if (!job->logprobs) return;
    if (tokens[0] < 0) tokens[0] = 0;
    job->logprobs[row] = scores[tokens[0]] - normaliser(scores, job->vocabulary);
}

static void read_some(void *argument, int thread) {
    Job *job = argument;
    Worker worker = worker_of(&job->step, thread, (int)job->threads);
    for (Span row = {0}; next_span(&worker, job->rows, 1, &row);) read_row(job, row.from, thread);
}

// Without `logprobs`, sample `count` tokens a row. Otherwise `count` is 1: write the log-probabilities of tokens (rows,)
// to logprobs (rows,). A token of -1 is sampled first; it becomes 0 if no token can be sampled. The log-probability is
// NaN if a logit of the row is NaN or +infinity, or all are -infinity.
void read_rows(const float *logits, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const Sampling *draws,
               int64_t count, int64_t *tokens, float *logprobs, float *scratch, int64_t threads) {
    Job job = {logits, rows, vocabulary, hashes, draws, count, tokens, logprobs, scratch, threads, {.finished = {0}}};
    tot_run_parallel(read_some, &job, rows > 1 ? (int)threads : 1);
}
