// Rows of logits, for any CPU: the tokens that Gumbel noise draws, and the normalisers of log-probabilities.
//
// The same noise as in sampling.py. Of a whole vocabulary noise is only bounded, with whole numbers and no logarithms; it
// is computed for the few tokens that may still come first. Loops over LANES numbers become vectors.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define LANES 16

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

// The `count` tokens that come first by score / temperature + noise, best first and equal ones by token, to tokens; -1
// where fewer have a score above -infinity. At temperature 0 by score alone. A NaN is never among them.
static void first_of(const float *scores, int64_t vocabulary, const uint32_t *hashes, float temperature, int64_t key,
                     int64_t count, int64_t *tokens) {
    const uint32_t low = (uint32_t)key, high = (uint32_t)((uint64_t)key >> 32);
    const float divisor = temperature > 0 ? temperature : 1.0f;
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
            any |= most[i] > least;
        }
        if (!any) continue;
        for (int i = 0; i < many; i++) {
            if (!(most[i] > least)) continue;
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

// logits (rows, vocabulary); hashes (vocabulary,), of token ids; temperatures and keys (rows,); tokens (rows, count).
void draw(const float *logits, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const float *temperatures,
          const int64_t *keys, int64_t count, int64_t *tokens, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++)
        first_of(logits + row * vocabulary, vocabulary, hashes, temperatures[row], keys[row], count,
                 tokens + row * count);
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

static float normaliser(const float *scores, int64_t vocabulary) {
    float highest[LANES];
    for (int lane = 0; lane < LANES; lane++) highest[lane] = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= vocabulary; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            highest[lane] = scores[at + lane] > highest[lane] ? scores[at + lane] : highest[lane];
    for (; at < vocabulary; at++) highest[0] = scores[at] > highest[0] ? scores[at] : highest[0];
    float top = highest[0];
    for (int lane = 1; lane < LANES; lane++) top = highest[lane] > top ? highest[lane] : top;
    double total = 0;
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

// logits (rows, vocabulary); tokens (rows,): the one given, or -1, where one is drawn. Its log-probability goes to
// logprobs: NaN where a number of the row is NaN or +infinity, or all are -infinity; the token is 0 where none can be drawn.
void read_rows(const float *logits, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const float *temperatures,
               const int64_t *keys, int64_t *tokens, float *logprobs, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *scores = logits + row * vocabulary;
        if (tokens[row] < 0) first_of(scores, vocabulary, hashes, temperatures[row], keys[row], 1, tokens + row);
        if (tokens[row] < 0) tokens[row] = 0;
        logprobs[row] = scores[tokens[row]] - normaliser(scores, vocabulary);
    }
}
