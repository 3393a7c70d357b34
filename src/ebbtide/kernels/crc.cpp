// CRC-32 (the one of zlib and of every zip file) by carry-less multiplication, at the speed of memory.
//
// Bytes are taken as a polynomial over GF(2), least significant bit first. Four runs of 16 bytes (of 64, where the
// processor multiplies four pairs at once) are folded as many bytes ahead until fewer are left, then onto each other;
// what remains is 16 bytes with the same remainder, which three more products give. Where the processor has no such
// instruction there is nothing here, and zlib does it.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

struct Table {
    uint32_t of[256];
    constexpr Table() : of() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t rest = byte;
            for (int bit = 0; bit < 8; bit++) rest = rest & 1 ? (rest >> 1) ^ 0xEDB88320u : rest >> 1;
            of[byte] = rest;
        }
    }
};

constexpr Table table;

uint32_t by_bytes(uint32_t rest, const uint8_t *data, int64_t count) {
    for (int64_t i = 0; i < count; i++) rest = (rest >> 8) ^ table.of[(rest ^ data[i]) & 0xFF];
    return rest;
}

#define WITH_MULTIPLY __attribute__((target("pclmul,sse4.1")))

WITH_MULTIPLY inline __m128i read(const uint8_t *data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data));
}

// `by`: what x^n leaves for the distance of the fold, for the lower and the upper half.
WITH_MULTIPLY inline __m128i fold(__m128i sum, __m128i by, __m128i onto) {
    const __m128i lower = _mm_clmulepi64_si128(sum, by, 0x00);
    const __m128i upper = _mm_clmulepi64_si128(sum, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lower, upper), onto);
}

// What 16 bytes leave: two folds to 8 bytes, then a division by Barrett.
WITH_MULTIPLY inline uint32_t left_of(__m128i sum, __m128i one_on) {
    const __m128i half_on = _mm_set_epi64x(0, 0x163cd6124);
    const __m128i quotient = _mm_set_epi64x(0, 0x1f7011641), divisor = _mm_set_epi64x(0, 0x1db710641);
    const __m128i low = _mm_set_epi32(0, 0, 0, -1);
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, one_on, 0x10));
    sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(_mm_and_si128(sum, low), half_on, 0x00));
    const __m128i times = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), quotient, 0x00), low);
    sum = _mm_xor_si128(sum, _mm_clmulepi64_si128(times, divisor, 0x00));
    return uint32_t(_mm_extract_epi32(sum, 1));
}

// Of at least 16 bytes, the first of which are in `sum` and have been passed.
WITH_MULTIPLY uint32_t finish(__m128i sum, const uint8_t *data, int64_t count) {
    const __m128i one_on = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    for (; count >= 16; data += 16, count -= 16) sum = fold(sum, one_on, read(data));
    return by_bytes(left_of(sum, one_on), data, count);
}

// At least 64 bytes.
WITH_MULTIPLY uint32_t by_folds(uint32_t rest, const uint8_t *data, int64_t count) {
    const __m128i four_on = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i one_on = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i sums[4];
    for (int i = 0; i < 4; i++) sums[i] = read(data + 16 * i);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(int(rest)));
    data += 64, count -= 64;
    for (; count >= 64; data += 64, count -= 64)
        for (int i = 0; i < 4; i++) sums[i] = fold(sums[i], four_on, read(data + 16 * i));
    __m128i sum = sums[0];
    for (int i = 1; i < 4; i++) sum = fold(sum, one_on, sums[i]);
    return finish(sum, data, count);
}

#define WITH_FOUR __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))

WITH_FOUR inline __m512i fold_four(__m512i sum, __m512i by, __m512i onto) {
    const __m512i lower = _mm512_clmulepi64_epi128(sum, by, 0x00);
    const __m512i upper = _mm512_clmulepi64_epi128(sum, by, 0x11);
    return _mm512_ternarylogic_epi64(lower, upper, onto, 0x96);
}

// At least 256 bytes.
WITH_FOUR uint32_t by_wide_folds(uint32_t rest, const uint8_t *data, int64_t count) {
    const __m512i all_on = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i four_on = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1c6e41596, 0x154442bd4));
    const __m128i one_on = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m512i sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm512_loadu_si512(data + 64 * i);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(rest))));
    data += 256, count -= 256;
    for (; count >= 256; data += 256, count -= 256)
        for (int i = 0; i < 4; i++) sums[i] = fold_four(sums[i], all_on, _mm512_loadu_si512(data + 64 * i));
    __m512i four = sums[0];
    for (int i = 1; i < 4; i++) four = fold_four(four, four_on, sums[i]);
    for (; count >= 64; data += 64, count -= 64) four = fold_four(four, four_on, _mm512_loadu_si512(data));
    __m128i sum = _mm512_extracti32x4_epi32(four, 0);
    sum = fold(sum, one_on, _mm512_extracti32x4_epi32(four, 1));
    sum = fold(sum, one_on, _mm512_extracti32x4_epi32(four, 2));
    sum = fold(sum, one_on, _mm512_extracti32x4_epi32(four, 3));
    return finish(sum, data, count);
}

const bool four_at_once = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");

}  // namespace

extern "C" {

int32_t crc_can() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

// `most`: bytes that are multiplied at once at most, where the processor can.
uint32_t crc_by(int32_t most, uint32_t before, const void *memory, int64_t count) {
    const auto *data = static_cast<const uint8_t *>(memory);
    if (count >= 256 && most >= 64 && four_at_once) return ~by_wide_folds(~before, data, count);
    return ~(count < 64 ? by_bytes(~before, data, count) : by_folds(~before, data, count));
}

uint32_t crc_of(uint32_t before, const void *memory, int64_t count) { return crc_by(64, before, memory, count); }

// Of each of `count` runs of `size` bytes, one behind the other.
void crc_each(const void *memory, int64_t count, int64_t size, uint32_t *found) {
    const auto *data = static_cast<const uint8_t *>(memory);
    for (int64_t place = 0; place < count; place++) found[place] = crc_of(0, data + place * size, size);
}
}
#endif
