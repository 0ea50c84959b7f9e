// Rows of logits, for any CPU: the tokens that Gumbel noise draws of those that filters leave, and the normalisers of
// log-probabilities.
//
// The same noise as in sampling.py. Of a whole vocabulary noise is only bounded, with whole numbers and no logarithms; it
// is computed for the few tokens that may still come first. Filters are one threshold, selected without a sort. What they
// keep is the same there to the bit, so products are not contracted with sums (-ffp-contract=off). Loops over LANES
// numbers become vectors.

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

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

// 24 uniform bits for a key and a hashed token.
static inline uint32_t gap_of(uint32_t hash, uint32_t low, uint32_t high) {
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

static float largest(const float *numbers, int64_t count) {
    float most[LANES];
    for (int lane = 0; lane < LANES; lane++) most[lane] = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = numbers[at + lane] > most[lane] ? numbers[at + lane] : most[lane];
    for (; at < count; at++) most[0] = numbers[at] > most[0] ? numbers[at] : most[0];
    for (int lane = 1; lane < LANES; lane++) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    return most[0];
}

// e^x for x <= 0 as 2^(x / ln 2), the fraction by its series, to 1e-7. NaN stays NaN.
static inline float exponential(float x) {
    float scaled = x * 1.44269504f;
    scaled = scaled < -126.0f ? -126.0f : scaled;
    const float shifted = scaled + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers, which are its last bits
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

// e^(score - top) in steps of 2^-35, so that sums of doubles are exact in any order; 0 below `least`.
static inline float weight(float score, float top, float least) {
    const float power = (exponential(score - top) + 0x1p-12f) - 0x1p-12f;
    return score < least ? 0.0f : power;
}

// How a row is drawn from. Without a filter: top_k 0, top_p 1, min_p (its logarithm) -infinity.
typedef struct {
    float temperature;
    float min_p;
    double top_p;
    int64_t top_k;
    int64_t key;
} Draw;

// What filters leave: the tokens whose score / temperature is above `least`, and of those at it the ones up to `last`.
typedef struct {
    float least;
    int64_t last;
} Kept;

// A thread's scratch, for the scores / temperature of a row and what is made of them.
typedef struct {
    float *scaled;    // (vocabulary,)
    float *weights;   // (vocabulary,)
    int32_t *tokens;  // (vocabulary,)
    float *most;      // (vocabulary,): the largest of each GROUP of `scaled`, and of each GROUP of those
} Space;

// Whole numbers in the order of the floats; -0 is 0.
static inline uint32_t order_of(float number) {
    const uint32_t bits = (uint32_t)bits_of(number + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float ordered(uint32_t order) {
    return number_of((int32_t)(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order));
}

// The tokens that come first, equal ones by token, until their weights are `enough`; none of them is below `least`, none
// of all above `most`. The last one is found among fewer and fewer, in a range of which a bin is left each time.
static Kept first_until(Space space, int64_t vocabulary, double enough, float least, float most) {
    int32_t *tokens = space.tokens;
    int64_t count = 0;
    for (int64_t first = 0; first < vocabulary; first += GROUP) {
        if (!(space.most[first / GROUP] >= least)) continue;
        const int64_t last = vocabulary - first < GROUP ? vocabulary : first + GROUP;
        for (int64_t token = first; token < last; token++) {
            tokens[count] = (int32_t)token;
            count += space.scaled[token] >= least;
        }
    }
    double have = 0;
    uint32_t low = order_of(least), range = order_of(most) - low;
    while (range > 0 && count > 0) {
        int shift = 0;
        while (range >> shift >= BINS) shift++;
        double sums[BINS] = {0};
        for (int64_t i = 0; i < count; i++)
            sums[(order_of(space.scaled[tokens[i]]) - low) >> shift] += space.weights[tokens[i]];
        uint32_t at = range >> shift;
        for (; at > 0 && have + sums[at] < enough; at--) have += sums[at];
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            tokens[left] = tokens[i];
            left += (order_of(space.scaled[tokens[i]]) - low) >> shift == at;
        }
        count = left;
        low += at << shift;
        range = ((uint32_t)1 << shift) - 1;
    }
    Kept kept = {ordered(low), -1};
    for (int64_t i = 0; i < count && have < enough; i++) {
        have += space.weights[tokens[i]];
        kept.last = tokens[i];
    }
    return kept;
}

static Space space_of(float *scratch, int64_t vocabulary) {
    float *own = scratch + 4 * vocabulary * omp_get_thread_num();
    return (Space){own, own + vocabulary, (int32_t *)(own + 2 * vocabulary), own + 3 * vocabulary};
}

static Kept kept_of(const float *scores, int64_t vocabulary, Draw how, Space space) {
    Kept kept = {-INFINITY, INT64_MAX};
    const int some = how.top_k > 0 && how.top_k < vocabulary;
    if (how.temperature == 0 || !(some || how.top_p < 1 || how.min_p > -INFINITY)) return kept;
    for (int64_t token = 0; token < vocabulary; token++) space.scaled[token] = scores[token] / how.temperature;
    const int64_t groups = (vocabulary + GROUP - 1) / GROUP;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t left = vocabulary - group * GROUP;
        space.most[group] = largest(space.scaled + group * GROUP, left < GROUP ? left : GROUP);
    }
    const float top = largest(space.most, groups);
    if (some) {  // and those that are equal to the last one
        for (int64_t token = 0; token < vocabulary; token++) space.weights[token] = 1.0f;
        if (how.top_k <= groups) {  // so many tokens are at least as large as that many groups' largest ones
            const Space above = {space.most, space.weights, space.tokens, space.most + groups};
            for (int64_t group = 0; group < groups; group += GROUP) above.most[group / GROUP] = top;
            kept.least = first_until(above, groups, (double)how.top_k, -INFINITY, top).least;
        }
        kept.least = first_until(space, vocabulary, (double)how.top_k, kept.least, top).least;
    }
    if (how.top_p < 1) {
        for (int64_t token = 0; token < vocabulary; token++)
            space.weights[token] = weight(space.scaled[token], top, kept.least);
        double sums[LANES] = {0};
        int64_t at = 0;
        for (; at + LANES <= vocabulary; at += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += space.weights[at + lane];
        for (; at < vocabulary; at++) sums[0] += space.weights[at];
        for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
        // The last one kept and those after it weigh more than 1 - top_p of all, so it weighs more than half of a
        // vocabulary's share of that.
        const float least = top + (float)log((1 - how.top_p) * sums[0] / (2 * (double)vocabulary));
        kept = first_until(space, vocabulary, how.top_p * sums[0], least > kept.least ? least : kept.least, top);
    }
    if (kept.least < top + how.min_p) kept = (Kept){top + how.min_p, INT64_MAX};
    return kept;
}

// The `count` tokens that come first by score / temperature + noise, best first and equal ones by token, to tokens; -1
// where fewer have a score above -infinity. At temperature 0 by score alone. A NaN is never among them.
static void first_of(const float *scores, int64_t vocabulary, const uint32_t *hashes, Draw how, Space space,
                     int64_t count, int64_t *tokens) {
    const uint32_t low = (uint32_t)how.key, high = (uint32_t)((uint64_t)how.key >> 32);
    const float temperature = how.temperature, divisor = temperature > 0 ? temperature : 1.0f;
    const Kept kept = kept_of(scores, vocabulary, how, space);
    double worth[count];
    float least = -INFINITY;  // who stays at or below it is not among the first
    int64_t have = 0;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int many = vocabulary - first < BLOCK ? (int)(vocabulary - first) : BLOCK;
        float scaled[BLOCK], most[BLOCK];
        int32_t any = 0;
        for (int i = 0; i < many; i++) {
            scaled[i] = scores[first + i] / divisor;
            // Noise is at most -log((gap + 1/2) / 2^24), and that at most by the power of two below: its exponent.
            const float half = (float)(int32_t)gap_of(hashes[first + i], low, high) + 0.5f;
            const float noise = (float)(24 + 127 - (bits_of(half) >> 23)) * 0.6931473f;
            most[i] = scaled[i] + (temperature > 0 ? noise : 0.0f);
            most[i] = scaled[i] < kept.least ? -INFINITY : most[i];
            any |= most[i] > least;
        }
        if (!any) continue;
        for (int i = 0; i < many; i++) {
            if (!(most[i] > least) || (scaled[i] == kept.least && first + i > kept.last)) continue;
            double value = scaled[i];
            if (temperature > 0) {
                const double half = gap_of(hashes[first + i], low, high) + 0.5;
                value -= log(-log1p(-half / (1 << 24)));
            }
            if (have == count && !(value > worth[count - 1])) continue;
            int64_t place = have < count ? have++ : count - 1;
            for (; place > 0 && worth[place - 1] < value; place--) {
                worth[place] = worth[place - 1];
                tokens[place] = tokens[place - 1];
            }
            worth[place] = value;
            tokens[place] = first + i;
            if (have == count) {
                least = (float)worth[count - 1];
                if (temperature > 0) least -= 1e-6f * fabsf(least) + 1e-3f;  // float32 rounds; err downwards
            }
        }
    }
    for (; have < count; have++) tokens[have] = -1;
}

int64_t size_of_draw(void) { return sizeof(Draw); }

// logits (rows, vocabulary); hashes (vocabulary,), of token ids; draws (rows,); tokens (rows, count); scratch (threads, 4,
// vocabulary).
void draw(const float *logits, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const Draw *draws,
          int64_t count, int64_t *tokens, float *scratch, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++)
        first_of(logits + row * vocabulary, vocabulary, hashes, draws[row], space_of(scratch, vocabulary), count,
                 tokens + row * count);
}

static float normaliser(const float *scores, int64_t vocabulary) {
    const float top = largest(scores, vocabulary);
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

// logits, hashes, draws and scratch as above; tokens (rows,): the one given, or -1, where one is drawn. Its log-probability
// goes to logprobs: NaN where a number of the row is NaN or +infinity, or all are -infinity; the token is 0 where none can
// be drawn.
void read_rows(const float *logits, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const Draw *draws,
               int64_t *tokens, float *logprobs, float *scratch, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *scores = logits + row * vocabulary;
        if (tokens[row] < 0)
            first_of(scores, vocabulary, hashes, draws[row], space_of(scratch, vocabulary), 1, tokens + row);
        if (tokens[row] < 0) tokens[row] = 0;
        logprobs[row] = scores[tokens[row]] - normaliser(scores, vocabulary);
    }
}
