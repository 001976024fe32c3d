/* Starts a thread that uses 200 ms of CPU time and ends; then five of 100 ms, one after the other. Each has the
   number of its predecessor. */
#include <pthread.h>
#include <stdio.h>
#include <time.h>

static void *work(void *ms)
{
   struct timespec now;
   volatile unsigned long sum = 0;
   long i;
   do {
      for (i = 0; i < 20000; i++)
         sum = sum * 6364136223846793005ul + i;
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
   } while (now.tv_sec * 1000 + now.tv_nsec / 1000000 < (long)ms);
   return NULL;
}

int main(void)
{
   int i;
   for (i = 0; i < 6; i++) {
      pthread_t thread;
      if (pthread_create(&thread, NULL, work, (void *)(i == 0 ? 200l : 100l)) != 0)
         return 1;
      pthread_join(thread, NULL);
      printf("%d\n", i);
   }
   return 0;
}
