// The operations of simd.h in plain C, for any number of lanes.

typedef Words NativeWords;
#define DOT(name) plain_##name

static inline Floats splat(float number) {
    Floats all;
    for (int i = 0; i < LANES; i++) all[i] = number;
    return all;
}

static inline Words splat_word(int32_t number) {
    Words all;
    for (int i = 0; i < LANES; i++) all[i] = number;
    return all;
}

static inline Floats add_product(Floats sum, Floats a, Floats b) { return sum + a * b; }

// The second operand if either is NaN.
static inline Floats vector_max(Floats a, Floats b) {
    const Words greater = a > b;
    return (Floats)(((Words)a & greater) | ((Words)b & ~greater));
}

static inline float reduce_add(Floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline float reduce_max(Floats x) {
    float max = x[0];
    for (int i = 1; i < LANES; i++) max = max > x[i] ? max : x[i];
    return max;
}

// Add to each word the products of its two halves.
static inline Words madd_int16(Words sum, Words a, Words b) {
    for (int i = 0; i < LANES; i++)
        sum[i] += ((Int16s)a)[2 * i] * ((Int16s)b)[2 * i] + ((Int16s)a)[2 * i + 1] * ((Int16s)b)[2 * i + 1];
    return sum;
}

// Load LANES float16 numbers. The exponent bias of float32 is larger by 112.
static inline Floats load_float16(const void *address) {
    typedef uint16_t Narrow __attribute__((vector_size(2 * LANES)));
    Narrow narrow;
    memcpy(&narrow, address, sizeof narrow);
    const Words halves = __builtin_convertvector(narrow, Words), infinite = (halves & 0x7c00) == 0x7c00;
    const Words size = (Words)((Floats)((halves & 0x7fff) << 13) * 0x1p112f);
    return (Floats)(size | (infinite & 0x7f800000) | ((halves & 0x8000) << 16));
}

// Transpose LANES x LANES words.
static inline void transpose(Words *r) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const int32_t word = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = word;
        }
}

// Add to each word the products of its four bytes, with `a` unsigned.
static inline Words plain_dpbusd(Words sum, Words a, Words b) {
    const Words even = (Words)(((Int16s)b << 8) >> 8), odd = (Words)((Int16s)b >> 8);
    return madd_int16(madd_int16(sum, a & 0x00ff00ff, even), (a >> 8) & 0x00ff00ff, odd);
}
