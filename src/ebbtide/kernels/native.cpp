// One pass over parameter, gradient and optimizer state, and the passes over gradients that feed the norm.
//
// No threads, no allocation, no torch: ranges of raw memory. Every operation is rounded to fp32 by itself, in the
// order written (built without contraction), so that a number depends neither on the processor nor on the thread.
// Nothing is checked here: cpu.py does that.
//
// Note "shared work": a function given a counter `next` draws ranges from it until `n` is reached; threads given
// the same counter share the work, and a slow one delays nobody. Without a counter the caller does it all.
//
// Note "gradient in the parameter's space": the gradient may be the same memory as the parameter (all of it, never
// part). Each element is read before it is written and nothing crosses elements; EACH_ALONE tells the compiler,
// which forgets it unless the loop has a function of its own.

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE __attribute__((always_inline)) static inline

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define PER_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define PER_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PER_PROCESSOR
#endif

#if defined(__clang__)
#define EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH_ALONE _Pragma("GCC ivdep")
#endif

namespace {

constexpr int64_t block = 1024;  // elements under one sum of squares
constexpr int64_t lanes = 32;    // of a block, each summed on its own
constexpr int64_t rows = 4;      // of lanes, taken together

struct Work {
    int64_t own = 0, *next, n, step, begin = 0, end = 0;
    Work(int64_t *shared, int64_t n, int64_t grain) : next(shared ? shared : &own), n(n), step(shared ? grain : n) {}
    bool take() {
        begin = __atomic_fetch_add(next, step, __ATOMIC_RELAXED);
        end = begin + step < n ? begin + step : n;
        return begin < n;
    }
};

struct Elements : Work {
    Elements(int64_t *shared, int64_t n) : Work(shared, n, 64 * block) {}
};

struct Bytes : Work {
    Bytes(int64_t *shared, int64_t n) : Work(shared, n, 1 << 20) {}
};

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Choices without branches: compilers thread jumps through nested ones and then vectorise badly or not at all.
INLINE uint32_t mask(bool yes) { return 0u - uint32_t(yes); }
INLINE uint32_t pick(bool yes, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & mask(yes)); }

