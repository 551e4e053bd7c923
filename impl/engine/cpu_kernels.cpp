// Batch-invariant CPU kernels for decoding a few tokens at a time (AVX512 with BF16 and VNNI, and AMX
// where the compiler is told that the CPU has it).
// Plain C ABI; `cpu_kernel_library.py` compiles it, `cpu_kernels.py` wraps it.
//
// The floor. Decoding reads every weight once per pass, so a pass cannot be faster than weight bytes
// over read bandwidth. One core reads a 64-byte vector in about 6 cycles and starts one 512-bit dot
// product per cycle: up to about 6 rows the arithmetic hides behind the memory, provided that the
// weights stream linearly (the hardware then prefetches better than we could), each is loaded once for
// all rows, and nothing else is in the loop.
//
// The micro-kernel. Every product here (linear layers, q k^T, p v) is one function, `tile`:
//
//     acc[rows][32] += x[rows][4 * steps bytes] * panel[steps][2][16][4 bytes]
//
// A 4-byte group is 2 bfloat16 (vdpbf16ps) or 4 int8 (vpdpbusd) neighbours along k. A panel holds 32
// columns; each step reads two vectors of 16 columns and broadcasts one group of every row:
//
//     panel: step 0 | columns 0-15, k 0..1 | columns 16-31, k 0..1 |   <- 128 bytes
//            step 1 | columns 0-15, k 2..3 | columns 16-31, k 2..3 |
//
// Panels lie one behind the other, so a weight matrix is a single linear stream. Weights of 4 bits have
// panels of their own and are unpacked on the way (`tile_int4`).
//
// With AMX, 16 steps of a panel are two of its tiles as they lie there, and so are 16 steps of up to 16
// rows (`amx_tile`): a weight then serves 32 rows for the price of loading it, where a vector's dot
// products cost more than memory beyond 6 rows. Integers add up to the same bits. Bfloat16 products are
// added in another order, so AMX does them for every number of rows, or for none.
//
// Batch invariance. A result is one chain of additions along k in a fixed order, whatever the number
// of rows, the tile it falls into or the thread that runs it; what follows a chain (`finish`, the
// softmax) is compiled once and handles one row at a time. Attention walks blocks of 32 cells at fixed
// absolute positions, and a masked cell adds an exact zero. -ffp-contract=off keeps the compiler from
// fusing differently in different places. So a row's bits depend on that row only.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;             // columns of one vector
constexpr int kColumns = 2 * kLanes;   // columns of one panel
constexpr int kStepBytes = 128;        // bytes of one step of a panel
constexpr int kUnroll = 4;             // steps of `tile` in one go
constexpr int kAmxSteps = 16;          // steps of one AMX tile; `steps` of a linear layer is a multiple
constexpr int kVectorRows = 12;        // rows of one `tile`: 2 * 12 accumulators of the 32 registers
constexpr int kMaxRows = 32;           // rows of one `amx_tile`: 4 accumulators of the 8 AMX tiles
constexpr int kGroup = 32;             // inputs that share an int4 scale; a step has two groups
constexpr int kInt4BlockBytes = 640;   // 16 columns of an int4 step: 8 vectors of levels and 2 more
constexpr int kInt4RowBytes = 68;      // a row's share of an int4 step: 64 int8, 2 bfloat16
constexpr int kPrefetchBytes = 4096;   // how far int4 reads ahead, more than the hardware does
constexpr int kCells = kColumns;       // cells of one block of attention
constexpr int kQueryRows = 96;         // query rows that share one packing of a block of cells

// ---------------------------------------------------------------------------- vectors and scratch

__m512 load_bf16(const bf16* p, __mmask16 mask = 0xffff) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void store_bf16(bf16* p, __m512 v, __mmask16 mask = 0xffff) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}

