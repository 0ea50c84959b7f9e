// Which tokens may win a draw by Gumbel noise: all of a vocabulary looked at once, with whole numbers and no logarithms.
//
// The same hash as in sampling.py. What is let through is scored exactly there; of those that could win none is left out.

#include <stdint.h>
#include <string.h>

#define BLOCK 256

// scaled (rows, vocabulary); hashes (vocabulary,), of token ids; keys and reached (rows,). Writes up to `room` pairs
// (row, token) in order, and returns how many there are, or -1 where there is no room.
int64_t contenders(const float *scaled, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const int64_t *keys,
                   const float *reached, int64_t *pairs, int64_t room) {
    int64_t found = 0;
    for (int64_t row = 0; row < rows; row++) {
        const float *scores = scaled + row * vocabulary;
        const uint32_t low = (uint32_t)keys[row], high = (uint32_t)((uint64_t)keys[row] >> 32);
        const float least = reached[row];
        for (int64_t first = 0; first < vocabulary; first += BLOCK) {
            const int many = vocabulary - first < BLOCK ? (int)(vocabulary - first) : BLOCK;
            uint32_t may[BLOCK], any = 0;
            for (int i = 0; i < many; i++) {
                uint32_t word = hashes[first + i] ^ low;
                word ^= word >> 16;
                word *= 0x85EBCA6Bu;
                word ^= word >> 13;
                word *= 0xC2B2AE35u;
                word ^= word >> 16;
                word ^= high;
                word *= 0x9E3779B9u;
                const uint32_t gap = (word ^ (word >> 15)) & 0xFFFFFFu;
                // Noise is at most -log((gap + 1/2) / 2^24), and that at most by the power of two below: its exponent.
                const float half = (float)(int32_t)gap + 0.5f;
                int32_t bits;
                memcpy(&bits, &half, sizeof bits);
                const float noise = (float)(24 + 127 - (bits >> 23)) * 0.6931473f;
                may[i] = scores[first + i] + noise >= least;
                any |= may[i];
            }
            if (!any) continue;
            for (int i = 0; i < many; i++) {
                if (!may[i]) continue;
                if (found == room) return -1;
                pairs[2 * found] = row;
                pairs[2 * found++ + 1] = first + i;
            }
        }
    }
    return found;
}
