// A pass of few rows through decoder layers on a CPU, in one call: what a drafted block and its verification cost.
//
// Shapes: n rows (1 to 64), H hidden size, h heads, g key/value heads, d head size, I intermediate size, C capacity of
// the cache [L, 2, g, C, d], V vocabulary. Weights lie as PyTorch has them, [outputs, inputs], and are read once a pass.
//
// Every number of a row is computed in an order that depends neither on the other rows nor on how many there are: the
// sum over a product's inputs, over a head's channels, over a stretch of keys, and over the stretches, whose borders lie
// at fixed positions. So a token's logits are the same bits whether it comes alone or within a block.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <utility>

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#if defined(__AVX512F__)
constexpr int LANES = 16, OUTS = 4, ROWS = 4, NARROW_OUTS = 4, NARROW_ROWS = 4, MIXED = 4;
#else
constexpr int LANES = 8, OUTS = 2, ROWS = 4, NARROW_OUTS = 1, NARROW_ROWS = 8, MIXED = 2;
#endif
constexpr int STRETCH = 256;  // positions whose keys' softmax is computed together
constexpr int WIDTH = STRETCH + 64;  // scores of a stretch: several rows of a tree share a position
constexpr int KEYS = 2 * LANES;  // keys of a tile of scores
constexpr int64_t ALONE = 1 << 20;  // multiplications that one thread does in about 30 microseconds
constexpr int NEAR = 256;  // scores of which it is asked whether one comes near the best
constexpr int QUERIES = LANES == 16 ? 12 : 6;  // of a tile of scores: twice as many sums in registers

// Kept from being folded into several instructions, each of which would load it again.
#define IN_REGISTER(value) asm("" : "+v"(value))

typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct Linear {
    const void* weight;  // [outputs, inputs]
    const float* bias;   // [outputs] or null
    int64_t outputs, inputs, narrow;  // narrow: bfloat16 instead of float32
};

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm may be null
    Linear qkv, output, gate, up, down;
    int64_t sight;   // which row of the pass's bits
    int64_t window;  // a row at position p sees a key j before the block where p - j < window; 0: every key
};

struct Stack {
    const Layer* layers;
    int64_t count, heads, groups, head_dim, rotated, hidden, intermediate;
    float eps;
};

// What turns the target's features into the drafter's context, and that into keys and values of every draft layer.
struct Context {
    Linear fc, kv;              // [H, F] and [L * 2 * g * d, H]
    const float* norm;          // [H]
    const float* const* k_norms;  // [L] of [d]
    int64_t count, groups, head_dim, rotated;
    float eps;
};

// A head that is read in bfloat16, and asked again in float32 where that could matter.
struct Head {
    Linear narrow, exact;  // [V, H]
    const float* norm;     // [H]
    float eps;
    float error;  // largest distance of an output's narrow weights from its exact ones
};

struct Pass {
    float* x;               // [n, H], in and out
    float* cache;           // [L, 2, g, C, d]
    const float *cos, *sin; // [n, rotated / 2], of each row's position
    const int64_t* depth;   // [n]: row i is at position start + depth[i]
    const int64_t* bits;    // [sights, n]: bit m of bits[., i] says that row i sees the block's own key m
    float* const* states;   // [L]: where the state [n, H] behind each layer goes, or null
    float* scratch;
    int64_t n, start, capacity, threads;
};