__m512 round_bf16(__m512 v) {
  __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

__mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// e^x to about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2. Exactly 1 at 0; NaN stays NaN.
__m512 exp(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(100.f), _mm512_max_ps(_mm512_set1_ps(-104.f), x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// Memory of one thread that is kept from call to call; contents are undefined after `get`.
struct Scratch {
  void* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  template <class T>
  T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size) {
      std::free(data);
      data = std::aligned_alloc(64, bytes);
      size = bytes;
    }
    return static_cast<T*>(data);
  }
};

// Transposes 16 x 16 groups of 4 bytes: lane i of `v[j]` becomes lane j of `v[i]`.
void transpose(__m512i v[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j)
    for (int half = 0; half < 16; half += 8) {
      t[half + j] = _mm512_shuffle_i32x4(v[half + j], v[half + j + 4], 0x88);
      t[half + j + 4] = _mm512_shuffle_i32x4(v[half + j], v[half + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// Up to 16 rows of bytes that lie `stride` apart.
struct Block {
  const char* rows;
  int64_t count, stride, row_bytes;
};

// Bytes [offset, offset + 64) of 16 rows, transposed: lane i of `v[j]` is 4-byte group j of row i.
// Rows and bytes that are missing are 0.
void load_transposed(const Block& b, int64_t offset, __m512i v[16]) {
  int64_t bytes = b.row_bytes - offset;
  __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << std::max<int64_t>(bytes, 0)) - 1;
  for (int64_t i = 0; i < kLanes; ++i)
    v[i] = i < b.count ? _mm512_maskz_loadu_epi8(mask, b.rows + i * b.stride + offset)
                       : _mm512_setzero_si512();
  transpose(v);
}

// Packs a block into one half of the steps of a panel.
void pack_block(const Block& b, int64_t steps, char* panel) {
  for (int64_t step = 0; step < steps; step += kLanes) {
    __m512i v[16];
    load_transposed(b, 4 * step, v);
    for (int64_t i = 0; i < std::min<int64_t>(16, steps - step); ++i)
      _mm512_store_si512(panel + (step + i) * kStepBytes, v[i]);
  }
}

// --------------------------------------------------------------------------------- the micro-kernel

struct Bf16 {
  using Acc = __m512;
  static Acc dot(Acc acc, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
  }
};

struct Int8 {  // x unsigned, w signed
  using Acc = __m512i;
  static Acc dot(Acc acc, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(acc, x, w); }
};

// out[M][32] = x[M][steps groups] * panel (+ out), for M rows known at compile time (see the top).
// `x_stride` and `out_stride` are in bytes. `steps` is a multiple of kUnroll.
template <class T, int M>
void tile(const char* x, int64_t x_stride, const char* panel, int64_t steps, char* out,
          int64_t out_stride, bool accumulate) {
  using Acc = typename T::Acc;
  Acc acc[M][2];
  const char* base[(M + 2) / 3];  // a pointer for every third row: M of them would not fit
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    acc[m][0] = accumulate ? ((const Acc*)(out + m * out_stride))[0] : Acc{};
    acc[m][1] = accumulate ? ((const Acc*)(out + m * out_stride))[1] : Acc{};
  }
  for (int i = 0; i < (M + 2) / 3; ++i) base[i] = x + 3 * i * x_stride;
  for (int64_t step = 0; step < steps; step += kUnroll) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u, panel += kStepBytes) {
      __m512i w0 = _mm512_load_si512(panel), w1 = _mm512_load_si512(panel + 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        int group;
        std::memcpy(&group, base[m / 3] + (m % 3) * x_stride + 4 * u, 4);
        __m512i xs = _mm512_set1_epi32(group);
        acc[m][0] = T::dot(acc[m][0], xs, w0);
        acc[m][1] = T::dot(acc[m][1], xs, w1);
      }
    }
    for (auto& b : base) b += 4 * kUnroll;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    ((Acc*)(out + m * out_stride))[0] = acc[m][0];
    ((Acc*)(out + m * out_stride))[1] = acc[m][1];
  }
}

// As `tile` for int4, one block of 16 columns after the other (layout: `pack_int4_block`). A weight is
// scale * level + minimum, so that a group adds scale * sum(level x) + minimum * sum(x). The first sum
// is of integers, with the levels 0..15 as the unsigned factor; the second comes with the row
// (`pack_groups`), and both groups of a step take part in one bfloat16 product.
template <int M>
void tile_int4(const char* x, int64_t x_stride, const char* panel, int64_t steps, char* out,
               int64_t out_stride, bool accumulate) {
  __m512i nibble = _mm512_set1_epi8(15);
  for (int b = 0; b < 2; ++b, out += 64) {
    __m512 acc[M];
    const char* base[(M + 2) / 3];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      acc[m] = accumulate ? *(const __m512*)(out + m * out_stride) : _mm512_setzero_ps();
    for (int i = 0; i < (M + 2) / 3; ++i) base[i] = x + 3 * i * x_stride;
    auto word = [&](int m, int offset) {
      int value;
      std::memcpy(&value, base[m / 3] + (m % 3) * x_stride + offset, 4);
      return _mm512_set1_epi32(value);
    };
    for (int64_t step = 0; step < steps; ++step, panel += kInt4BlockBytes) {
      for (int64_t i = 0; i < kInt4BlockBytes; i += 64)
        _mm_prefetch(panel + kPrefetchBytes + i, _MM_HINT_T0);
      __m512i minimum = _mm512_load_si512(panel + 9 * 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m] = Bf16::dot(acc[m], word(m, 2 * kGroup), minimum);
#pragma GCC unroll 2
      for (int g = 0; g < 2; ++g) {
        __m512i sum[M] = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          __m512i both = _mm512_load_si512(panel + 64 * (4 * g + j));
          __m512i low = _mm512_and_si512(both, nibble);
          __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) {
            sum[m] = _mm512_dpbusd_epi32(sum[m], low, word(m, kGroup * g + 8 * j));
            sum[m] = _mm512_dpbusd_epi32(sum[m], high, word(m, kGroup * g + 8 * j + 4));
          }
        }
        const char* scales = panel + 8 * 64 + 2 * kLanes * g;
        __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)scales));
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
          acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m]), scale, acc[m]);
      }
      for (auto& p : base) p += kInt4RowBytes;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) *(__m512*)(out + m * out_stride) = acc[m];
  }
}

// ---------------------------------------------------------------------------------------------- AMX

#ifdef __AMX_INT8__

