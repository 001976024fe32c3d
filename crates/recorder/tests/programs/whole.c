/* Two threads that read at random, one of them twice as often, copy and wait for each other, so many times. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 2, WORDS = 4 << 20 };
static unsigned long memory[THREADS][WORDS];
static char text[THREADS][20000];
static int ways[THREADS][2];

static void *work(void *argument)
{
   long own = (long)argument, i, read_count;
   unsigned long state = 88172645463325252ul + own, sum = 0;
   for (i = 0; i < READS; i++) {
      for (read_count = 0; read_count <= own; read_count++) {
         state ^= state << 13;
         state ^= state >> 7;
         state ^= state << 17;
         sum += memory[own][state % WORDS]++;
      }
      if (i % 1024 == 0) {
         char byte = (char)i;
         unsigned long size = 8192 + i % 512, to = (unsigned long)text[own], from = to + 9999;
         __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
         if (write(ways[own][1], &byte, 1) != 1 || read(ways[1 - own][0], &byte, 1) != 1)
            return NULL;
      }
   }
   return (void *)(sum + text[own][77]);
}

int main(void)
{
   pthread_t threads[THREADS];
   long i;
   for (i = 0; i < THREADS; i++)
      if (pipe(ways[i]) != 0)
         return 1;
   for (i = 0; i < THREADS; i++)
      if (pthread_create(&threads[i], NULL, work, (void *)i) != 0)
         return 1;
   for (i = 0; i < THREADS; i++)
      pthread_join(threads[i], NULL);
   return 42;
}
