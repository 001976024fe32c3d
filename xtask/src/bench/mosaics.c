// Programs whose memory gains unevenly from large pages, for `cargo xtask bench mosaics`.
// Usage: mosaics hot MILLIONS: random loads from 40M within 240M of heap.
//        mosaics skewed MILLIONS: random loads from 256M, nine of ten from its first sixteenth.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20, CHUNK = 4000 };

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 20;
}

static void fill(size_t bytes) {
    for (size_t done = 0; done < bytes; done += CHUNK) {
        memset(malloc(CHUNK), 1, CHUNK);
    }
}

int main(int count, char **words) {
    if (count != 3) {
        return 2;
    }
    int is_hot = strcmp(words[1], "hot") == 0;
    size_t bytes = (is_hot ? 40 : 256) * (size_t)MIB, words_all = bytes / 8, sum = 0;
    if (is_hot) {
        fill(100 * (size_t)MIB);
    }
    uint64_t *table = malloc(bytes), state = 1;
    for (size_t i = 0; i < words_all; i++) {
        table[i] = i;
    }
    if (is_hot) {
        fill(100 * (size_t)MIB);
    }
    for (long i = 0; i < atol(words[2]) * 1000000; i++) {
        uint64_t random = next(&state) + sum;
        size_t range = is_hot || random % 10 == 0 ? words_all : words_all / 16;
        sum += table[random / 10 % range] & 1;
    }
    printf("%zu\n", sum);
    return 0;
}