INLINE uint32_t canonical(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

// Element types: `read` to fp32; `nearest`, to nearest even as torch does, with NaN made canonical; `from_master`,
// how the bits of a master (already canonical) become a parameter.

struct Fp32 {
    using Stored = float;
    INLINE float read(float x) { return x; }
    INLINE float nearest(float x) { return float_of(canonical(x)); }
};

struct Bf16 {
    using Stored = uint16_t;
    INLINE float read(uint16_t x) { return float_of(uint32_t(x) << 16); }
    INLINE uint16_t nearest(float x) {
        const uint32_t bits = canonical(x);
        return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    INLINE uint16_t from_master(uint32_t bits) { return uint16_t((bits + 0x8000u) >> 16); }
};

struct Fp16 {
    using Stored = uint16_t;
    INLINE float read(uint16_t x) {
        const uint32_t sign = uint32_t(x & 0x8000u) << 16, body = uint32_t(x & 0x7fffu) << 13;
        const uint32_t finite = body + (112u << 23);
        const uint32_t any = finite + (mask(body >= (31u << 23)) & (112u << 23));             // inf, NaN
        const uint32_t tiny = bits_of(float_of(finite + (1u << 23)) - float_of(113u << 23));  // subnormal, zero
        return float_of(sign | pick(body < (1u << 23), tiny, any));
    }
    INLINE uint16_t from_master(uint32_t bits) {
        const uint32_t sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
        const uint32_t half = 126u << 23;  // adding 0.5 leaves a subnormal result, rounded, in the low bits
        const uint32_t tiny = bits_of(float_of(body) + float_of(half)) - half;
        const uint32_t normal = (body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13;
        const uint32_t special = 0x7c00u | (mask(body > 0x7f800000u) & 0x0200u);
        return uint16_t(sign | pick(body >= (143u << 23), special, pick(body < (113u << 23), tiny, normal)));
    }
    INLINE uint16_t nearest(float x) { return from_master(canonical(x)); }
};

// Forms: how parameter and master hold one fp32 number.

struct Alone {
    float *parameter;
    Alone(void *p, void *) : parameter(static_cast<float *>(p)) {}
    INLINE float load(const Alone &at, int64_t i) { return at.parameter[i]; }
    INLINE void store(const Alone &at, int64_t i, float x) { at.parameter[i] = float_of(canonical(x)); }
};

struct Split {
    uint16_t *high;
    int16_t *low;
    Split(void *p, void *m) : high(static_cast<uint16_t *>(p)), low(static_cast<int16_t *>(m)) {}
    INLINE float load(const Split &at, int64_t i) {
        return float_of((uint32_t(at.high[i]) << 16) + uint32_t(int32_t(at.low[i])));
    }
    INLINE void store(const Split &at, int64_t i, float x) {
        const uint32_t bits = canonical(x);
        at.high[i] = Bf16::from_master(bits);
        at.low[i] = int16_t(uint16_t(bits));  // bits - (high << 16): 16 bits say it all
    }
};

template <class Type> struct Separate {
    uint16_t *parameter;
    float *master;
    Separate(void *p, void *m) : parameter(static_cast<uint16_t *>(p)), master(static_cast<float *>(m)) {}
    INLINE float load(const Separate &at, int64_t i) { return at.master[i]; }
    INLINE void store(const Separate &at, int64_t i, float x) {
        const uint32_t bits = canonical(x);
        at.master[i] = float_of(bits);
        at.parameter[i] = Type::from_master(bits);
    }
};

template <class Type> struct Rounded {
    uint16_t *parameter;
    Rounded(void *p, void *) : parameter(static_cast<uint16_t *>(p)) {}
    INLINE void store(const Rounded &at, int64_t i, float x) { at.parameter[i] = Type::from_master(canonical(x)); }
};

// A gradient as every rule takes it: scaled by c[0], within c[1].
template <class Gradient> INLINE float taken(typename Gradient::Stored stored, float scale, float limit) {
    const float g = Gradient::read(stored) * scale;
    return g > limit ? limit : g < -limit ? -limit : g;
}

// Adam (weight decay in the gradient) and AdamW (decoupled). The order of operations is the contract; rule.py has
// the same in torch, gpu.py in Triton.

template <bool decoupled, class Form, class Gradient>
INLINE void adam(Form at, const Gradient *, const void *gradient, void *const *states, const float *c, const Work &of) {
    const auto *const g_at = static_cast<const typename Gradient::Stored *>(gradient);
    auto *const m_at = static_cast<float *>(states[0]), *const v_at = static_cast<float *>(states[1]);
    const float scale = c[0], limit = c[1], b1 = c[2], rest1 = c[3], b2 = c[4], rest2 = c[5];
    const float inv_sqrt_bc2 = c[6], eps = c[7], step_size = c[8], decay = c[9];
    const int64_t end = of.end;
    EACH_ALONE
    for (int64_t i = of.begin; i < end; i++) {
        float p = Form::load(at, i);
        float g = taken<Gradient>(g_at[i], scale, limit);
        if (!decoupled) g = g + decay * p;
        const float m = b1 * m_at[i] + rest1 * g;
        const float v = b2 * v_at[i] + (rest2 * g) * g;
        const float d = std::sqrt(v) * inv_sqrt_bc2 + eps;
        if (decoupled) p = p * decay;
        p = p - step_size * (m / d);
        m_at[i] = m;
        v_at[i] = v;
        Form::store(at, i, p);
    }
}

template <class Form, class Gradient>
INLINE void lion(Form at, const Gradient *, const void *gradient, void *const *states, const float *c, const Work &of) {
    const auto *const g_at = static_cast<const typename Gradient::Stored *>(gradient);
    auto *const m_at = static_cast<float *>(states[0]);
    const float scale = c[0], limit = c[1], b1 = c[2], rest1 = c[3], b2 = c[4], rest2 = c[5], lr = c[6], keep = c[7];
    const int64_t end = of.end;
    EACH_ALONE
    for (int64_t i = of.begin; i < end; i++) {
        const float p = Form::load(at, i), g = taken<Gradient>(g_at[i], scale, limit), m = m_at[i];
        const float direction = b1 * m + rest1 * g;
        const float sign = float(direction > 0.0f) - float(direction < 0.0f);
        m_at[i] = b2 * m + rest2 * g;
        Form::store(at, i, p * keep - lr * sign);
    }
}

template <class Form, class Gradient>
INLINE void sgd(Form at, const Gradient *, const void *gradient, void *const *states, const float *c, const Work &of) {
    const auto *const g_at = static_cast<const typename Gradient::Stored *>(gradient);
    auto *const m_at = static_cast<float *>(states[0]);
    const float scale = c[0], limit = c[1], kept = c[2], lr = c[3], decay = c[4];
    const int64_t end = of.end;
    EACH_ALONE
    for (int64_t i = of.begin; i < end; i++) {
        const float p = Form::load(at, i), g = taken<Gradient>(g_at[i], scale, limit) + decay * p;
        const float m = kept * m_at[i] + g;
        m_at[i] = m;
        Form::store(at, i, p - lr * m);
    }
}

// What `adam` reads and writes, with next to no arithmetic: the speed limit that the benchmark holds it against.
template <class Form, class Gradient>
INLINE void stream(Form at, const Gradient *, const void *gradient, void *const *states, const float *,
                   const Work &of) {
    const auto *const g_at = static_cast<const typename Gradient::Stored *>(gradient);
    auto *const m_at = static_cast<float *>(states[0]), *const v_at = static_cast<float *>(states[1]);
    const int64_t end = of.end;
    EACH_ALONE
    for (int64_t i = of.begin; i < end; i++) {
        const float p = Form::load(at, i), g = Gradient::read(g_at[i]);
        m_at[i] = m_at[i] + g;
        v_at[i] = v_at[i] + g;
        Form::store(at, i, p + g);
    }
}

template <class Form> INLINE void join(Form at, float *out, int64_t begin, int64_t end) {
    EACH_ALONE
    for (int64_t i = begin; i < end; i++) out[i] = Form::load(at, i);
}

template <class Form> INLINE void split(Form at, const float *in, int64_t begin, int64_t end) {
    EACH_ALONE
    for (int64_t i = begin; i < end; i++) Form::store(at, i, in[i]);
}

// Sums of squares: of what is there (`look`), of what was copied, of what was added up. Lane l of a block sums
// elements l, l + 32, ... in that order; then lanes are added by halves. In fp64, where squares are exact.

enum Deed { look, copy, add };

template <Deed deed, class Type>
INLINE double square(typename Type::Stored *to, const typename Type::Stored *from) {
    if (deed == copy) *to = *from;
    if (deed == add) *to = Type::nearest(Type::read(*to) + Type::read(*from));
    const double x = double(Type::read(*to));
    return x * x;
}

template <Deed deed, class Type, int count>
INLINE double column(double sum, typename Type::Stored *to, const typename Type::Stored *from) {
    if constexpr (count > 1) sum = column<deed, Type, count - 1>(sum, to, from);
    return sum + square<deed, Type>(to + (count - 1) * lanes, from + (count - 1) * lanes);
}

template <Deed deed, class Type, int count>
INLINE void sum_rows(typename Type::Stored *to, const typename Type::Stored *from, double *sum, int64_t width) {
    EACH_ALONE
    for (int64_t i = 0; i < width; i++) sum[i] = column<deed, Type, count>(sum[i], to + i, from + i);
}

template <Deed deed, class Type>
INLINE void squares(const Type *, void *destination, const void *source, double *sums, const Work &of) {
    auto *const to = static_cast<typename Type::Stored *>(destination);
    const auto *const from = static_cast<const typename Type::Stored *>(source);
    for (int64_t start = of.begin; start < of.end; start += block) {
        const int64_t stop = start + block < of.end ? start + block : of.end;
        double sum[lanes] = {};
        int64_t i = start;
        for (; i + rows * lanes <= stop; i += rows * lanes) sum_rows<deed, Type, rows>(to + i, from + i, sum, lanes);
        for (; i < stop; i += lanes)
            sum_rows<deed, Type, 1>(to + i, from + i, sum, stop - i < lanes ? stop - i : lanes);
        for (int64_t half = lanes / 2; half > 0; half /= 2)
            for (int64_t lane = 0; lane < half; lane++) sum[lane] += sum[lane + half];
        sums[start / block] = sum[0];
    }
}

// Gradients of several steps, each with its weight: what is there plus the weighted source, or the latter alone.
template <bool add, class To, class From>
INLINE void weigh(const To *, const From *, void *destination, const void *source, float weight, const Work &of) {
    auto *const to = static_cast<typename To::Stored *>(destination);
    const auto *const from = static_cast<const typename From::Stored *>(source);
    const int64_t end = of.end;
    EACH_ALONE
    for (int64_t i = of.begin; i < end; i++) {
        const float weighted = From::read(from[i]) * weight;
        to[i] = To::nearest(add ? To::read(to[i]) + weighted : weighted);
    }
}

// What `ranks` ranks sent of the same elements, `each` apart, added in their order, scaled, and rounded once.
template <class Type>
INLINE void sum_ranks(const Type *, void *destination, const void *source, int64_t ranks, int64_t each, float scale,
                      const Work &of) {
    auto *const to = static_cast<typename Type::Stored *>(destination);
    const auto *const from = static_cast<const typename Type::Stored *>(source);
    for (int64_t start = of.begin; start < of.end; start += block) {
        const int64_t count = start + block < of.end ? block : of.end - start;
        float sum[block];
        for (int64_t i = 0; i < count; i++) sum[i] = Type::read(from[start + i]);
        for (int64_t rank = 1; rank < ranks; rank++)
            for (int64_t i = 0; i < count; i++) sum[i] += Type::read(from[rank * each + start + i]);
        for (int64_t i = 0; i < count; i++) to[start + i] = Type::nearest(sum[i] * scale);
    }
}

// Whether any element has all bits of its exponent set: an infinity or a NaN.
template <class Word> INLINE bool any_full(const Word *x, int64_t begin, int64_t end, Word exponent) {
    Word full = 0;
    for (int64_t i = begin; i < end; i++) full |= Word((x[i] & exponent) == exponent);
    return full != 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) PER_PROCESSOR void

#define UPDATE(name, pass, form, Form, gradient, Gradient)                                                  \
    EXPORT name##_##form##_##gradient(void *p, const void *g, void *master, void *const *states,            \
                                      const float *c, int64_t *next, int64_t n) {                           \
        for (Elements of(next, n); of.take();)                                                              \
            pass(Form(p, master), static_cast<const Gradient *>(nullptr), g, states, c, of);                \
    }

#define UPDATES(form, Form, gradient, Gradient)                                    \
    UPDATE(adam, adam<false>, form, Form, gradient, Gradient)                      \
    UPDATE(adamw, adam<true>, form, Form, gradient, Gradient)                      \
    UPDATE(lion, lion, form, Form, gradient, Gradient)                             \
    UPDATE(sgd, sgd, form, Form, gradient, Gradient)                               \
    UPDATE(stream, stream, form, Form, gradient, Gradient)

UPDATES(split, Split, bf16, Bf16)
UPDATES(split, Split, fp32, Fp32)
UPDATES(bf16, Separate<Bf16>, bf16, Bf16)
UPDATES(bf16, Separate<Bf16>, fp32, Fp32)
UPDATES(fp16, Separate<Fp16>, fp16, Fp16)
UPDATES(fp16, Separate<Fp16>, fp32, Fp32)
UPDATES(fp32, Alone, fp32, Fp32)

#define JOIN(form, Form)                                                                     \
    EXPORT join_##form(void *p, void *master, float *out, int64_t *next, int64_t n) {        \
        for (Elements of(next, n); of.take();) join(Form(p, master), out, of.begin, of.end); \
    }

#define SPLIT(form, Form)                                                                    \
    EXPORT split_##form(void *p, void *master, const float *in, int64_t *next, int64_t n) {  \
        for (Elements of(next, n); of.take();) split(Form(p, master), in, of.begin, of.end); \
    }