// Accumulators 0..3 ([row half][column half]) += rows 4 and 5 * weights 6 and 7: registers by number.
struct Bf16Amx {
  static void top() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  static void bottom() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

struct Int8Amx {  // rows unsigned, weights signed
  static void top() {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
  }
  static void bottom() {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
};

// What `memory` points to is in memory: compilers do not see all that AMX instructions read.
void written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

thread_local int amx_rows = 0;  // that this thread's tiles are configured for

void configure_amx(int rows) {
  if (rows == amx_rows) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  int half[2] = {std::min(rows, 16), std::max(rows - 16, 0)};
  const int heights[8] = {half[0], half[0], half[1], half[1], half[0], half[1], 16, 16};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = heights[i];
    config.row_bytes[i] = heights[i] ? 64 : 0;
  }
  written(&config);
  _tile_loadconfig(&config);
  amx_rows = rows;
}

// As `tile`; `steps` is a multiple of kAmxSteps. Leaves the thread's tiles configured (`AmxScope`).
template <class T, int M>
void amx_tile(const char* x, int64_t x_stride, const char* panel, int64_t steps, char* out,
              int64_t out_stride, bool accumulate) {
  constexpr bool both = M > 16;
  char* below = out + 16 * out_stride;
  written(x);
  configure_amx(M);
  if (accumulate) {
    _tile_loadd(0, out, out_stride);
    _tile_loadd(1, out + 64, out_stride);
    if constexpr (both) {
      _tile_loadd(2, below, out_stride);
      _tile_loadd(3, below + 64, out_stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (both) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t step = 0; step < steps; step += kAmxSteps) {
    _tile_loadd(6, panel, kStepBytes);
    _tile_loadd(7, panel + 64, kStepBytes);
    _tile_loadd(4, x, x_stride);
    T::top();
    if constexpr (both) {
      _tile_loadd(5, x + 16 * x_stride, x_stride);
      T::bottom();
    }
    panel += kAmxSteps * kStepBytes;
    x += 4 * kAmxSteps;
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 64, out_stride);
  if constexpr (both) {
    _tile_stored(2, below, out_stride);
    _tile_stored(3, below + 64, out_stride);
  }
}

// Gives the thread's tiles back at the end: others use them too, and live ones slow task switches.
struct AmxScope {
  ~AmxScope() {
    if (amx_rows) _tile_release();
    amx_rows = 0;
  }
};

#else

struct AmxScope {
  ~AmxScope() {}
};

#endif

using Tile = void (*)(const char*, int64_t, const char*, int64_t, char*, int64_t, bool);

template <size_t... I>
constexpr std::array<Tile, sizeof...(I)> tiles_int4(std::index_sequence<I...>) {
  return {tile_int4<I + 1>...};
}

template <class T, size_t... I>
constexpr std::array<Tile, sizeof...(I)> tiles(std::index_sequence<I...>) {
  return {tile<T, I + 1>...};
}

#ifdef __AMX_INT8__
template <class T, size_t... I>
constexpr std::array<Tile, sizeof...(I)> amx_tiles(std::index_sequence<I...>) {
  return {amx_tile<T, I + 1>...};
}
constexpr auto kBf16Tiles = amx_tiles<Bf16Amx>(std::make_index_sequence<kMaxRows>());
constexpr auto kInt8Tiles = amx_tiles<Int8Amx>(std::make_index_sequence<kMaxRows>());
#else
constexpr auto kBf16Tiles = tiles<Bf16>(std::make_index_sequence<kVectorRows>());
constexpr auto kInt8Tiles = tiles<Int8>(std::make_index_sequence<kVectorRows>());
#endif
constexpr auto kInt4Tiles = tiles_int4(std::make_index_sequence<kVectorRows>());

// The micro-kernels of one format for 1, 2, ... rows.
struct Kernels {
  const Tile* tiles;
  int64_t most_rows;

  template <size_t N>
  Kernels(const std::array<Tile, N>& all) : tiles(all.data()), most_rows(N) {}

  // Calls body(kernel, first row, rows) for tiles of nearly equal size.
  template <class F>
  void for_tiles(int64_t rows, F body) const {
    int64_t count = (rows + most_rows - 1) / most_rows;
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = rows * i / count, size = rows * (i + 1) / count - begin;
      body(tiles[size - 1], begin, size);
    }
  }
};

// ------------------------------------------------------------------------------------------ threads

// Workers that spin for a moment after each job and then sleep. One job at a time; never destroyed.
class Pool {
 public:
  template <class F>
  void run(int threads, F& body) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (; workers_ < threads - 1; ++workers_) {
      std::thread([this, index = workers_ + 1, seen = job_.load()] { work(index, seen); }).detach();
    }
    call_ = [](void* f, int i) { (*static_cast<F*>(f))(i); };
    body_ = &body;
    threads_ = threads;
    pending_ = workers_;
    ++job_;
    job_.notify_all();
    body(0);
    for (int spin = 0; pending_.load(std::memory_order_acquire); ++spin)
      spin < kSpins ? _mm_pause() : std::this_thread::yield();
  }

 private:
  void work(int index, uint32_t seen) {
    for (;; ++seen) {
      for (int spin = 0; spin < kSpins && job_.load(std::memory_order_acquire) == seen; ++spin)
        _mm_pause();
      job_.wait(seen);
      if (index < threads_) call_(body_, index);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr int kSpins = 20000;  // about 0.3 ms

  std::mutex mutex_;
  std::atomic<uint32_t> job_{0};
  std::atomic<int> pending_{0};
  int workers_ = 0, threads_ = 1;
  void (*call_)(void*, int) = nullptr;
  void* body_ = nullptr;
};

// Splits [0, count) into one contiguous range per thread: body(begin, end). One thread: a plain call.
template <class F>
void parallel(int64_t count, int64_t threads, F body) {
  threads = std::min(threads, count);
  if (threads <= 1) return body(0, count);
  static Pool& pool = *new Pool;
  auto part = [&](int i) { body(count * i / threads, count * (i + 1) / threads); };
  pool.run(threads, part);
}

// ------------------------------------------------------------------------------------------- layers

// As Hugging Face's Llama: float32 inside, rounded to bfloat16 before the weight and after it.
void rms_norm_row(const bf16* x, int64_t n, const bf16* weight, float eps, bf16* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    __m512 v = load_bf16(x + i, first(n - i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  __m512 inverse = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(sum) / n + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    __mmask16 mask = first(n - i);
    __m512 v = round_bf16(_mm512_mul_ps(load_bf16(x + i, mask), inverse));
    store_bf16(out + i, _mm512_mul_ps(v, load_bf16(weight + i, mask)), mask);
  }
}

// out = round(x / scale) with scale = max |x| / 127, which is returned; `flip` of 0x80 adds 128. The
// maximum is taken over the bits without sign, so that a NaN or an infinity reaches the scale and then
// the result. Writes whole groups of 16 with 0 (+ 128) behind n.
float quantize_row(const bf16* x, int64_t n, char flip, char* out) {
  __m512i bits = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kLanes) {
    __m512i v = _mm512_castps_si512(load_bf16(x + i, first(n - i)));
    bits = _mm512_max_epu32(bits, _mm512_and_epi32(v, _mm512_set1_epi32(0x7fffffff)));
  }
  uint32_t largest = _mm512_reduce_max_epu32(bits);
  float max;
  std::memcpy(&max, &largest, 4);
  __m512 inverse = _mm512_set1_ps(max > 0 ? 127.f / max : 0.f);
  for (int64_t i = 0; i < n; i += kLanes) {
    __mmask16 mask = first(n - i);
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load_bf16(x + i, mask), inverse));
    __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(q), _mm_set1_epi8(flip));
    _mm_storeu_si128((__m128i*)(out + i), bytes);
  }
  return max / 127.f;
}

