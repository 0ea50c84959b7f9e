// Vectors of LANES numbers: what attention.c and forward.c are written in. Arithmetic is the compiler's own on vectors;
// here stands what a processor has an instruction for and the compiler no operator: AVX-512, AVX2 with FMA, NEON, and
// with -DPORTABLE (and -DLANES=4, 8 or 16) plain C for any other.

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(PORTABLE) && defined(__aarch64__)
#include <arm_neon.h>
#define NEON
#define LANES 4
#elif !defined(PORTABLE)
#include <immintrin.h>
#ifdef __AVX512F__
#define LANES 16
#define ON(name) _mm512_##name
typedef __m512 Native;
typedef __m512i NativeWords;
#else
#define LANES 8
#define ON(name) _mm256_##name
typedef __m256 Native;
typedef __m256i NativeWords;
#endif
#endif

#if !defined(PORTABLE) && LANES == 16 && defined(__AVX512VNNI__)
#define DOT(name) _mm512_##name##_epi32
#elif !defined(PORTABLE) && LANES == 8 && defined(__AVXVNNI__)
#define DOT(name) _mm256_##name##_avx_epi32
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(4 * LANES)));         // two in a word

static inline Floats load(const void *place) {
    Floats numbers;
    memcpy(&numbers, place, sizeof numbers);
    return numbers;
}

static inline Words load_words(const void *place) {
    Words words;
    memcpy(&words, place, sizeof words);
    return words;
}

static inline void store(void *place, Floats numbers) { memcpy(place, &numbers, sizeof numbers); }

// The first `count` of them; the others are 0.
static inline Floats load_some(const float *place, int64_t count) {
    if (count >= LANES) return load(place);
    Floats numbers = {0};
    memcpy(&numbers, place, count * sizeof(float));
    return numbers;
}

static inline void store_some(float *place, Floats numbers, int64_t count) {
    memcpy(place, &numbers, (count < LANES ? count : LANES) * sizeof(float));
}

// 0, 1, 2 and so on.
static inline Words numbered(void) {
    Words numbers;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

static inline Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

// Whole numbers, up to 2^22, to the nearest.
static inline Words nearest(Floats x) { return (Words)(x + 12582912.0f) - 0x4B400000; }

#ifdef PORTABLE

static inline void rest_a_little(void) {}

static inline Floats each(float number) {
    Floats all;
    for (int i = 0; i < LANES; i++) all[i] = number;
    return all;
}

static inline Words each_word(int32_t number) {
    Words all;
    for (int i = 0; i < LANES; i++) all[i] = number;
    return all;
}

static inline Floats add_product(Floats sum, Floats a, Floats b) { return sum + a * b; }

// The second where one of them is NaN.
static inline Floats larger_of(Floats a, Floats b) {
    const Words first = a > b;
    return (Floats)(((Words)a & first) | ((Words)b & ~first));
}

static inline float sum_of(Floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline float largest_of(Floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = most > x[i] ? most : x[i];
    return most;
}

// To each word the products of its two halves.
static inline Words add_halves(Words sum, Words a, Words b) {
    for (int i = 0; i < LANES; i++)
        sum[i] += ((Halves)a)[2 * i] * ((Halves)b)[2 * i] + ((Halves)a)[2 * i + 1] * ((Halves)b)[2 * i + 1];
    return sum;
}

// LANES numbers of 16 bits (IEEE 754), of which a halves' exponent is 112 less than a float's.
static inline Floats load_halves(const void *place) {
    typedef uint16_t Narrow __attribute__((vector_size(2 * LANES)));
    Narrow narrow;
    memcpy(&narrow, place, sizeof narrow);
    const Words halves = __builtin_convertvector(narrow, Words), endless = (halves & 0x7c00) == 0x7c00;
    const Words size = (Words)((Floats)((halves & 0x7fff) << 13) * 0x1p112f);
    return (Floats)(size | (endless & 0x7f800000) | ((halves & 0x8000) << 16));
}

// LANES rows become columns.
static inline void transpose(Words *r) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const int32_t word = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = word;
        }
}

#elif defined(NEON)

static inline void rest_a_little(void) { __asm__ volatile("yield"); }

static inline Floats each(float number) { return (Floats)vdupq_n_f32(number); }

static inline Words each_word(int32_t number) { return (Words)vdupq_n_s32(number); }

