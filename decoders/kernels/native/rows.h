// Functions of one row of a forward pass, or of one head of a row.

#pragma once

#include "attention.h"

// 1 / sqrt(mean(row^2) + epsilon)
static float rms_factor(const float *row, int64_t count, float epsilon) {
    Floats squares = {0};
    for (int64_t i = 0; i < count; i += LANES) squares = add_product(squares, load(row + i), load(row + i));
    return 1.0f / sqrtf(reduce_add(squares) / (float)count + epsilon);
}

static void rms_norm(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    const float factor = rms_factor(row, count, epsilon);
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(weight + i) * (load(row + i) * factor));
}

static void add_rms_norm(const float *row, const float *weight, int64_t count, float epsilon, float *out) {
    const float factor = rms_factor(row, count, epsilon);
    for (int64_t i = 0; i < count; i += LANES)
        store(out + i, load(out + i) + load(weight + i) * (load(row + i) * factor));
}

// Rotate dimensions i and i + rotary_dim / 2 (RoFormer, section 3.2.2, in halves), after the head's norm, if any.
static void apply_rope(float *head, const float *norm, float epsilon, const float *cosines, const float *sines,
                       int64_t rotary_dim, Element *out) {
    float normed[HEAD_DIM];
    if (norm) {
        rms_norm(head, norm, HEAD_DIM, epsilon, normed);
        head = normed;
    }
    const int64_t half = rotary_dim / 2;
    float rotated[HEAD_DIM];
    for (int64_t i = 0; i < half; i += LANES) {
#define LOAD_PART(numbers) load_partial((numbers) + i, half - i)
        const Floats a = LOAD_PART(head), b = LOAD_PART(head + half);
        store_partial(rotated + i, add_product(-(b * LOAD_PART(sines)), a, LOAD_PART(cosines)), half - i);
        store_partial(rotated + half + i, add_product(a * LOAD_PART(sines + half), b, LOAD_PART(cosines + half)),
                      half - i);
    }
    for (int64_t i = rotary_dim; i < HEAD_DIM; i++) rotated[i] = head[i];
    for (int i = 0; i < HEAD_DIM; i += LANES) store_elements(out + i, load(rotated + i));
}

// cap * tanh(x / cap) (Gemma 2, section 2).
static void cap_logits(float *logits, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES)
        store_partial(logits + i, soft_cap(load_partial(logits + i, count - i), cap), count - i);
}

static void add_scaled(float *row, const float *added, float weight, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store(row + i, add_product(load(row + i), load(added + i), splat(weight)));
}