// Lays out a quantised row of `steps` times 64 values for `tile_int4`: the values of two groups, then
// the groups' sums as bfloat16.
void pack_groups(const char* values, int64_t steps, char* row) {
  for (int64_t step = 0; step < steps; ++step, row += kInt4RowBytes) {
    __m512i v = _mm512_loadu_si512(values + 2 * kGroup * step);
    __m512i quads = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), v);
    float first_sum = _mm512_mask_reduce_add_epi32(0x00ff, quads);
    float second_sum = _mm512_mask_reduce_add_epi32(0xff00, quads);
    _mm512_storeu_si512(row, v);
    __m128bh sums = _mm_cvtneps_pbh(_mm_setr_ps(first_sum, second_sum, 0.f, 0.f));
    std::memcpy(row + 2 * kGroup, &sums, 4);
  }
}

}  // namespace

extern "C" {

enum Format : int64_t { kBf16, kInt8, kInt4 };

// A packed weight matrix; mirrored field by field in cpu_kernels.py. Behind the steps of a panel lie
// what finishes its 32 columns, in the same stream because anything else would miss the cache:
//
//     int32 offset[32] | float scale[32] | float bias[32]       (int8: the first two; bias: the third)
//
// scale is the value of one unit of the weight, offset 128 * the sum of the column's weights. With
// `swiglu` a panel holds 16 gate columns, then the 16 up columns that belong to them.
struct Linear {
  char* weight;  // panels, 64-byte aligned
  int64_t in_features, out_features, steps, panels, panel_bytes;
  int64_t format, bias, swiglu, float_out;
};

}  // extern "C"

namespace {

// One step of a format: inputs it covers, bytes of a row and of a panel, and what `steps` is rounded to.
struct Step {
  int64_t inputs, row_bytes, panel_bytes, multiple;
};

const Step& step_of(const Linear& l) {
  static constexpr Step kSteps[] = {{2, 4, kStepBytes, kAmxSteps},
                                    {4, 4, kStepBytes, kAmxSteps},
                                    {2 * kGroup, kInt4RowBytes, 2 * kInt4BlockBytes, 1}};
  return kSteps[l.format];
}

char* tail_of(const Linear& l, int64_t panel) {
  return l.weight + panel * l.panel_bytes + l.steps * step_of(l).panel_bytes;
}

// From one row of accumulators of one panel to its outputs: scale, bias, SwiGLU, residual, rounding.
void finish(const Linear& l, int64_t panel, const char* acc, float x_scale, const bf16* residual,
            char* out) {
  const char* tail = tail_of(l, panel);
  const char* bias = tail + (l.format == kInt8 ? 2 * kStepBytes : 0);
  __m512 v[2];
  for (int b = 0; b < 2; ++b) {
    v[b] = ((const __m512*)acc)[b];
    if (l.format == kInt4) v[b] = _mm512_mul_ps(v[b], _mm512_set1_ps(x_scale));
    if (l.format == kInt8) {
      __m512i sum = _mm512_sub_epi32(((const __m512i*)acc)[b], ((const __m512i*)tail)[b]);
      __m512 scale = ((const __m512*)(tail + kStepBytes))[b];
      scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
      v[b] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
    }
    if (l.bias) v[b] = _mm512_add_ps(v[b], ((const __m512*)bias)[b]);
  }
  if (l.swiglu) {
    __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), v[0]);
    __m512 silu = _mm512_div_ps(v[0], _mm512_add_ps(_mm512_set1_ps(1.f), exp(minus)));
    v[0] = _mm512_mul_ps(silu, v[1]);
  }
  for (int b = 0; b < (l.swiglu ? 1 : 2); ++b) {
    int64_t column = l.swiglu ? panel * kLanes : panel * kColumns + b * kLanes;
    __mmask16 mask = first(l.out_features - column);
    if (residual) v[b] = _mm512_add_ps(v[b], load_bf16(residual + column, mask));
    if (l.float_out)
      _mm512_mask_storeu_ps((float*)out + column, mask, v[b]);
    else
      store_bf16((bf16*)out + column, v[b], mask);
  }
}

// Rows as a tile reads them: normalised, quantised or padded where the layer asks for it.
struct Activations {
  const char* data;
  int64_t stride;       // bytes
  const float* scale;   // [rows], unless bf16
};

Activations prepare(const Linear& l, const bf16* x, int64_t rows, int64_t stride,
                    const bf16* norm_weight, float eps) {
  thread_local Scratch rows_scratch, scale_scratch, norm_scratch, value_scratch;
  int64_t n = l.in_features, bytes = l.steps * step_of(l).row_bytes;
  if (l.format == kBf16 && !norm_weight && 2 * n == bytes) return {(const char*)x, 2 * stride, nullptr};
  char* data = rows_scratch.get<char>(rows * bytes);
  float* scale = scale_scratch.get<float>(rows);
  bf16* normed = norm_scratch.get<bf16>(n);
  char* values = value_scratch.get<char>(bytes);
  std::memset(values, 0, bytes);
  for (int64_t i = 0; i < rows; ++i) {
    char* row = data + i * bytes;
    const bf16* source = x + i * stride;
    if (norm_weight) {
      rms_norm_row(source, n, norm_weight, eps, l.format == kBf16 ? (bf16*)row : normed);
      source = normed;
    }
    if (l.format == kInt4) {
      scale[i] = quantize_row(source, n, 0, values);
      pack_groups(values, l.steps, row);
      continue;
    }
    if (l.format == kInt8)
      scale[i] = quantize_row(source, n, (char)0x80, row);
    else if (!norm_weight)
      std::memcpy(row, source, 2 * n);
    int64_t used = (l.format == kInt8 ? 1 : 2) * n;
    std::memset(row + used, 0, bytes - used);
  }
  return {data, bytes, scale};
}

