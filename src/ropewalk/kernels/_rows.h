/* One row of channels turned, for each dtype, each layout and each set of instructions that a machine may have.
 *
 * Compilers vectorise the plain loops well for float32 and float64.  For the half precisions they need telling on
 * x86, where rounding costs more than the turn itself: those loops are written out for AVX2.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <immintrin.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif
#if defined(__GNUC__)
#define ALWAYS static inline __attribute__((always_inline))
#define SOON_WRITTEN(address) __builtin_prefetch(address, 1)
#else
#define ALWAYS static inline
#define SOON_WRITTEN(address) ((void)(address))
#endif
#define ROWS_AHEAD 8 /* are asked for early: rounding would wait for memory */
#define CACHE_LINE 64

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, DTYPES };

/* ---- one element: read, and rounded once to the nearest, ties to even ---- */

ALWAYS uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
ALWAYS float float_of(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

ALWAYS float float32_read(float v) { return v; }
ALWAYS float float32_rounded(float v) { return v; }
ALWAYS double float64_read(double v) { return v; }
ALWAYS double float64_rounded(double v) { return v; }

ALWAYS float bfloat16_read(uint16_t v) { return float_of((uint32_t)v << 16); }

ALWAYS uint16_t bfloat16_rounded(float v) {
    uint32_t u = bits_of(v);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Without F16C and whatever the processor's mode for denormals: no intermediate value is one. */
ALWAYS float float16_read(uint16_t v) {
    uint32_t sign = (uint32_t)(v & 0x8000) << 16, rest = (uint32_t)(v & 0x7fff) << 13;
    float tiny = float_of(rest + (113u << 23)) - float_of(113u << 23);
    uint32_t normal = rest + (112u << 23), special = rest + (224u << 23);
    uint32_t u = rest < (1u << 23) ? bits_of(tiny) : rest >= (31u << 23) ? special : normal;
    return float_of(u | sign);
}

ALWAYS uint16_t float16_rounded(float v) {
    uint32_t u = bits_of(v), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    uint32_t tiny = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    uint32_t h = rest < (113u << 23) ? tiny : rest >= (143u << 23) ? (rest > 0x7f800000 ? 0x7e00 : 0x7c00) : normal;
    return (uint16_t)(h | sign);
}

/* ---- AVX2: the first pairs of a row, several at a time; how many were done ---- */

#ifdef HAS_AVX2
#define AVX2 __attribute__((target("avx2,fma,f16c")))

/* To the nearest, ties to even, in the upper half of each lane; for numbers, not for every NaN: see `has_nan`. */
AVX2 ALWAYS __m256i bfloat16_upper(__m256 v) {
    __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}

/* Numbers 0-3 and 8-11, for that is how unpacking orders sixteen halves: 0-3 8-11, then 4-7 12-15. */
AVX2 ALWAYS __m256 load_apart(const float *t) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(t)), _mm_loadu_ps(t + 8), 1);
}

AVX2 ALWAYS __m256i bfloat16_packed(__m256 low, __m256 high) {
    return _mm256_packus_epi32(_mm256_srli_epi32(bfloat16_upper(low), 16), _mm256_srli_epi32(bfloat16_upper(high), 16));
}

AVX2 ALWAYS int64_t bfloat16_half_avx2(uint16_t *out, const uint16_t *x, const float *cos, const float *sin,
                                       int64_t pairs, int64_t gap, float way) {
    const __m256 ways = _mm256_set1_ps(way);
    const __m256i zero = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 16 <= pairs; i += 16) {
        __m256i first = _mm256_loadu_si256((const __m256i *)(x + i));
        __m256i second = _mm256_loadu_si256((const __m256i *)(x + i + pairs));
        __m256 new_a[2], new_b[2];
        for (int k = 0; k < 2; k++) { /* an unpacked half stands above 16 zeros: a float32 */
            __m256i a_bits = k ? _mm256_unpackhi_epi16(zero, first) : _mm256_unpacklo_epi16(zero, first);
            __m256i b_bits = k ? _mm256_unpackhi_epi16(zero, second) : _mm256_unpacklo_epi16(zero, second);
            __m256 a = _mm256_castsi256_ps(a_bits), b = _mm256_castsi256_ps(b_bits);
            __m256 c = load_apart(cos + i + 4 * k), s = _mm256_mul_ps(ways, load_apart(sin + i + 4 * k));
            new_a[k] = _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s));
            new_b[k] = _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s));
        }
        _mm256_storeu_si256((__m256i *)(out + i), bfloat16_packed(new_a[0], new_a[1]));
        _mm256_storeu_si256((__m256i *)(out + i + gap), bfloat16_packed(new_b[0], new_b[1]));
    }
    return i;
}