namespace {

inline Lanes load(const float* from) {
    Lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline Lanes load(const uint16_t* from) {  // bfloat16 is the upper half of a float
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

template <typename W>
inline Lanes load_some(const W* from, int64_t count) {  // the first `count` lanes, and 0
    W values[LANES] = {};
    memcpy(values, from, count * sizeof(W));
    return load(values);
}

// a * b + c, rounded once. Said outright, and compiled with -ffp-contract=off: what a compiler fuses by itself it fuses in
// one copy of a loop and not in another, and a row's bits would depend on how many rows there are.
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

inline Lanes filled(float value) { return Lanes{} + value; }

inline void store(float* to, Lanes value) { memcpy(to, &value, sizeof value); }

// Lanes a vector holds of each of its sums at the level above, halved from level to level: indices of the lower halves.
template <int HALF, int... AT>
inline Lanes folded(Lanes a, Lanes b, std::integer_sequence<int, AT...>) {
    return __builtin_shufflevector(a, b, (AT / HALF * 2 * HALF + AT % HALF)...) +
           __builtin_shufflevector(a, b, (AT / HALF * 2 * HALF + AT % HALF + HALF)...);
}

// Sums over the lanes of `count` vectors (a power of two up to LANES), side by side, each LANES / count lanes wide. The
// order of the additions is the same for any count.
template <int COUNT>
inline Lanes sums_of(const Lanes* v) {
    Lanes level[COUNT];
    for (int at = 0; at < COUNT; ++at) level[at] = v[at];
    constexpr auto every = std::make_integer_sequence<int, LANES>{};
    const auto halve = [&](auto half) {
        constexpr int HALF = decltype(half)::value, COUNT_HERE = COUNT * 2 * HALF / LANES;
        if constexpr (COUNT_HERE > 1) {
            for (int at = 0; at < COUNT_HERE / 2; ++at) level[at] = folded<HALF>(level[2 * at], level[2 * at + 1], every);
        } else {
            level[0] = folded<HALF>(level[0], level[0], every);
        }
    };
    if constexpr (LANES == 16) halve(std::integral_constant<int, 8>{});
    halve(std::integral_constant<int, 4>{});
    halve(std::integral_constant<int, 2>{});
    halve(std::integral_constant<int, 1>{});
    return level[0];
}

inline float sum(Lanes v) { return sums_of<1>(&v)[0]; }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// The largest of `count` numbers, leaving out what is no number; minus infinity for none.
inline float largest(const float* from, int64_t count) {
    Lanes top = filled(-std::numeric_limits<float>::infinity());
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) top = larger(load(from + k), top);
    float all = top[0];
    for (int lane = 1; lane < LANES; ++lane) all = top[lane] > all ? top[lane] : all;
    for (; k < count; ++k) all = from[k] > all ? from[k] : all;
    return all;
}

// e to the x for x <= 0, within 2 units of the last place; exactly 0 below the smallest normal number.
inline Lanes exponential(Lanes x) {
    const Lanes low = filled(-87.0f), one = filled(1.0f);
    const Lanes inside = larger(x, low);
    const Lanes magic = filled(12582912.0f);  // adding it rounds to a whole number in the lowest bits
    const Lanes shifted = fused(inside, filled(1.44269504f), magic);
    const Lanes whole = shifted - magic;
    const Lanes rest = fused(whole, filled(2.12194440e-4f), fused(whole, filled(-0.693359375f), inside));
    Lanes p = filled(1.9875691500e-4f);
    for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(p, rest, filled(next));
    p = fused(p * rest, rest, rest) + one;
    const Ints exponent = (((Ints)shifted - (Ints)magic) + 127) << 23;
    return x < low ? Lanes{} : p * (Lanes)exponent;
}

inline float exponential_of(float x) { return exponential(filled(x))[0]; }

// The threads of a pass. OpenMP's own barrier spins for milliseconds, which is what two threads that share a core on a
// busy machine then take at every one of hundreds of barriers; this one soon lets the other thread have the core.
class Team {
  public:
    void has(int64_t threads) { threads_.store(threads, std::memory_order_relaxed); }  // each of them says the same

    int64_t threads() const { return threads_.load(std::memory_order_relaxed); }

    void wait() {
        const int64_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads()) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
            if (spins < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

  private:
    static constexpr int SPINS = 1000;
    std::atomic<int64_t> threads_{1};
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> phase_{0};
};

struct Part {
    int64_t begin, end;
};

// The share of `count` things, in units of `unit`, that thread `at` of `threads` does.
inline Part part_of(int64_t count, int64_t unit, int64_t at, int64_t threads) {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t begin = units * at / threads * unit, end = units * (at + 1) / threads * unit;
    return {begin, end < count ? end : count};
}

// y[r][o] = x[r] . w[o] for R rows and O outputs: O * R sums in registers while the inputs pass by.
template <typename W, int O, int R>
inline void product_tile(const W* w, int64_t inputs, const float* x, float* y, int64_t y_row, const float* bias, bool add) {
    constexpr int WIDE = O * R > 8 ? 16 : O * R > 4 ? 8 : O * R > 2 ? 4 : O * R;  // a power of two
    Lanes sums[WIDE] = {};
    const int64_t whole = inputs / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        Lanes weights[O];
        for (int o = 0; o < O; ++o) {
            weights[o] = load(w + o * inputs + k);
            __builtin_prefetch(w + (O + o) * inputs + k);  // the next tile's: rows are too short for the hardware to guess
        }
        for (int r = 0; r < R; ++r) {
            Lanes row = load(x + r * inputs + k);
            IN_REGISTER(row);
            for (int o = 0; o < O; ++o) sums[r * O + o] = fused(weights[o], row, sums[r * O + o]);
        }
    }
    if (__builtin_expect(whole < inputs, 0)) {
        for (int r = 0; r < R; ++r) {
            const Lanes row = load_some(x + r * inputs + whole, inputs - whole);
            for (int o = 0; o < O; ++o)
                sums[r * O + o] = fused(load_some(w + o * inputs + whole, inputs - whole), row, sums[r * O + o]);
        }
    }
    const Lanes all = sums_of<WIDE>(sums);
    for (int r = 0; r < R; ++r) {
        float* to = y + r * y_row;
        for (int o = 0; o < O; ++o) to[o] = (add ? to[o] : 0.0f) + (all[r * O + o] + (bias ? bias[o] : 0.0f));
    }
}

// Fewer rows than R.
template <typename W, int O, int R>
inline void product_rest(const W* w, int64_t inputs, const float* x, int64_t n, float* y, int64_t y_row, const float* bias,
                         bool add) {
    if (n == R - 1)
        product_tile<W, O, R - 1>(w, inputs, x, y, y_row, bias, add);
    else if constexpr (R > 2)
        product_rest<W, O, R - 1>(w, inputs, x, n, y, y_row, bias, add);
}

template <typename W, int O, int R>
inline void product_rows(const W* w, int64_t inputs, const float* x, int64_t n, float* y, int64_t y_row, const float* bias,
                         bool add) {
    int64_t r = 0;
    for (; r + R <= n; r += R) product_tile<W, O, R>(w, inputs, x + r * inputs, y + r * y_row, y_row, bias, add);
    product_rest<W, O, R>(w, inputs, x + r * inputs, n - r, y + r * y_row, y_row, bias, add);
}

template <typename W>
void product_slab(const W* weight, int64_t inputs, const float* bias, Part slab, const float* x, int64_t n, float* y,
                  int64_t y_row, bool add) {
    constexpr int O = sizeof(W) < sizeof(float) ? NARROW_OUTS : OUTS, R = sizeof(W) < sizeof(float) ? NARROW_ROWS : ROWS;
    int64_t o = slab.begin;
    for (; o + O <= slab.end; o += O)
        product_rows<W, O, R>(weight + o * inputs, inputs, x, n, y + o, y_row, bias ? bias + o : nullptr, add);
    for (; o < slab.end; ++o)
        product_rows<W, 1, R>(weight + o * inputs, inputs, x, n, y + o, y_row, bias ? bias + o : nullptr, add);
}

// y[:, slab] = x W.T + bias of outputs `slab`, or added to what is there.
void product(const Linear& linear, Part slab, const float* x, int64_t n, float* y, int64_t y_row, bool add = false) {
    if (linear.narrow)
        product_slab((const uint16_t*)linear.weight, linear.inputs, linear.bias, slab, x, n, y, y_row, add);
    else
        product_slab((const float*)linear.weight, linear.inputs, linear.bias, slab, x, n, y, y_row, add);
}

// to = from / rms(from) * weight over `size` channels.
inline void rms_norm(const float* from, const float* weight, int64_t size, float eps, float* to) {
    Lanes squares = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) {
        const Lanes value = load(from + k);
        squares = fused(value, value, squares);
    }
    float total = sum(squares);
    for (; k < size; ++k) total += from[k] * from[k];
    const float scale = 1.0f / std::sqrt(total / size + eps);
    for (k = 0; k < size; ++k) to[k] = from[k] * scale * weight[k];
}

inline void norm_rows(const float* x, const float* weight, int64_t n, int64_t size, float eps, float* to) {
    for (int64_t row = 0; row < n; ++row) rms_norm(x + row * size, weight, size, eps, to + row * size);
}

inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t c = 0; c < half; ++c) {
        const float first = head[c], second = head[half + c];
        head[c] = first * cos[c] - second * sin[c];
        head[half + c] = second * cos[c] + first * sin[c];
    }
}