// ------------------------------------------------------------------------------------------ packing

// The nearest of the levels 0..15.
__m512 level(__m512 x) {
  x = _mm512_roundscale_ps(x, 0);
  return _mm512_max_ps(_mm512_setzero_ps(), _mm512_min_ps(_mm512_set1_ps(15.f), x));
}

// weight ~ scale * level + minimum; one group of each of 16 rows.
struct Affine {
  __m512 scale, minimum;
};

// The best of several fits of a group. Each spreads the group's range over `range` levels (beyond 15 it
// clips both ends alike), and takes the least-squares line through (level, weight): of all lines, it
// lessens the squared error most, by scale * sum(w q) + minimum * sum(w). Weights that are all equal
// fit no line and are their minimum. Small ranges find the grid of weights that come from 4 bits.
Affine fit(const __m512 w[kGroup]) {
  __m512 low = w[0], high = w[0], sum_w = w[0], n = _mm512_set1_ps(kGroup);
  for (int k = 1; k < kGroup; ++k) {
    low = _mm512_min_ps(low, w[k]);
    high = _mm512_max_ps(high, w[k]);
    sum_w = _mm512_add_ps(sum_w, w[k]);
  }
  Affine best{_mm512_setzero_ps(), low};
  __m512 best_gain = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int range = 9; range <= 17; ++range) {
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(range), _mm512_sub_ps(high, low));
    __m512 clipped = _mm512_set1_ps(std::max(0.f, (range - 15) / 2.f));
    __m512 sum_q = _mm512_setzero_ps(), sum_qq = sum_q, sum_wq = sum_q;
    for (int k = 0; k < kGroup; ++k) {
      __m512 q = level(_mm512_fmsub_ps(_mm512_sub_ps(w[k], low), inverse, clipped));
      sum_q = _mm512_add_ps(sum_q, q);
      sum_qq = _mm512_fmadd_ps(q, q, sum_qq);
      sum_wq = _mm512_fmadd_ps(w[k], q, sum_wq);
    }
    __m512 spread = _mm512_fmsub_ps(n, sum_qq, _mm512_mul_ps(sum_q, sum_q));
    __m512 slope = _mm512_fmsub_ps(n, sum_wq, _mm512_mul_ps(sum_w, sum_q));
    Affine line{_mm512_div_ps(slope, spread), _mm512_setzero_ps()};
    line.minimum = _mm512_div_ps(_mm512_fnmadd_ps(line.scale, sum_q, sum_w), n);
    __m512 gain = _mm512_fmadd_ps(line.scale, sum_wq, _mm512_mul_ps(line.minimum, sum_w));
    __mmask16 better = _mm512_cmp_ps_mask(gain, best_gain, _CMP_GT_OQ);
    best.scale = _mm512_mask_mov_ps(best.scale, better, line.scale);
    best.minimum = _mm512_mask_mov_ps(best.minimum, better, line.minimum);
    best_gain = _mm512_mask_mov_ps(best_gain, better, gain);
  }
  return best;
}

// Quantises a group of 16 rows to the 4 vectors of levels at `out`. Lane c of vector j holds inputs 8 j
// .. 8 j + 7 of column c: the first four in the low halves of its 4 bytes, the others in the high ones.
void pack_levels(const __m512 w[kGroup], const Affine& affine, char* out) {
  __mmask16 sloped = _mm512_cmp_ps_mask(affine.scale, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  __m512 inverse = _mm512_maskz_div_ps(sloped, _mm512_set1_ps(1.f), affine.scale);
  auto q = [&](int k) {
    __m512 x = _mm512_mul_ps(_mm512_sub_ps(w[k], affine.minimum), inverse);
    return _mm512_cvtps_epi32(level(x));
  };
  for (int j = 0; j < 4; ++j) {
    __m512i both = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
      __m512i byte = _mm512_or_si512(q(8 * j + i), _mm512_slli_epi32(q(8 * j + 4 + i), 4));
      both = _mm512_or_si512(both, _mm512_slli_epi32(byte, 8 * i));
    }
    _mm512_store_si512(out + 64 * j, both);
  }
}

// Quantises a block of bfloat16 rows to int4. Each step is
//
//     levels of group 0 (4 vectors) | of group 1 | float16 scale[2][16] | bfloat16 minimum[16][2]
void pack_int4_block(const Block& b, int64_t steps, char* out) {
  for (int64_t step = 0; step < steps; ++step, out += kInt4BlockBytes)
    for (int64_t g = 0; g < 2; ++g) {
      __m512i pairs[16];
      __m512 w[kGroup];
      load_transposed(b, 2 * kGroup * (2 * step + g), pairs);
      for (int i = 0; i < 16; ++i) {
        w[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16));
        w[2 * i + 1] = _mm512_castsi512_ps(
            _mm512_and_si512(pairs[i], _mm512_set1_epi32((int)0xffff0000)));
      }
      Affine affine = fit(w);
      __m256i scale = _mm512_cvtps_ph(affine.scale, 0);
      affine = {_mm512_cvtph_ps(scale), round_bf16(affine.minimum)};
      pack_levels(w, affine, out + 4 * 64 * g);
      _mm256_store_si256((__m256i*)(out + 8 * 64 + 2 * kLanes * g), scale);
      alignas(64) bf16 minimum[kLanes];
      store_bf16(minimum, affine.minimum);
      for (int c = 0; c < kLanes; ++c) ((bf16*)(out + 9 * 64))[2 * c + g] = minimum[c];
    }
}

