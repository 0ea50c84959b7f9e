// Activation functions of gated linear units, for the epilogue of a product of adjacent gate and up lines.

#pragma once

#include "simd.h"

// What to do with a product: store it, add it to the output, or store activation(gate) * up.
typedef enum { STORE, ADD, GATE_SILU, GATE_GELU, GATE_CLAMPED } Epilogue;

static inline Floats sigmoid(Floats x) {
    const Floats decay = exponential(-vector_abs(x)), positive = 1.0f / (1.0f + decay);  // sigmoid(|x|)
    const Words negative = x < 0.0f;
    return (Floats)(((Words)(1.0f - positive) & negative) | ((Words)positive & ~negative));
}

// 0.5 * x * (1 + tanh(y)) is x * sigmoid(2 * y) (GELU, section 2, the approximation with tanh).
static inline Floats gelu(Floats x) {
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

// min(max(x, -limit), limit); NaN stays NaN.
static inline Floats clamp(Floats x, float limit) { return -vector_max(splat(-limit), -vector_max(splat(-limit), x)); }

static inline Floats gated(Epilogue activation, Floats gate, Floats up) {
    if (activation == GATE_GELU) return gelu(gate) * up;
    if (activation == GATE_SILU) return gate * sigmoid(gate) * up;
    // gpt-oss: SwiGLU with clamped inputs and a linear part around 1.
    const Floats limited = -vector_max(splat(-7.0f), -gate);
    return limited * sigmoid(1.702f * limited) * (clamp(up, 7.0f) + 1.0f);
}