static inline Floats add_product(Floats sum, Floats a, Floats b) {
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}

static inline Floats larger_of(Floats a, Floats b) {
    const uint32x4_t first = vcgtq_f32((float32x4_t)a, (float32x4_t)b);
    return (Floats)vbslq_f32(first, (float32x4_t)a, (float32x4_t)b);
}

static inline float sum_of(Floats x) { return vaddvq_f32((float32x4_t)x); }

static inline float largest_of(Floats x) { return vmaxvq_f32((float32x4_t)x); }

static inline Floats load_halves(const void *place) {
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)place)));
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

static inline void rest_a_little(void) { _mm_pause(); }

static inline Floats each(float number) { return (Floats)ON(set1_ps)(number); }

static inline Words each_word(int32_t number) { return (Words)ON(set1_epi32)(number); }

static inline Floats add_product(Floats sum, Floats a, Floats b) {
    return (Floats)ON(fmadd_ps)((Native)a, (Native)b, (Native)sum);
}

static inline Floats larger_of(Floats a, Floats b) { return (Floats)ON(max_ps)((Native)a, (Native)b); }

#if LANES == 16

static inline float sum_of(Floats x) { return _mm512_reduce_add_ps((Native)x); }

static inline float largest_of(Floats x) { return _mm512_reduce_max_ps((Native)x); }

static inline Floats load_halves(const void *place) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)place));
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

static inline float sum_of(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((Native)x), _mm256_extractf128_ps((Native)x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline float largest_of(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((Native)x), _mm256_extractf128_ps((Native)x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline Floats load_halves(const void *place) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)place));
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

// To each word the products of its four bytes: of `a` from 0 to 255, of `b` with a sign. With AVX2 but no VNNI a pair of
// products has to fit into 16 bits: `a` goes to 120 then. With NEON it has a sign, too, and goes to 127.
static inline Words add_bytes(Words sum, Words a, Words b) {
#ifdef DOT
    return (Words)DOT(dpbusd)((NativeWords)sum, (NativeWords)a, (NativeWords)b);
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
    return (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#elif defined(NEON)
    const int8x16_t first = (int8x16_t)a, second = (int8x16_t)b;
    const int16x8_t low = vmull_s8(vget_low_s8(first), vget_low_s8(second)), high = vmull_high_s8(first, second);
    return sum + (Words)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#elif !defined(PORTABLE)
    return sum + (Words)ON(madd_epi16)(ON(maddubs_epi16)((NativeWords)a, (NativeWords)b), ON(set1_epi16)(1));
#else
    const Words even = (Words)(((Halves)b << 8) >> 8), odd = (Words)((Halves)b >> 8);
    return add_halves(add_halves(sum, a & 0x00ff00ff, even), (a >> 8) & 0x00ff00ff, odd);
#endif
}

// The same where `a` is from 0 to 15. With AVX2 but no VNNI up to eight such sums fit into halves of words, which
// of_nibbles adds up.
static inline Words add_nibbles(Words sum, Words a, Words b) {
#if defined(PORTABLE) || defined(NEON) || defined(DOT)
    return add_bytes(sum, a, b);
#else
    return (Words)((Halves)sum + (Halves)ON(maddubs_epi16)((NativeWords)a, (NativeWords)b));
#endif
}

static inline Words of_nibbles(Words sum) {
#if defined(PORTABLE) || defined(NEON) || defined(DOT)
    return sum;
#else
    return (Words)ON(madd_epi16)((NativeWords)sum, ON(set1_epi16)(1));
#endif
}

// e^x as 2^(x / ln 2) for x <= 0: the fraction by a polynomial, to 5e-7; 0 below 2^-126. NaN stays NaN.
static inline Floats exponential(Floats x) {
    const Floats scaled = larger_of(each(-127.0f), x * 1.44269504f);
    const Words whole = nearest(scaled);
    const Floats rest = scaled - __builtin_convertvector(whole, Floats);
    Floats sum = each(1.3333558e-3f);
    sum = add_product(each(9.6181291e-3f), sum, rest);
    sum = add_product(each(5.5504109e-2f), sum, rest);
    sum = add_product(each(2.4022651e-1f), sum, rest);
    sum = add_product(each(6.9314718e-1f), sum, rest);
    sum = add_product(each(1.0f), sum, rest);
    return sum * (Floats)((whole + 127) << 23);
}
