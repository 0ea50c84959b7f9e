// Vectors of LANES numbers, for attention and the forward pass. Arithmetic uses the compiler's vector operators. This
// file adds the operations that need instructions: AVX-512, AVX2 with FMA, NEON.

#pragma once

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __aarch64__
#include <arm_neon.h>
#define NEON
#define LANES 4
#else
#include <immintrin.h>
#ifdef __AVX512F__
#define LANES 16
#define ON(name) _mm512_##name
typedef __m512 Native;
typedef __m512i NativeWords;
#ifdef __AVX512VNNI__
#define DOT(name) _mm512_##name##_epi32
#endif
#else
#define LANES 8
#define ON(name) _mm256_##name
typedef __m256 Native;
typedef __m256i NativeWords;
#ifdef __AVXVNNI__
#define DOT(name) _mm256_##name##_avx_epi32
#endif
#endif
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Int16s __attribute__((vector_size(4 * LANES)));        // two in a word

static inline Floats load(const void *address) {
    Floats values;
    memcpy(&values, address, sizeof values);
    return values;
}

static inline Words load_words(const void *address) {
    Words words;
    memcpy(&words, address, sizeof words);
    return words;
}

static inline void store(void *address, Floats values) { memcpy(address, &values, sizeof values); }

// Load the first `count` numbers; the other lanes are 0.
static inline Floats load_partial(const float *address, int64_t count) {
    if (count >= LANES) return load(address);
    Floats values = {0};
    memcpy(&values, address, count * sizeof(float));
    return values;
}

static inline void store_partial(float *address, Floats values, int64_t count) {
    if (count >= LANES) return store(address, values);  // without a call of memcpy
    memcpy(address, &values, count * sizeof(float));
}

// 0, 1, ..., LANES - 1
static inline Words iota(void) {
    Words values;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) values[i] = i;
    return values;
}

static inline Floats vector_abs(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

// Round to the nearest integer, for |x| up to 2^22.
static inline Words round_to_int(Floats x) { return (Words)(x + 12582912.0f) - 0x4B400000; }

#ifdef NEON

static inline Floats splat(float number) { return (Floats)vdupq_n_f32(number); }

static inline Words splat_word(int32_t number) { return (Words)vdupq_n_s32(number); }

static inline Floats add_product(Floats sum, Floats a, Floats b) {
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}

static inline Floats vector_max(Floats a, Floats b) {
    const uint32x4_t greater = vcgtq_f32((float32x4_t)a, (float32x4_t)b);
    return (Floats)vbslq_f32(greater, (float32x4_t)a, (float32x4_t)b);
}

static inline float reduce_add(Floats x) { return vaddvq_f32((float32x4_t)x); }

static inline float reduce_max(Floats x) { return vmaxvq_f32((float32x4_t)x); }

static inline Floats load_float16(const void *address) {
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)address)));
}

static inline void transpose(Words *words) {
    int32x4_t *r = (int32x4_t *)words;
    int64x2_t t[4];
    for (int i = 0; i < 2; i++) {
        t[i] = vreinterpretq_s64_s32(vtrn1q_s32(r[2 * i], r[2 * i + 1]));
        t[2 + i] = vreinterpretq_s64_s32(vtrn2q_s32(r[2 * i], r[2 * i + 1]));
    }
    for (int i = 0; i < 2; i++) {
        r[i] = vreinterpretq_s32_s64(vtrn1q_s64(t[2 * i], t[2 * i + 1]));
        r[2 + i] = vreinterpretq_s32_s64(vtrn2q_s64(t[2 * i], t[2 * i + 1]));
    }
}

#else

static inline Floats splat(float number) { return (Floats)ON(set1_ps)(number); }

static inline Words splat_word(int32_t number) { return (Words)ON(set1_epi32)(number); }

static inline Floats add_product(Floats sum, Floats a, Floats b) {
    return (Floats)ON(fmadd_ps)((Native)a, (Native)b, (Native)sum);
}

static inline Floats vector_max(Floats a, Floats b) { return (Floats)ON(max_ps)((Native)a, (Native)b); }

#if LANES == 16

static inline float reduce_add(Floats x) { return _mm512_reduce_add_ps((Native)x); }

static inline float reduce_max(Floats x) { return _mm512_reduce_max_ps((Native)x); }

static inline Floats load_float16(const void *address) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)address));
}

static inline void transpose(Words *words) {
    __m512i *r = (__m512i *)words, t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
        r[4 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88);
        r[12 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
    }
}

