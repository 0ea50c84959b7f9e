// The number format of keys, values and inputs: float32 with -DFLOAT32, otherwise bfloat16 (requires AVX-512 BF16).

#pragma once

#include "simd.h"

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
