// CRC-32 (the one of zlib and of every zip file) by carry-less multiplication, at the speed of memory.
//
// Bytes are taken as a polynomial over GF(2), least significant bit first. Four runs of 16 bytes are folded 64 bytes
// ahead until fewer are left, then onto each other; what remains is 16 bytes with the same remainder, which a table
// finishes. Where the processor has no such instruction there is nothing here, and zlib does it.

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
    for (; count >= 16; data += 16, count -= 16) sum = fold(sum, one_on, read(data));
    alignas(16) uint8_t last[16];
    _mm_store_si128(reinterpret_cast<__m128i *>(last), sum);
    return by_bytes(by_bytes(0, last, 16), data, count);
}

}  // namespace

extern "C" {

int32_t crc_can() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

uint32_t crc_of(uint32_t before, const void *memory, int64_t count) {
    const auto *data = static_cast<const uint8_t *>(memory);
    return ~(count < 64 ? by_bytes(~before, data, count) : by_folds(~before, data, count));
}

// Of each of `count` runs of `size` bytes, one behind the other.
void crc_each(const void *memory, int64_t count, int64_t size, uint32_t *found) {
    const auto *data = static_cast<const uint8_t *>(memory);
    for (int64_t place = 0; place < count; place++) found[place] = crc_of(0, data + place * size, size);
}
}
#endif