#else

static inline float reduce_add(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((Native)x), _mm256_extractf128_ps((Native)x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline float reduce_max(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((Native)x), _mm256_extractf128_ps((Native)x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline Floats load_float16(const void *address) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)address));
}

static inline void transpose(Words *words) {
    __m256i *r = (__m256i *)words, t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x20);
        t[4 + j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x31);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) r[j] = t[j];
}

#endif
#endif

// All lanes are the word at an address of any type.
static inline __attribute__((always_inline)) Words splat_word_at(const void *address) {
    int32_t word;
    memcpy(&word, address, sizeof word);
    return splat_word(word);
}

// Look each byte, from 0 to 15, up in a table of 16 bytes, which is repeated in `table`.
static inline Words lookup_bytes(Words table, Words bytes) {
#ifdef NEON
    return (Words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)bytes);
#else
    return (Words)ON(shuffle_epi8)((NativeWords)table, (NativeWords)bytes);
#endif
}

// Add to each word the products of the four bytes of `a` and `b`, and of `c` and `d`. Inputs `b` and `d` are signed, at
// least -127. Weights `a` and `c` have `range` bits: unsigned, but 8 bits without DOT are signed. With AVX2 but no VNNI
// sums of 4-bit weights stay in 16 bits: up to four additions fit, and widen_sums then adds the two halves of each word.
static inline __attribute__((always_inline)) Words dot_pair(int range, Words sum, Words a, Words b, Words c, Words d) {
#ifdef DOT
    sum = (Words)DOT(dpbusd)((NativeWords)sum, (NativeWords)a, (NativeWords)b);
    return (Words)DOT(dpbusd)((NativeWords)sum, (NativeWords)c, (NativeWords)d);
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
    return (Words)vdotq_s32(vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b), (int8x16_t)c, (int8x16_t)d);
#elif defined(NEON)
    const int8x16_t first = (int8x16_t)a, second = (int8x16_t)b, third = (int8x16_t)c, fourth = (int8x16_t)d;
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(first), vget_low_s8(second)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(first, second));
    low = vpadalq_s16(low, vmull_s8(vget_low_s8(third), vget_low_s8(fourth)));
    high = vpadalq_s16(high, vmull_high_s8(third, fourth));
    return sum + (Words)vpaddq_s32(low, high);
#else
#define PRODUCTS(weights, inputs) ON(maddubs_epi16)((NativeWords)(weights), (NativeWords)(inputs))
#define WIDEN(products) (Words) ON(madd_epi16)((NativeWords)(products), ON(set1_epi16)(1))
    if (range == 8) {  // two products of 8 bits fit into 16 bits if one factor is at most 128, the other 127
        const NativeWords first = ON(sign_epi8)((NativeWords)b, (NativeWords)a);
        const NativeWords second = ON(sign_epi8)((NativeWords)d, (NativeWords)c);
        return sum + WIDEN(PRODUCTS(ON(abs_epi8)((NativeWords)a), first)) +
               WIDEN(PRODUCTS(ON(abs_epi8)((NativeWords)c), second));
    }
    const Int16s products = (Int16s)PRODUCTS(a, b) + (Int16s)PRODUCTS(c, d);
    return range == 4 ? (Words)((Int16s)sum + products) : sum + WIDEN(products);
#endif
}

static inline __attribute__((always_inline)) Words widen_sums(int range, Words sum) {
#if !defined(NEON) && !defined(DOT)
    if (range == 4) return WIDEN(sum);
#endif
    return sum;
}

// e^x for x <= 0, as 2^(x / ln 2). A polynomial for the fraction, error 5e-7; 0 below 2^-126; NaN stays NaN.
static inline Floats exponential(Floats x) {
    const Floats scaled = vector_max(splat(-127.0f), x * 1.44269504f);
    const Words whole = round_to_int(scaled);
    const Floats rest = scaled - __builtin_convertvector(whole, Floats);
    Floats sum = splat(1.3333558e-3f);
    sum = add_product(splat(9.6181291e-3f), sum, rest);
    sum = add_product(splat(5.5504109e-2f), sum, rest);
    sum = add_product(splat(2.4022651e-1f), sum, rest);
    sum = add_product(splat(6.9314718e-1f), sum, rest);
    sum = add_product(splat(1.0f), sum, rest);
    return sum * (Floats)((whole + 127) << 23);
}
