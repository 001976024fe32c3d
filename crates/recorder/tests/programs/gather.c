/* tlb-gather as a real program: reads words of 128 MB at random, as we assume that McDougall's program
   (2004) does. Its argument is the number of reads. */
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 128 << 20, WORDS = BYTES / sizeof(unsigned long) };

int main(int argc, char **argv)
{
   unsigned long *heap = malloc(BYTES), state = 88172645463325252ul, sum = 0;
   long i, count = argc > 1 ? atol(argv[1]) : 3000000;
   if (!heap)
      return 1;
   for (i = 0; i < WORDS; i += 512)
      heap[i] = i;
   for (i = 0; i < count; i++) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      sum += heap[state % WORDS];
   }
   printf("%lu\n", sum);
   return 0;
}