/* A pair is one lane of 32 bits: the first channel in its lower half, the second in its upper half. */
AVX2 ALWAYS int64_t bfloat16_next_avx2(uint16_t *out, const uint16_t *x, const float *cos, const float *sin,
                                       int64_t pairs, int64_t gap, float way) {
    const __m256 ways = _mm256_set1_ps(way);
    int64_t i = 0;
    (void)gap;
    for (; i + 8 <= pairs; i += 8) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(x + 2 * i));
        __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        __m256 b = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
        __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_mul_ps(ways, _mm256_loadu_ps(sin + i));
        __m256i new_a = bfloat16_upper(_mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        __m256i new_b = bfloat16_upper(_mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
        _mm256_storeu_si256((__m256i *)(out + 2 * i), _mm256_blend_epi16(_mm256_srli_epi32(new_a, 16), new_b, 0xaa));
    }
    return i;
}

AVX2 ALWAYS __m256 float16_load8(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }

AVX2 ALWAYS void float16_store8(uint16_t *out, __m256 v) {
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

AVX2 ALWAYS int64_t float16_half_avx2(uint16_t *out, const uint16_t *x, const float *cos, const float *sin,
                                      int64_t pairs, int64_t gap, float way) {
    const __m256 ways = _mm256_set1_ps(way);
    int64_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        __m256 a = float16_load8(x + i), b = float16_load8(x + i + pairs);
        __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_mul_ps(ways, _mm256_loadu_ps(sin + i));
        float16_store8(out + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        float16_store8(out + i + gap, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
    return i;
}

/* Eight pairs, turned where two shuffles leave them: 0 1 4 5 2 3 6 7, and two more bring them back. */
AVX2 ALWAYS void turn_neighbours(__m256 *low, __m256 *high, const float *cos, const float *sin, __m256 ways) {
    __m256 a = _mm256_shuffle_ps(*low, *high, 0x88), b = _mm256_shuffle_ps(*low, *high, 0xdd);
    __m256d c_pairs = _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_loadu_ps(cos)), 0xd8);
    __m256d s_pairs = _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_loadu_ps(sin)), 0xd8);
    __m256 c = _mm256_castpd_ps(c_pairs), s = _mm256_mul_ps(ways, _mm256_castpd_ps(s_pairs));
    __m256 new_a = _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)), new_b = _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s));
    *low = _mm256_unpacklo_ps(new_a, new_b), *high = _mm256_unpackhi_ps(new_a, new_b);
}

AVX2 ALWAYS int64_t float16_next_avx2(uint16_t *out, const uint16_t *x, const float *cos, const float *sin,
                                      int64_t pairs, int64_t gap, float way) {
    int64_t i = 0;
    (void)gap;
    for (; i + 8 <= pairs; i += 8) {
        __m256 low = float16_load8(x + 2 * i), high = float16_load8(x + 2 * i + 8);
        turn_neighbours(&low, &high, cos + i, sin + i, _mm256_set1_ps(way));
        float16_store8(out + 2 * i, low), float16_store8(out + 2 * i + 8, high);
    }
    return i;
}

AVX2 ALWAYS int64_t float32_next_avx2(float *out, const float *x, const float *cos, const float *sin,
                                      int64_t pairs, int64_t gap, float way) {
    int64_t i = 0;
    (void)gap;
    for (; i + 8 <= pairs; i += 8) {
        __m256 low = _mm256_loadu_ps(x + 2 * i), high = _mm256_loadu_ps(x + 2 * i + 8);
        turn_neighbours(&low, &high, cos + i, sin + i, _mm256_set1_ps(way));
        _mm256_storeu_ps(out + 2 * i, low), _mm256_storeu_ps(out + 2 * i + 8, high);
    }
    return i;
}
#endif

#define NO_HEAD_START(...) 0

/* ---- one row of channels, and a block of rows ---- */

typedef struct { char *out; const char *x, *cos, *sin; } At;
typedef struct { int64_t out, x, cos, sin; } Stride; /* bytes */

typedef struct {
    int64_t pairs, rest; /* rest: bytes beyond the pairs, copied when written elsewhere */
    int64_t gap;         /* of the half layout: elements from the first to the second channel of a pair in `out` */
    int64_t n[2];        /* outer and inner length */
    Stride by[2];
    int interleaved, back;
} Block;

typedef void (*Run)(const Block *, At);

ALWAYS At moved(At at, Stride by, int64_t n) {
    At there = {at.out + n * by.out, at.x + n * by.x, at.cos + n * by.cos, at.sin + n * by.sin};
    return there;
}

#define ROW(NAME, DTYPE, STORED, REAL, FIRST, SECOND, OUT)                                                            \
    ALWAYS void NAME(STORED *out, const STORED *x, const REAL *cos, const REAL *sin, int64_t from, int64_t pairs,     \
                     int64_t gap, REAL way) {                                                                         \
        INDEPENDENT for (int64_t i = from; i < pairs; i++) {                                                          \
            REAL a = DTYPE##_read(x[FIRST]), b = DTYPE##_read(x[SECOND]), c = cos[i], s = way * sin[i];               \
            out[FIRST] = DTYPE##_rounded(a * c - b * s);                                                              \
            out[OUT] = DTYPE##_rounded(b * c + a * s);                                                                \
        }                                                                                                             \
    }

