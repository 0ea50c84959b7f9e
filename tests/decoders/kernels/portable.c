// Vectors with any number of lanes in plain C, instead of a processor's instructions: see vectors.c.

typedef Words NativeWords;
#define DOT(name) plain_##name

static inline void cpu_pause(void) {}

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

// Return b in lanes where either is NaN.
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

// Add the products of each word's two 16-bit halves.
static inline Words add_halves(Words sum, Words a, Words b) {
    for (int i = 0; i < LANES; i++)
        sum[i] += ((Halves)a)[2 * i] * ((Halves)b)[2 * i] + ((Halves)a)[2 * i + 1] * ((Halves)b)[2 * i + 1];
    return sum;
}

// Load LANES float16 numbers (IEEE 754). The exponent bias of float16 is 112 less than float32's.
static inline Floats load_halves(const void *place) {
    typedef uint16_t Narrow __attribute__((vector_size(2 * LANES)));
    Narrow narrow;
    memcpy(&narrow, place, sizeof narrow);
    const Words halves = __builtin_convertvector(narrow, Words), endless = (halves & 0x7c00) == 0x7c00;
    const Words size = (Words)((Floats)((halves & 0x7fff) << 13) * 0x1p112f);
    return (Floats)(size | (endless & 0x7f800000) | ((halves & 0x8000) << 16));
}

// Transpose LANES rows.
static inline void transpose(Words *r) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const int32_t word = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = word;
        }
}

// Add the products of each word's four bytes. Bytes of `a` are unsigned.
static inline Words plain_dpbusd(Words sum, Words a, Words b) {
    const Words even = (Words)(((Halves)b << 8) >> 8), odd = (Words)((Halves)b >> 8);
    return add_halves(add_halves(sum, a & 0x00ff00ff, even), (a >> 8) & 0x00ff00ff, odd);
}