struct Scratch {  // one pass's buffers, all threads' and then each thread's own
    float *mixed, *attended, *gate, *active, *parts, *tops, *totals;
    float *normed, *scores, *turned;
};

struct Sizes {
    int64_t mixed, attended, active, parts, marks, normed, scores, turned;
};

Sizes sizes_of(const Stack& s, int64_t n, int64_t end) {
    const int64_t stretches = (end + STRETCH - 1) / STRETCH, rows = s.heads * n;
    return {n * (s.heads + 2 * s.groups) * s.head_dim, rows * s.head_dim, n * s.intermediate,
            stretches * rows * s.head_dim, stretches * rows, n * s.hidden, s.heads / s.groups * n * WIDTH,
            s.head_dim * KEYS};
}

int64_t shared_size(const Sizes& z) { return z.mixed + z.attended + 2 * z.active + z.parts + 2 * z.marks; }

int64_t own_size(const Sizes& z) { return z.normed + z.scores + z.turned; }

Scratch layout(const Stack& s, const Pass& p, int64_t thread) {
    const Sizes z = sizes_of(s, p.n, p.start + p.n);
    Scratch b;
    float* at = p.scratch;
    b.mixed = at, at += z.mixed;
    b.attended = at, at += z.attended;
    b.gate = at, at += z.active;
    b.active = at, at += z.active;
    b.parts = at, at += z.parts;
    b.tops = at, at += z.marks;
    b.totals = at, at += z.marks;
    at += thread * own_size(z);
    b.normed = at, at += z.normed;
    b.scores = at, at += z.scores;
    b.turned = at;
    return b;
}

