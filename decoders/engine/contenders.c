// Which tokens may win a draw by Gumbel noise: all of a vocabulary looked at once, with whole numbers and no logarithms.
//
// The same hash as in sampling.py. What is let through is scored exactly there; of those that could win none is left out.

#include <stdint.h>
#include <string.h>

#define BLOCK 256

// scaled (rows, vocabulary); hashes (vocabulary,), of token ids; keys and reached (rows,). Writes the tokens of each row to
// found (rows, room) in order, and how many they are to counts (rows,): -1 where there is no room.
void contenders(const float *scaled, int64_t rows, int64_t vocabulary, const uint32_t *hashes, const int64_t *keys,
                const float *reached, int64_t *found, int64_t *counts, int64_t room, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *scores = scaled + row * vocabulary;
        const uint32_t low = (uint32_t)keys[row], high = (uint32_t)((uint64_t)keys[row] >> 32);
        const float least = reached[row];
        int64_t count = 0;
        for (int64_t first = 0; first < vocabulary && count >= 0; first += BLOCK) {
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
            for (int i = 0; i < many && count >= 0; i++) {
                if (!may[i]) continue;
                if (count < room)
                    found[row * room + count++] = first + i;
                else
                    count = -1;
            }
        }
        counts[row] = count;
    }
}