// Quantises a block of bfloat16 rows to int8, packs it, and writes the offsets and scales.
void pack_int8_block(const Block& b, int64_t steps, char* panel, char* tail) {
  thread_local Scratch scratch;
  int64_t width = 4 * steps;
  char* rows = scratch.get<char>(kLanes * width);
  std::memset(rows, 0, kLanes * width);
  alignas(64) int32_t offset[kLanes] = {};
  alignas(64) float scale[kLanes] = {};
  for (int64_t i = 0; i < b.count; ++i) {
    char* row = rows + i * width;
    scale[i] = quantize_row((const bf16*)(b.rows + i * b.stride), b.row_bytes / 2, 0, row);
    for (int64_t k = 0; k < width; ++k) offset[i] += 128 * (int8_t)row[k];
  }
  pack_block({rows, b.count, width, width}, steps, panel);
  std::memcpy(tail, offset, sizeof(offset));
  std::memcpy(tail + kStepBytes, scale, sizeof(scale));
}

// ---------------------------------------------------------------------------------------- attention

}  // namespace

extern "C" {

// One sequence's rows of a batch; mirrored in cpu_kernels.py. Its keys and values go to cells
// [start, start + count) of `slot`. The last `tail` cells before start + count are seen where
// mask[count][tail] is not 0, all earlier ones always; without a mask the rows are causal.
struct Segment {
  int64_t row, count, slot, start, tail;
  const uint8_t* mask;
};

// What all layers of one pass share; mirrored in cpu_kernels.py. Strides in elements.
struct Attention {
  bf16* memory;              // KV cache [layers, 2, slots, kv_heads, cells, head_dim]
  const bf16 *cosine, *sine;  // [positions, head_dim]
  const int64_t* positions;  // [rows]
  const Segment* segments;
  int64_t segment_count, rows, heads, kv_heads, head_dim;
  int64_t layer_stride, value_offset, slot_stride, head_stride;
  int64_t window;  // tokens that a token sees, itself included; 0 is all
};

// Norms of each query and key head before its rotation; a weight [head_dim] may be null.
struct HeadNorms {
  const bf16 *query, *key;
  double eps;
};

}  // extern "C"

namespace {

// Rotary embedding of one head, half-rotation convention: pairs (i, i + head_dim / 2).
void rotate(const bf16* x, const bf16* cosine, const bf16* sine, int64_t head_dim, bf16* out) {
  int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    __m512 a = load_bf16(x + i), b = load_bf16(x + i + half);
    __m512 low = _mm512_mul_ps(b, load_bf16(sine + i));
    __m512 high = _mm512_mul_ps(a, load_bf16(sine + i + half));
    store_bf16(out + i, _mm512_fmsub_ps(a, load_bf16(cosine + i), low));
    store_bf16(out + i + half, _mm512_fmadd_ps(b, load_bf16(cosine + i + half), high));
  }
}

// The same behind a norm, where there is one.
void normalize_and_rotate(const bf16* x, const bf16* norm_weight, double eps, const bf16* cosine,
                          const bf16* sine, int64_t head_dim, bf16* out) {
  thread_local Scratch scratch;
  if (norm_weight) {
    bf16* normed = scratch.get<bf16>(head_dim);
    rms_norm_row(x, head_dim, norm_weight, eps, normed);
    x = normed;
  }
  rotate(x, cosine, sine, head_dim, out);
}

// Writes the rotated keys and the values of a segment to its cells.
void store_cells(const Attention& a, const Segment& s, const HeadNorms& norms, const bf16* qkv,
                 bf16* keys) {
  int64_t width = a.head_dim, row_size = (a.heads + 2 * a.kv_heads) * width;
  for (int64_t i = 0; i < s.count; ++i) {
    const bf16* row = qkv + (s.row + i) * row_size + a.heads * width;
    int64_t angle = a.positions[s.row + i] * width;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      bf16* key = keys + h * a.head_stride + (s.start + i) * width;
      normalize_and_rotate(row + h * width, norms.key, norms.eps, a.cosine + angle, a.sine + angle,
                           width, key);
      std::memcpy(key + a.value_offset, row + (a.kv_heads + h) * width, 2 * width);
    }
  }
}

// Packs the values [count, head_dim] of up to 32 cells into head_dim / 32 panels of 16 steps: columns
// are features, a group is the same feature of two neighbouring cells. Missing cells are 0.
void pack_values(const bf16* values, int64_t count, int64_t head_dim, char* panels) {
  alignas(64) uint16_t index[2][32];
  for (int i = 0; i < 32; ++i)
    for (int b = 0; b < 2; ++b) index[b][i] = i / 2 + kLanes * b + 32 * (i % 2);
  __m512i low = _mm512_load_si512(index[0]), high = _mm512_load_si512(index[1]);
  for (int64_t column = 0; column < head_dim; column += kColumns)
    for (int64_t cell = 0; cell < kCells; cell += 2, panels += kStepBytes) {
      const bf16* source = values + cell * head_dim + column;
      __m512i even = _mm512_maskz_loadu_epi16(cell < count ? ~0u : 0, source);
      __m512i odd = _mm512_maskz_loadu_epi16(cell + 1 < count ? ~0u : 0, source + head_dim);
      _mm512_store_si512(panels, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(panels + 64, _mm512_permutex2var_epi16(even, high, odd));
    }
}

// Which of the cells [cell, cell + 16) the segment's token `i` sees. `oldest` is the first position
// in its window; before the tail, a cell's number is its position. The mask minds the window itself.
__mmask16 visible(const Segment& s, int64_t i, int64_t oldest, int64_t cell) {
  __mmask16 window = ~first(oldest - cell);
  if (!s.mask) return first(s.start + i + 1 - cell) & window;
  int64_t end = s.start + s.count, trunk = end - s.tail;
  __mmask16 before = first(trunk - cell), inside = first(end - cell) & ~before;
  __m128i seen = _mm_maskz_loadu_epi8(inside, s.mask + i * s.tail + cell - trunk);
  return (before & window) | _mm_test_epi8_mask(seen, seen);
}

// The running softmax of one query row: the largest score so far, and relative to it the sum of the
// weights by lane and of the weighted values.
struct SoftmaxRow {
  float& largest;
  __m512& sum;
  float* values;  // [head_dim]
};

// Takes in the scores of one block of cells; writes their weights as bfloat16 (rounded before they
// are summed, so that they add up to what is divided by).
void softmax_step(const SoftmaxRow& row, const float* scores, const __mmask16 seen[2], float scale,
                  int64_t head_dim, bf16* weights) {
  __m512 score[2], none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int b = 0; b < 2; ++b) {
    __m512 raw = _mm512_loadu_ps(scores + kLanes * b);
    score[b] = _mm512_mask_mul_ps(none, seen[b], raw, _mm512_set1_ps(scale));
  }
  float largest = _mm512_reduce_max_ps(_mm512_max_ps(score[0], score[1]));
  if (largest > row.largest) {
    __m512 shrink = exp(_mm512_set1_ps(row.largest - largest));
    row.largest = largest;
    row.sum = _mm512_mul_ps(row.sum, shrink);
    for (int64_t i = 0; i < head_dim; i += kLanes)
      _mm512_store_ps(row.values + i, _mm512_mul_ps(_mm512_load_ps(row.values + i), shrink));
  }
  for (int b = 0; b < 2; ++b) {
    __m512 weight = exp(_mm512_sub_ps(score[b], _mm512_set1_ps(row.largest)));
    weight = round_bf16(_mm512_maskz_mov_ps(seen[b], weight));
    row.sum = _mm512_add_ps(row.sum, weight);
    store_bf16(weights + kLanes * b, weight);
  }
}

