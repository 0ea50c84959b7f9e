// The number format of keys, values and inputs: float32 with -DFLOAT32, otherwise bfloat16 (requires AVX-512 BF16).
// With -DFLOAT32 -DHALF_STORE, keys and values are stored as float16 (requires F16C) and computed in float32.

#pragma once

#include "simd.h"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#if !defined(__AVX512BF16__) && !defined(FLOAT32)
#define FLOAT32
#endif

#ifdef FLOAT32
typedef float Element;
#define PER_WORD 1                 // elements in a 32-bit word, which one product sums
#else
typedef uint16_t Element;
#define PER_WORD 2
#endif

// Add the products of words: each word is one float32 or two bfloat16.
static inline Floats multiply_add(Floats sum, Words a, Words b) {
#ifdef FLOAT32
    return add_product(sum, (Floats)a, (Floats)b);
#else
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}

// Round LANES numbers to elements.
static inline void store_elements(Element *address, Floats values) {
#ifdef FLOAT32
    store(address, values);
#else
    _mm256_storeu_si256((__m256i *)address, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#endif
}

static inline Floats load_elements(const Element *address) {
#ifdef FLOAT32
    return load(address);
#else
    const __m256i half = _mm256_loadu_si256((const __m256i *)address);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#endif
}

// The format in which keys and values are stored.
#ifdef HALF_STORE
typedef uint16_t Stored;
#define MAX_HALF 65504.0f
#else
typedef Element Stored;
#endif

// Store a head's HEAD_DIM elements. Numbers beyond the range of float16 become its largest. Returns how many they are.
static inline int store_head(Stored *address, const Element *head) {
#ifdef HALF_STORE
    Words beyond = {0};
    for (int i = 0; i < HEAD_DIM; i += LANES) {
        const Floats values = load(head + i), below = vector_max(values, splat(-MAX_HALF));
        const Floats clamped = -vector_max(-below, splat(-MAX_HALF));
        beyond -= vector_abs(values) > splat(MAX_HALF);
#if LANES == 16
        _mm256_storeu_si256((__m256i *)(address + i), _mm512_cvtps_ph((__m512)clamped, _MM_FROUND_TO_NEAREST_INT));
#else
        _mm_storeu_si128((__m128i *)(address + i), _mm256_cvtps_ph((__m256)clamped, _MM_FROUND_TO_NEAREST_INT));
#endif
    }
    return (int)reduce_add(__builtin_convertvector(beyond, Floats));
#else
    memcpy(address, head, HEAD_DIM * sizeof(Element));
    return 0;
#endif
}

// Load vector `part` of stored elements as words: LANES float32, or pairs of bfloat16.
static inline Words load_stored(const Stored *address, int part) {
#ifdef HALF_STORE
    return (Words)load_float16(address + LANES * part);
#else
    return load_words((const int32_t *)address + LANES * part);
#endif
}