// Swaps blocks of HALF lanes between two vectors: one step of turning a square of LANES vectors.
template <int HALF, int... AT>
inline void swapped(Lanes& a, Lanes& b, std::integer_sequence<int, AT...>) {
    const Lanes low = __builtin_shufflevector(a, b, (AT / HALF % 2 ? LANES + AT - HALF : AT)...);
    b = __builtin_shufflevector(a, b, (AT / HALF % 2 ? LANES + AT : AT + HALF)...);
    a = low;
}

template <int HALF>
inline void turn_square(Lanes* v) {
    for (int at = 0; at < LANES; ++at)
        if (!(at & HALF)) swapped<HALF>(v[at], v[at + HALF], std::make_integer_sequence<int, LANES>{});
    if constexpr (HALF > 1) turn_square<HALF / 2>(v);
}

// turned[c][j] = keys[j][c] for KEYS keys, those beyond `count` as 0. What lies at `soon` is fetched meanwhile: memory
// and arithmetic take turns otherwise.
inline void turn(const float* keys, int64_t count, int64_t d, const float* soon, float* turned) {
    for (int64_t side = 0; side < KEYS; side += LANES) {
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) {
            Lanes square[LANES];
            for (int j = 0; j < LANES; ++j) {
                square[j] = side + j < count ? load(keys + (side + j) * d + c) : Lanes{};
                __builtin_prefetch(soon + (side + j) * d + c);
            }
            turn_square<LANES / 2>(square);
            for (int j = 0; j < LANES; ++j) store(turned + (c + j) * KEYS + side, square[j]);
        }
        for (; c < d; ++c)
            for (int64_t j = side; j < side + LANES; ++j) turned[c * KEYS + j] = j < count ? keys[j * d + c] : 0.0f;
    }
}

// Scores of queries [from, to) against KEYS turned keys: Q at a time, the rest by fewer.
template <int Q, typename Query>
inline void score_tiles(const Query& query, int64_t from, int64_t to, const float* turned, int64_t d, float scale,
                        float* scores) {
    for (; from + Q <= to; from += Q) {
        const float* rows[Q];
        for (int q = 0; q < Q; ++q) rows[q] = query(from + q);
        Lanes sums[Q][2] = {};
        for (int64_t c = 0; c < d; ++c) {
            const Lanes near = load(turned + c * KEYS), far = load(turned + c * KEYS + LANES);
            for (int q = 0; q < Q; ++q) {
                const Lanes channel = filled(rows[q][c]);
                sums[q][0] = fused(channel, near, sums[q][0]);
                sums[q][1] = fused(channel, far, sums[q][1]);
            }
        }
        for (int q = 0; q < Q; ++q) {
            store(scores + (from + q) * WIDTH, sums[q][0] * scale);
            store(scores + (from + q) * WIDTH + LANES, sums[q][1] * scale);
        }
    }
    if constexpr (Q > 1) score_tiles<Q == 3 ? 1 : Q / 2>(query, from, to, turned, d, scale, scores);
}