// A share of the work: query rows [begin, begin + count) of one key-value head of one segment. Query
// row r is token r / group, head r % group of the heads that share the key-value head.
struct QueryTile {
  const Segment* segment;
  int64_t kv_head, begin, count;
};

void attend(const Attention& a, const QueryTile& t, const HeadNorms& norms, const bf16* qkv,
            const bf16* keys, bf16* out) {
  thread_local Scratch query_scratch, value_scratch, panel_scratch, sum_scratch;
  const Segment& s = *t.segment;
  int64_t width = a.head_dim, group = a.heads / a.kv_heads;
  bf16* query = query_scratch.get<bf16>(t.count * width);
  float* values = value_scratch.get<float>(t.count * width);
  char* panels = panel_scratch.get<char>(2 * kCells * 2 * width);
  __m512* sums = sum_scratch.get<__m512>(t.count);
  float largest[kQueryRows];
  auto place = [&](int64_t r, int64_t row_heads) {  // of query row r in a row of `row_heads` heads
    return ((s.row + r / group) * row_heads + t.kv_head * group + r % group) * width;
  };
  for (int64_t i = 0; i < t.count; ++i) {
    int64_t r = t.begin + i, angle = a.positions[s.row + r / group] * width;
    normalize_and_rotate(qkv + place(r, a.heads + 2 * a.kv_heads), norms.query, norms.eps,
                         a.cosine + angle, a.sine + angle, width, query + i * width);
    largest[i] = -std::numeric_limits<float>::infinity();
    sums[i] = _mm512_setzero_ps();
  }
  std::memset(values, 0, t.count * width * sizeof(float));

  int64_t end = s.start + s.count;
  int64_t last = s.mask ? end : s.start + (t.begin + t.count - 1) / group + 1;
  char* value_panels = panels + kCells * 2 * width;
  float scale = 1.f / std::sqrt((float)width);
  auto oldest = [&](int64_t token) {
    return a.window ? std::max<int64_t>(0, a.positions[s.row + token] - a.window + 1) : 0;
  };
  // Blocks of cells start at multiples of kCells whatever the tile's rows, so that a row's bits do
  // not depend on its neighbours; a block that a row does not see changes nothing.
  int64_t begin = a.window ? s.start + s.count : 0;
  for (int64_t i = 0; a.window && i < t.count; ++i)
    begin = std::min(begin, oldest((t.begin + i) / group) / kCells * kCells);
  for (int64_t cell = begin; cell < last; cell += kCells) {
    const bf16* source = keys + t.kv_head * a.head_stride + cell * width;
    int64_t cells = std::min<int64_t>(kCells, end - cell);
    for (int64_t b = 0; b < 2; ++b)
      pack_block({(const char*)(source + kLanes * b * width), cells - kLanes * b, 2 * width, 2 * width},
                 width / 2, panels + 64 * b);
    pack_values(source + a.value_offset, cells, width, value_panels);
    Kernels(kBf16Tiles).for_tiles(t.count, [&](Tile kernel, int64_t row, int64_t count) {
      alignas(64) float scores[kMaxRows][kCells];
      alignas(64) bf16 weights[kMaxRows][kCells];
      kernel((const char*)(query + row * width), 2 * width, panels, width / 2, (char*)scores,
             sizeof(scores[0]), false);
      for (int64_t i = 0; i < count; ++i) {
        int64_t token = (t.begin + row + i) / group;
        int64_t from = oldest(token);
        __mmask16 seen[2] = {visible(s, token, from, cell), visible(s, token, from, cell + kLanes)};
        softmax_step({largest[row + i], sums[row + i], values + (row + i) * width}, scores[i], seen,
                     scale, width, weights[i]);
      }
      for (int64_t column = 0; column < width; column += kColumns)
        kernel((const char*)weights, sizeof(weights[0]), value_panels + column * kCells * 2, kCells / 2,
               (char*)(values + row * width + column), 4 * width, true);
    });
  }
  for (int64_t i = 0; i < t.count; ++i) {
    float sum = _mm512_reduce_add_ps(sums[i]);
    __m512 inverse = _mm512_set1_ps(sum == 0 ? 0.f : 1.f / sum);
    bf16* row = out + place(t.begin + i, a.heads);
    for (int64_t j = 0; j < width; j += kLanes)
      store_bf16(row + j, _mm512_mul_ps(_mm512_load_ps(values + i * width + j), inverse));
  }
}

}  // namespace

