// The numbers of keys, values and inputs: float32 with -DFLOAT32, otherwise bfloat16, which takes AVX-512 BF16.

#pragma once

#include "simd.h"

#if !defined(__AVX512BF16__) && !defined(FLOAT32)
#define FLOAT32
#endif

#ifdef FLOAT32
typedef float Element;
#define STEP 1                     // elements that one product adds up
#else
typedef uint16_t Element;
#define STEP 2
#endif

// Adds products of words: of a pair of bfloat16 each, or of a float32.
static inline Floats multiply_add(Floats sum, Words a, Words b) {
#ifdef FLOAT32
    return add_product(sum, (Floats)a, (Floats)b);
#else
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}

// Rounds LANES numbers to elements.
static inline void put(Element *place, Floats numbers) {
#ifdef FLOAT32
    store(place, numbers);
#else
    _mm256_storeu_si256((__m256i *)place, (__m256i)_mm512_cvtneps_pbh((__m512)numbers));
#endif
}

static inline Floats get(const Element *place) {
#ifdef FLOAT32
    return load(place);
#else
    const __m256i half = _mm256_loadu_si256((const __m256i *)place);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#endif
}