template <int Q, int D>
inline void mix_tile(const float* shares, const float* values, int64_t count, int64_t d, const float* soon, float* out) {
    Lanes sums[Q][D] = {};
    for (int64_t j = 0; j < count; ++j) {
        Lanes value[D];
        for (int c = 0; c < D; ++c) {
            value[c] = load(values + j * d + c * LANES);
            __builtin_prefetch(soon + j * d + c * LANES);
        }
        for (int q = 0; q < Q; ++q) {
            const Lanes share = filled(shares[q * WIDTH + j]);
            for (int c = 0; c < D; ++c) sums[q][c] = fused(share, value[c], sums[q][c]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < D; ++c) store(out + q * d + c * LANES, sums[q][c]);
}

// out[q] = shares[q] . values over `count` keys for queries [from, to): Q at a time, the rest by fewer; `soon` as above.
template <int Q>
inline void mix(int64_t from, int64_t to, const float* scores, const float* values, int64_t count, int64_t d, const float* soon,
                float* outs) {
    for (; from + Q <= to; from += Q) {
        const float* shares = scores + from * WIDTH;
        float* out = outs + from * d;
        int64_t c = 0;
        for (; c + MIXED * LANES <= d; c += MIXED * LANES) mix_tile<Q, MIXED>(shares, values + c, count, d, soon + c, out + c);
        for (; c + LANES <= d; c += LANES) mix_tile<Q, 1>(shares, values + c, count, d, soon + c, out + c);
        if (c == d) continue;
        Lanes sums[Q] = {};
        for (int64_t j = 0; j < count; ++j) {
            const Lanes value = load_some(values + j * d + c, d - c);
            for (int q = 0; q < Q; ++q) sums[q] = fused(filled(shares[q * WIDTH + j]), value, sums[q]);
        }
        for (int q = 0; q < Q; ++q) memcpy(out + q * d + c, &sums[q], (d - c) * sizeof(float));
    }
    if constexpr (Q > 1) mix<Q == 3 ? 1 : Q / 2>(from, to, scores, values, count, d, soon, outs);
}

// What all queries of key/value head `group` make of keys [first, last): unnormalised sums of values, the highest score
// and the sum of weights, each for [n, r] queries, at their place in `parts`, `tops` and `totals` of this stretch.
void attend_stretch(const Stack& s, const Layer& layer, const Pass& p, const Scratch& b, const float* keys,
                    const float* values, int64_t group, int64_t stretch) {
    const int64_t d = s.head_dim, ratio = s.heads / s.groups, row_step = (s.heads + 2 * s.groups) * d;
    const int64_t border = stretch * STRETCH, beyond = border + STRETCH;
    int64_t low = p.n, high = 0;  // rows of the pass at positions of this stretch, and in a tree some others
    bool chain = true;
    for (int64_t m = 0; m < p.n; ++m) {
        const int64_t at = p.start + p.depth[m];
        chain = chain && p.depth[m] == m;
        if (at >= border && at < beyond) low = m < low ? m : low, high = m + 1;
    }
    const int64_t first = border < p.start ? border : p.start + low;
    const int64_t last = high ? p.start + high : beyond < p.start ? beyond : p.start, count = last - first;
    const int64_t queries = ratio * p.n;
    const int64_t* bits = p.bits + layer.sight * p.n;
    const float scale = 1.0f / std::sqrt((float)d), nothing = -std::numeric_limits<float>::infinity();
    const auto query = [&](int64_t q) {  // q = i * ratio + head within the group
        return b.mixed + q / ratio * row_step + (group * ratio + q % ratio) * d;
    };
    const int64_t slot = (stretch * s.groups + group) * queries;
    if (count <= 0 || (layer.window && last <= p.start - layer.window + 1)) {  // out of everybody's sight
        for (int64_t q = 0; q < queries; ++q) b.tops[slot + q] = nothing;
        return;
    }
    for (int64_t tile = 0; tile < count; tile += KEYS) {
        turn(keys + (first + tile) * d, count - tile, d, values + (first + tile) * d, b.turned);
        score_tiles<QUERIES>(query, 0, queries, b.turned, d, scale, b.scores + tile);
    }
    for (int64_t q = 0; q < queries; ++q) {
        const int64_t row = q / ratio;
        float* scores = b.scores + q * WIDTH;
        int64_t hidden = 0;  // keys of the context too far back
        if (layer.window) {
            hidden = p.start + p.depth[row] - layer.window + 1 - first;
            hidden = hidden < 0 ? 0 : hidden;
            const int64_t context = p.start - first < count ? p.start - first : count;
            hidden = hidden < context ? hidden : context;
        }
        for (int64_t j = 0; j < hidden; ++j) scores[j] = nothing;
        const int64_t own = p.start > first ? p.start - first : 0;  // the first key of the pass itself
        for (int64_t j = own; j < count; ++j) {
            const int64_t m = first + j - p.start, at = p.start + p.depth[m];
            if (!((uint64_t)bits[row] >> m & 1) || at < border || at >= beyond) scores[j] = nothing;
        }
        for (int64_t j = count; j % LANES; ++j) scores[j] = nothing;
        const float highest = largest(scores, count);
        const float level = highest == nothing ? 0.0f : highest;
        Lanes total = {};
        for (int64_t j = 0; j < count; j += LANES) {
            const Lanes share = exponential(load(scores + j) - level);
            store(scores + j, share);
            if (chain || j + LANES <= own) {
                total += share;
                continue;
            }
            for (int64_t k = j; k < j + LANES && k < count; ++k)  // a key's lane is that of its position
                total[(k < own ? k : p.start + p.depth[first + k - p.start]) % LANES] += scores[k];
        }
        b.tops[slot + q] = highest;
        b.totals[slot + q] = sum(total);
    }
    mix<6>(0, queries, b.scores, values + first * d, count, d, keys + last * d, b.parts + slot * d);
}

// attended[row, head] = the stretches' sums, weighted by how high their scores are.
void merge_stretches(const Stack& s, const Pass& p, const Scratch& b, int64_t stretches, int64_t row, int64_t head) {
    const int64_t d = s.head_dim, ratio = s.heads / s.groups, step = s.groups * ratio * p.n;
    const int64_t place = head / ratio * ratio * p.n + row * ratio + head % ratio;
    float highest = b.tops[place], total = 0.0f;
    for (int64_t at = 1; at < stretches; ++at) {
        const float top = b.tops[at * step + place];
        highest = top > highest ? top : highest;
    }
    float* to = b.attended + (row * s.heads + head) * d;
    for (int64_t c = 0; c < d; ++c) to[c] = 0.0f;
    for (int64_t at = 0; at < stretches; ++at) {
        if (b.tops[at * step + place] == -std::numeric_limits<float>::infinity()) continue;  // nothing of it was seen
        const float weight = exponential_of(b.tops[at * step + place] - highest);
        const float* from = b.parts + (at * step + place) * d;
        total += weight * b.totals[at * step + place];
        for (int64_t c = 0; c < d; ++c) to[c] += weight * from[c];
    }
    for (int64_t c = 0; c < d; ++c) to[c] /= total;
}

void run_layers(const Stack& s, const Pass& p, int64_t thread, Team& team) {
    const int64_t threads = team.threads();
    const Scratch b = layout(s, p, thread);
    const int64_t d = s.head_dim, mixed_row = (s.heads + 2 * s.groups) * d, end = p.start + p.n;
    const int64_t stretches = (end + STRETCH - 1) / STRETCH, side = s.groups * p.capacity * d;
    for (int64_t index = 0; index < s.count; ++index) {
        const Layer& layer = s.layers[index];
        float *keys = p.cache + 2 * index * side, *values = keys + side;
        norm_rows(p.x, layer.input_norm, p.n, s.hidden, s.eps, b.normed);
        product(layer.qkv, part_of(mixed_row, OUTS, thread, threads), b.normed, p.n, b.mixed, mixed_row);
        team.wait();
        const int64_t per_row = s.heads + 2 * s.groups;
        const Part heads = part_of(p.n * per_row, 1, thread, threads);
        for (int64_t at = heads.begin; at < heads.end; ++at) {
            const int64_t row = at / per_row, head = at % per_row;
            float* channels = b.mixed + row * mixed_row + head * d;
            if (head < s.heads + s.groups) {
                const float* weight = head < s.heads ? layer.q_norm : layer.k_norm;
                if (weight) rms_norm(channels, weight, d, s.eps, channels);
                rotate(channels, p.cos + row * s.rotated / 2, p.sin + row * s.rotated / 2, s.rotated / 2);
            }
            if (head < s.heads) continue;
            const int64_t group = (head - s.heads) % s.groups;
            float* to = (head < s.heads + s.groups ? keys : values) + (group * p.capacity + p.start + row) * d;
            memcpy(to, channels, d * sizeof(float));
        }
        team.wait();
        for (int64_t unit = 0; unit < s.groups * stretches; ++unit) {
            const int64_t group = unit / stretches, stretch = unit % stretches;
            if ((group * end + stretch * STRETCH) * threads / (s.groups * end) != thread) continue;  // as many keys each
            attend_stretch(s, layer, p, b, keys + group * p.capacity * d, values + group * p.capacity * d, group, stretch);
        }
        team.wait();
        const Part merged = part_of(p.n * s.heads, 1, thread, threads);
        for (int64_t at = merged.begin; at < merged.end; ++at)
            merge_stretches(s, p, b, stretches, at / s.heads, at % s.heads);
        team.wait();
        const Part hidden = part_of(s.hidden, OUTS, thread, threads);
        product(layer.output, hidden, b.attended, p.n, p.x, s.hidden, true);
        team.wait();
        norm_rows(p.x, layer.post_norm, p.n, s.hidden, s.eps, b.normed);
        const Part slab = part_of(s.intermediate, OUTS, thread, threads);
        product(layer.gate, slab, b.normed, p.n, b.gate, s.intermediate);
        product(layer.up, slab, b.normed, p.n, b.active, s.intermediate);
        for (int64_t row = 0; row < p.n; ++row) {
            const float* gate = b.gate + row * s.intermediate;
            float* up = b.active + row * s.intermediate;
            int64_t k = slab.begin;
            for (; k + LANES <= slab.end; k += LANES) {
                const Lanes g = load(gate + k), size = g < 0 ? g : -g, small = exponential(size);
                const Lanes sigmoid = (g < 0 ? small : filled(1.0f)) / (1.0f + small);
                store(up + k, g * sigmoid * load(up + k));
            }
            for (; k < slab.end; ++k) {
                const float small = exponential_of(-std::fabs(gate[k]));
                up[k] *= gate[k] * ((gate[k] < 0 ? small : 1.0f) / (1.0f + small));
            }
        }
        team.wait();
        product(layer.down, hidden, b.active, p.n, p.x, s.hidden, true);
        if (float* state = p.states[index])
            for (int64_t row = 0; row < p.n; ++row)
                memcpy(state + row * s.hidden + hidden.begin, p.x + row * s.hidden + hidden.begin,
                       (hidden.end - hidden.begin) * sizeof(float));
        team.wait();
    }
}

void run_context(const Context& c, const Pass& p, int64_t thread, Team& team) {
    const int64_t threads = team.threads();
    const int64_t hidden = c.fc.outputs, outputs = c.kv.outputs, d = c.head_dim, per_row = outputs / d;
    float *projected = p.scratch, *both = projected + p.n * hidden, *normed = both + p.n * (outputs + thread * hidden);
    product(c.fc, part_of(hidden, OUTS, thread, threads), p.x, p.n, projected, hidden);
        team.wait();
    norm_rows(projected, c.norm, p.n, hidden, c.eps, normed);
    product(c.kv, part_of(outputs, OUTS, thread, threads), normed, p.n, both, outputs);
        team.wait();
    const Part heads = part_of(p.n * per_row, 1, thread, threads);
    for (int64_t at = heads.begin; at < heads.end; ++at) {
        const int64_t row = at / per_row, head = at % per_row;
        const int64_t layer = head / (2 * c.groups), value = head / c.groups % 2;
        float* channels = both + row * outputs + head * d;
        if (!value) {
            rms_norm(channels, c.k_norms[layer], d, c.eps, channels);
            rotate(channels, p.cos + row * c.rotated / 2, p.sin + row * c.rotated / 2, c.rotated / 2);
        }
        memcpy(p.cache + (head * p.capacity + p.start + row) * d, channels, d * sizeof(float));
    }
}

// A narrow score is off by at most error * |x|, so whatever reaches the best one minus twice that may be the best.
void run_choice(const Head& h, const float* x, int64_t n, float* scratch, int64_t* chosen, int64_t thread, Team& team) {
    const int64_t threads = team.threads();
    const int64_t vocabulary = h.exact.outputs, hidden = h.exact.inputs;
    float *scores = scratch, *tops = scores + n * vocabulary, *bests = tops + threads * n;
    float* normed = bests + threads * n + thread * n * hidden;
    int64_t* places = chosen + n + thread * n;
    const Part slab = part_of(vocabulary, OUTS, thread, threads);
    norm_rows(x, h.norm, n, hidden, h.eps, normed);
    product(h.narrow, slab, normed, n, scores, vocabulary);
    for (int64_t row = 0; row < n; ++row) {
        tops[thread * n + row] = largest(scores + row * vocabulary + slab.begin, slab.end - slab.begin);
    }
        team.wait();
    for (int64_t row = 0; row < n; ++row) {
        const float *from = scores + row * vocabulary, *input = normed + row * hidden;
        float top = tops[row], length = 0.0f, best = -std::numeric_limits<float>::infinity();
        for (int64_t at = 1; at < threads; ++at) top = tops[at * n + row] > top ? tops[at * n + row] : top;
        for (int64_t k = 0; k < hidden; ++k) length += input[k] * input[k];
        const float least = top - 2.0f * h.error * std::sqrt(length);
        int64_t place = -1;
        for (int64_t begin = slab.begin; begin < slab.end; begin += NEAR) {
            const int64_t end = begin + NEAR < slab.end ? begin + NEAR : slab.end;
            if (!(largest(from + begin, end - begin) >= least)) continue;
            for (int64_t o = begin; o < end; ++o) {
                if (!(from[o] >= least)) continue;
                float score;
                product_tile<float, 1, 1>((const float*)h.exact.weight + o * hidden, hidden, input, &score, 1, nullptr, false);
                if (score > best) best = score, place = o;
            }
        }
        bests[thread * n + row] = best;
        places[row] = place;
    }
        team.wait();
    if (thread) return;
    for (int64_t row = 0; row < n; ++row) {
        int64_t best = 0;
        for (int64_t at = 1; at < threads; ++at)
            if (bests[at * n + row] > bests[best * n + row]) best = at;
        const int64_t place = chosen[n + best * n + row];
        chosen[row] = place < 0 ? 0 : place;  // scores that are no numbers choose the first token
    }
}

// `work(thread, team)` on as many threads as there are of those asked for; on one where the `multiplications` between two
// meetings take less time than to wake a second.
template <typename Work>
void in_parallel(int64_t threads, int64_t multiplications, const Work& work) {
    Team team;
#pragma omp parallel num_threads(multiplications < ALONE ? 1 : threads)
    {
        team.has(omp_get_num_threads());
        work(omp_get_thread_num(), team);
        team.wait();  // OpenMP's own wait, at the end of the region, finds everybody there
    }
}

}  // namespace

extern "C" {

// The sizes that the caller's structures must have.
int64_t size_of_linear() { return sizeof(Linear); }
int64_t size_of_layer() { return sizeof(Layer); }
int64_t size_of_stack() { return sizeof(Stack); }
int64_t size_of_context() { return sizeof(Context); }
int64_t size_of_head() { return sizeof(Head); }
int64_t size_of_pass() { return sizeof(Pass); }

// Floats that `context_keys_values` needs as scratch.
int64_t context_scratch_floats(const Context* context, int64_t n, int64_t threads) {
    return n * (context->fc.outputs * (1 + threads) + context->kv.outputs);
}

// Features x [n, F] become keys and values in the cache of all draft layers at start to start + n - 1.
void context_keys_values(const Context* context, const Pass* pass) {
    const int64_t products = pass->n * context->fc.outputs * (context->fc.inputs + context->kv.outputs);
    in_parallel(pass->threads, products, [&](int64_t thread, Team& team) { run_context(*context, *pass, thread, team); });
}

// Floats that `decoder_layers` needs as scratch.
int64_t scratch_floats(const Stack* stack, int64_t n, int64_t end, int64_t threads) {
    const Sizes z = sizes_of(*stack, n, end);
    return shared_size(z) + threads * own_size(z);
}

// x [n, H] through all layers; the new keys and values are left in the cache at start to start + n - 1.
void decoder_layers(const Stack* stack, const Pass* pass) {
    const int64_t outputs = (stack->heads + 2 * stack->groups) * stack->head_dim + 3 * stack->intermediate;
    in_parallel(pass->threads, pass->n * stack->hidden * outputs, [&](int64_t thread, Team& team) { run_layers(*stack, *pass, thread, team); });
}

// Floats that `choose` needs as scratch.
int64_t choice_scratch_floats(const Head* head, int64_t n, int64_t threads) {
    return n * (head->exact.outputs + threads * (2 + head->exact.inputs));
}

// The likeliest token of each state x [n, H]; `chosen` holds n * (1 + threads) places, of which the first n are the answer.
void choose(const Head* head, const float* x, int64_t n, float* scratch, int64_t* chosen, int64_t threads) {
    const int64_t products = n * head->exact.outputs * head->exact.inputs;
    in_parallel(threads, products, [&](int64_t thread, Team& team) { run_choice(*head, x, n, scratch, chosen, thread, team); });
}

// y [n, outputs] = x [n, inputs] W.T + bias
void few_rows_product(const Linear* linear, const float* x, int64_t n, float* y, int64_t threads) {
    in_parallel(threads, n * linear->outputs * linear->inputs, [&](int64_t thread, Team& team) {
        product(*linear, part_of(linear->outputs, OUTS, thread, team.threads()), x, n, y, linear->outputs);
    });
}
}