JOIN(split, Split)
JOIN(bf16, Separate<Bf16>)
JOIN(fp16, Separate<Fp16>)
JOIN(fp32, Alone)
SPLIT(split, Split)
SPLIT(bf16, Separate<Bf16>)
SPLIT(fp16, Separate<Fp16>)
SPLIT(fp32, Alone)
SPLIT(bf16_alone, Rounded<Bf16>)
SPLIT(fp16_alone, Rounded<Fp16>)

#define SQUARES(deed, type, Type)                                                                    \
    EXPORT deed##_##type(void *to, const void *from, double *sums, int64_t *next, int64_t n) {       \
        for (Elements of(next, n); of.take();)                                                       \
            squares<deed>(static_cast<const Type *>(nullptr), to, from, sums, of);                   \
    }

#define DEEDS(type, Type) SQUARES(look, type, Type) SQUARES(copy, type, Type) SQUARES(add, type, Type)

DEEDS(bf16, Bf16)
DEEDS(fp16, Fp16)
DEEDS(fp32, Fp32)

#define NONFINITE(type, Word, exponent)                                                              \
    EXPORT nonfinite_##type(const void *x, int64_t *found, int64_t *next, int64_t n) {               \
        for (Elements of(next, n); of.take();)                                                       \
            if (any_full<Word>(static_cast<const Word *>(x), of.begin, of.end, exponent))            \
                __atomic_store_n(found, 1, __ATOMIC_RELAXED);                                        \
    }

