/* Receives signals in loops, in system calls and in handlers that do not return; starts threads and children. The
   output is deterministic. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int ticks, usr, faults;
static sigjmp_buf back;
static char *page;

static void tick(int signal) { ticks++; (void)signal; }
static void user(int signal) { usr++; (void)signal; }
static void jump(int signal) { (void)signal; siglongjmp(back, 1); }

static void fault(int signal, siginfo_t *info, void *context)
{
   (void)signal, (void)context;
   if ((char *)info->si_addr >= page && (char *)info->si_addr < page + 4096) {
      faults++;
      mprotect(page, 4096, PROT_READ | PROT_WRITE);
   } else
      _exit(7);
}

static unsigned long work(unsigned long rounds)
{
   unsigned long sum = 1, i;
   for (i = 0; i < rounds; i++)
      sum = sum * 6364136223846793005ul + i;
   return sum;
}

static void *thread(void *argument)
{
   unsigned long sum = work(3000 + (unsigned long)argument);
   char *own = malloc(1 << 16);
   memset(own, (int)sum, 1 << 16);
   sum += (unsigned char)own[77];
   free(own);
   return (void *)sum;
}

static void *waiter(void *argument)
{
   sigset_t set;
   int got = 0, i;
   (void)argument;
   sigemptyset(&set);
   sigaddset(&set, SIGUSR2);
   for (i = 0; i < 20; i++)
      sigwait(&set, &got);
   return (void *)(long)got;
}

static void timer(int signal, void (*handler)(int), long us)
{
   struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
   struct itimerval every = {{0, us}, {0, us}};
   sigaction(signal, &action, NULL);
   setitimer(ITIMER_REAL, &every, NULL);
}

int main(void)
{
   struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
   stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
   struct sigaction seen;
   pthread_t threads[4], sleeper;
   unsigned long sum = 0;
   sigset_t set;
   int i, j, ends[2], status;
   void *result;

   /* Handlers in loops. */
   timer(SIGALRM, tick, 500);
   while (ticks < 50)
      sum += work(1000) & 1;
   printf("ticks in loops: %d\n", ticks >= 50);
   /* In system calls. */
   pipe(ends);
   if (fork() == 0) {
      for (i = 0; i < 20; i++) {
         usleep(2000);
         write(ends[1], "x", 1);
      }
      _exit(3);
   }
   for (i = j = 0; i < 20; i++) {
      char byte;
      j += read(ends[0], &byte, 1) == 1;
   }
   wait(&status);
   printf("read %d, child %d\n", j, WEXITSTATUS(status));
   setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);

   /* Handlers that do not return, from loops and from calls. */
   signal(SIGALRM, jump);
   for (i = j = 0; i < 20; i++) {
      if (sigsetjmp(back, 1) == 0) {
         ualarm(2000, 0);
         if (i % 2)
            pause();
         for (;;)
            work(10);
      }
      j++;
   }
   printf("jumps: %d\n", j);

   /* Faults that a handler repairs, on an alternative stack; sigaction(2) returns the handler that was installed. */
   sigaltstack(&stack, NULL);
   sigaction(SIGSEGV, &action, NULL);
   page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
   for (i = 0; i < 50; i++) {
      page[i]++;
      work(2000);
      mprotect(page, 4096, PROT_NONE);
   }
   sigaction(SIGSEGV, NULL, &seen);
   printf("faults: %d, handler kept: %d\n", faults, seen.sa_sigaction == fault);

   /* Signals to the calling thread are delivered before raise(3) returns. */
   signal(SIGUSR1, user);
   for (i = 0; i < 100; i++)
      raise(SIGUSR1);
   sigemptyset(&set);
   sigaddset(&set, SIGUSR1);
   sigprocmask(SIG_BLOCK, &set, NULL);
   raise(SIGUSR1);
   printf("own signals: %d", usr);
   sigprocmask(SIG_UNBLOCK, &set, NULL);
   printf(", then %d\n", usr);

   /* Threads. */
   for (i = 0; i < 60; i++) {
      for (j = 0; j < 4; j++)
         pthread_create(&threads[j], NULL, thread, (void *)(long)(i + j));
      for (j = 0; j < 4; j++) {
         pthread_join(threads[j], &result);
         sum ^= (unsigned long)result;
      }
   }
   sigemptyset(&set);
   sigaddset(&set, SIGUSR2);
   pthread_sigmask(SIG_BLOCK, &set, NULL);
   pthread_create(&sleeper, NULL, waiter, NULL);
   for (i = 0; i < 20; i++) {
      pthread_kill(sleeper, SIGUSR2);
      usleep(1000);
   }
   for (i = 0; i < 20; i++)
      kill(getpid(), SIGUSR2);
   for (;;) {
      struct timespec none = {0, 0};
      if (sigtimedwait(&set, NULL, &none) < 0)
         break;
   }
   printf("%s\n", sum ? "threads" : "");
   status = system("exit 9");
   printf("system: %d\n", WEXITSTATUS(status));
   fflush(stdout);
   execl("/bin/echo", "echo", "exec", NULL);
   return 1;
}
