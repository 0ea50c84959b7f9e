// Vectors of any number of lanes in plain C, in place of a processor's instructions: see vectors.c.

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

// To each word the products of its four bytes, of `a` without a sign.
static inline Words plain_dpbusd(Words sum, Words a, Words b) {
    const Words even = (Words)(((Halves)b << 8) >> 8), odd = (Words)((Halves)b >> 8);
    return add_halves(add_halves(sum, a & 0x00ff00ff, even), (a >> 8) & 0x00ff00ff, odd);
}