NONFINITE(bf16, uint16_t, 0x7f80u)
NONFINITE(fp16, uint16_t, 0x7c00u)
NONFINITE(fp32, uint32_t, 0x7f800000u)

#define WEIGH(deed, yes, to_type, To, from_type, From)                                                     \
    EXPORT deed##_weighted_##to_type##_##from_type(void *to, const void *from, const float *weight,         \
                                                   int64_t *next, int64_t n) {                              \
        for (Elements of(next, n); of.take();)                                                              \
            weigh<yes>(static_cast<const To *>(nullptr), static_cast<const From *>(nullptr), to, from, *weight, of); \
    }

#define WEIGHTED(to_type, To, from_type, From)                                                     \
    WEIGH(add, true, to_type, To, from_type, From) WEIGH(copy, false, to_type, To, from_type, From)

WEIGHTED(bf16, Bf16, bf16, Bf16)
WEIGHTED(fp32, Fp32, fp32, Fp32)
WEIGHTED(fp32, Fp32, fp16, Fp16)

#define SUM_RANKS(type, Type)                                                                                 \
    EXPORT sum_ranks_##type(void *to, const void *from, const int64_t *ranks, const int64_t *each,            \
                            const float *scale, int64_t *next, int64_t n) {                                   \
        for (Elements of(next, n); of.take();)                                                                \
            sum_ranks(static_cast<const Type *>(nullptr), to, from, *ranks, *each, *scale, of);               \
    }

SUM_RANKS(bf16, Bf16)
SUM_RANKS(fp16, Fp16)
SUM_RANKS(fp32, Fp32)

extern "C" {

// Adjacent pairs, an odd last one carried, until one is left. In place.
double pairwise(double *sums, int64_t n) {
    for (; n > 1; n = (n + 1) / 2) {
        for (int64_t i = 0; i < n / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
        if (n % 2) sums[n / 2] = sums[n - 1];
    }
    return n ? sums[0] : 0.0;
}

void move(void *to, const void *from, int64_t *next, int64_t n) {
    for (Bytes of(next, n); of.take();)
        std::memcpy(static_cast<char *>(to) + of.begin, static_cast<const char *>(from) + of.begin,
                    size_t(of.end - of.begin));
}
}
