/* Four threads, each reading at random: first memory of its own, then that of all. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, WORDS = 4 << 20, READS = 1500000 };
static unsigned long *memory[THREADS];

static void *work(void *argument)
{
   long own = (long)argument, i;
   unsigned long state = 88172645463325252ul + own, sum = 0;
   for (i = 0; i < WORDS; i++)
      memory[own][i] = i ^ own;
   for (i = 0; i < 2 * READS; i++) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      sum += memory[i < READS ? own : (long)(state >> 60) % THREADS][state % WORDS];
   }
   return (void *)sum;
}

int main(void)
{
   pthread_t threads[THREADS];
   unsigned long total = 0;
   long i;
   for (i = 0; i < THREADS; i++)
      if (!(memory[i] = calloc(WORDS, sizeof(unsigned long))))
         return 1;
   for (i = 0; i < THREADS; i++)
      if (pthread_create(&threads[i], NULL, work, (void *)i))
         return 1;
   for (i = 0; i < THREADS; i++) {
      void *sum;
      pthread_join(threads[i], &sum);
      total += (unsigned long)sum;
   }
   printf("%lu\n", total);
   return 0;
}