#define BLOCK(NAME, DTYPE, STORED, REAL, TARGET, START_HALF, START_NEXT)                                              \
    TARGET ALWAYS void NAME##_rows(const Block *b, At at, int interleaved, REAL way) {                                \
        const int64_t pairs = b->pairs, gap = b->gap;                                                                 \
        for (int64_t j = 0; j < b->n[0]; j++) {                                                                       \
            At here = moved(at, b->by[0], j);                                                                         \
            for (int64_t i = 0; i < b->n[1]; i++, here = moved(here, b->by[1], 1)) {                                  \
                STORED *out = (STORED *)here.out;                                                                     \
                const STORED *x = (const STORED *)here.x;                                                             \
                const REAL *cos = (const REAL *)here.cos, *sin = (const REAL *)here.sin;                              \
                for (int64_t byte = 0; byte < 2 * pairs * (int64_t)sizeof(STORED); byte += CACHE_LINE)                \
                    SOON_WRITTEN(here.x + ROWS_AHEAD * b->by[1].x + byte);                                            \
                if (interleaved)                                                                                      \
                    DTYPE##_next(out, x, cos, sin, START_NEXT(out, x, cos, sin, pairs, gap, way), pairs, gap, way);   \
                else                                                                                                  \
                    DTYPE##_half(out, x, cos, sin, START_HALF(out, x, cos, sin, pairs, gap, way), pairs, gap, way);   \
                if (b->rest) memcpy(out + 2 * pairs, x + 2 * pairs, (size_t)b->rest);                                 \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET static void NAME(const Block *b, At at) { /* constants, for the loops to be compiled with */               \
        if (b->interleaved) {                                                                                         \
            if (b->back) NAME##_rows(b, at, 1, -1);                                                                   \
            else NAME##_rows(b, at, 1, 1);                                                                            \
        } else if (b->back) NAME##_rows(b, at, 0, -1);                                                                \
        else NAME##_rows(b, at, 0, 1);                                                                                \
    }

#define ROWS(DTYPE, STORED, REAL)                                                                                     \
    ROW(DTYPE##_half, DTYPE, STORED, REAL, i, i + pairs, i + gap)                                                     \
    ROW(DTYPE##_next, DTYPE, STORED, REAL, 2 * i, 2 * i + 1, 2 * i + 1)                                               \
    BLOCK(DTYPE##_baseline, DTYPE, STORED, REAL, , NO_HEAD_START, NO_HEAD_START)

ROWS(float32, float, float)
ROWS(bfloat16, uint16_t, float)
ROWS(float16, uint16_t, float)
ROWS(float64, double, double)

static const Run baseline[DTYPES] = {float32_baseline, bfloat16_baseline, float16_baseline, float64_baseline};

#ifdef HAS_AVX2
BLOCK(float32_avx2, float32, float, float, AVX2, NO_HEAD_START, float32_next_avx2)
BLOCK(bfloat16_numbers, bfloat16, uint16_t, float, AVX2, bfloat16_half_avx2, bfloat16_next_avx2)
BLOCK(float16_avx2, float16, uint16_t, float, AVX2, float16_half_avx2, float16_next_avx2)
BLOCK(float64_avx2, float64, double, double, AVX2, NO_HEAD_START, NO_HEAD_START)

AVX2 ALWAYS int has_nan(const char *row, int64_t pairs) {
    const float *t = (const float *)row;
    int found = 0;
    for (int64_t i = 0; i < pairs; i++) found |= (bits_of(t[i]) & 0x7fffffff) > 0x7f800000;
    return found;
}

/* A NaN of bfloat16 has 16 zeros below, and so has one that arithmetic makes: rounding cannot carry into its sign.
 * One in a table may have anything there, and is left to plain C. */
AVX2 static void bfloat16_avx2(const Block *b, At at) {
    int found = 0;
    for (int64_t j = 0; j < (b->by[0].cos || b->by[0].sin ? b->n[0] : 1); j++)
        for (int64_t i = 0; i < (b->by[1].cos || b->by[1].sin ? b->n[1] : 1); i++) {
            At here = moved(moved(at, b->by[0], j), b->by[1], i);
            found |= has_nan(here.cos, b->pairs) | has_nan(here.sin, b->pairs);
        }
    (found ? bfloat16_baseline : bfloat16_numbers)(b, at);
}

static const Run avx2[DTYPES] = {float32_avx2, bfloat16_avx2, float16_avx2, float64_avx2};
#endif