extern "C" {

// Asks Linux for the use of AMX, once in a process and before its first call here; 0 when refused.
int64_t permit_amx() {
#ifdef __AMX_INT8__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 1;
#endif
}

// Fills in `steps`, `panels` and `panel_bytes` from the other fields.
void lay_out(Linear* l) {
  const Step& step = step_of(*l);
  int64_t unit = step.inputs * step.multiple, columns = l->swiglu ? kLanes : kColumns;
  l->steps = (l->in_features + unit - 1) / unit * step.multiple;
  l->panels = (l->out_features + columns - 1) / columns;
  l->panel_bytes = l->steps * step.panel_bytes + (l->format == kInt8 ? 2 : 0) * kStepBytes +
                   (l->bias ? kStepBytes : 0);
}

// Packs `weight` [out_features, in_features], with `swiglu` the gate's, `up` being the other half;
// `bias` [out_features] where the layer has one.
void pack_weight(const Linear* l, const bf16* weight, const bf16* up, const float* bias) {
  int64_t row_bytes = 2 * l->in_features;
  for (int64_t panel = 0; panel < l->panels; ++panel)
    for (int64_t b = 0; b < 2; ++b) {
      int64_t column = l->swiglu ? kLanes * panel : kColumns * panel + kLanes * b;
      int64_t count = std::clamp<int64_t>(l->out_features - column, 0, kLanes);
      const bf16* source = l->swiglu && b ? up : weight;
      Block block{(const char*)(source + column * l->in_features), count, row_bytes, row_bytes};
      char* out = l->weight + panel * l->panel_bytes;
      char* tail = tail_of(*l, panel) + 64 * b;
      if (l->format == kInt4)
        pack_int4_block(block, l->steps, out + b * l->steps * kInt4BlockBytes);
      else if (l->format == kInt8)
        pack_int8_block(block, l->steps, out + 64 * b, tail);
      else
        pack_block(block, l->steps, out + 64 * b);
      if (l->bias) {
        char* place = tail + (l->format == kInt8 ? 2 * kStepBytes : 0);
        _mm512_store_ps(place, _mm512_maskz_loadu_ps(first(count), bias + column));
      }
    }
}

// out = [SwiGLU] (norm(x) W^T + bias) + residual. Strides in elements. A panel stays in the L2 cache
// while the row tiles pass over it, so that prefill too reads the weights from memory once.
void linear(const Linear* l, const bf16* x, int64_t rows, int64_t x_stride, const bf16* norm_weight,
            double eps, const bf16* residual, int64_t residual_stride, char* out, int64_t out_stride,
            int64_t threads) {
  Activations a = prepare(*l, x, rows, x_stride, norm_weight, eps);
  Kernels kernels = l->format == kInt4   ? Kernels(kInt4Tiles)
                    : l->format == kInt8 ? Kernels(kInt8Tiles)
                                         : Kernels(kBf16Tiles);
  int64_t out_bytes = out_stride * (l->float_out ? 4 : 2);
  parallel(l->panels, threads, [&](int64_t begin, int64_t end) {
    AmxScope scope;
    alignas(64) char acc[kMaxRows * kStepBytes];
    for (int64_t p = begin; p < end; ++p) {
      const char* panel = l->weight + p * l->panel_bytes;
      kernels.for_tiles(rows, [&](Tile kernel, int64_t row, int64_t count) {
        kernel(a.data + row * a.stride, a.stride, panel, l->steps, acc, kStepBytes, false);
        for (int64_t i = 0; i < count; ++i)
          finish(*l, p, acc + i * kStepBytes, a.scale ? a.scale[row + i] : 0.f,
                 residual ? residual + (row + i) * residual_stride : nullptr,
                 out + (row + i) * out_bytes);
      });
    }
  });
}

void rms_norm(const bf16* x, int64_t rows, int64_t n, int64_t x_stride, const bf16* weight, double eps,
              bf16* out, int64_t out_stride) {
  for (int64_t i = 0; i < rows; ++i)
    rms_norm_row(x + i * x_stride, n, weight, eps, out + i * out_stride);
}

// One layer's attention for all segments of a batch. Normalises and rotates q and k by the rows' positions, writes k
// and v to the cache, then attends: qkv [rows, heads + 2 kv_heads, head_dim] -> out [rows, heads,
// head_dim]. Each key and value is read once for all query rows (up to 96) of its segment.
void attention(const Attention* a, const HeadNorms* norms, const bf16* qkv, int64_t layer, bf16* out,
               int64_t threads) {
  std::vector<QueryTile> tiles;
  auto keys = [&](const Segment& s) {
    return a->memory + layer * a->layer_stride + s.slot * a->slot_stride;
  };
  for (int64_t i = 0; i < a->segment_count; ++i) {
    const Segment& s = a->segments[i];
    store_cells(*a, s, *norms, qkv, keys(s));
    int64_t rows = s.count * a->heads / a->kv_heads;
    for (int64_t h = 0; h < a->kv_heads; ++h)
      for (int64_t row = 0; row < rows; row += kQueryRows)
        tiles.push_back({&s, h, row, std::min<int64_t>(kQueryRows, rows - row)});
  }
  parallel(tiles.size(), threads, [&](int64_t begin, int64_t end) {
    AmxScope scope;
    for (int64_t i = begin; i < end; ++i)
      attend(*a, tiles[i], *norms, qkv, keys(*tiles[i].segment), out);
  });
}

// Adds up `bytes` (a multiple of 256) of memory: how fast this core can read, the floor of `linear`.
int64_t read_memory(const char* data, int64_t bytes) {
  __m512i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 256)
    for (int j = 0; j < 4; ++j)
      sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(data + i + 64 * j));
  return _mm512_reduce_add_epi64(
      _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3])));
}

}  // extern "C"
