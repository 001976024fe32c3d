/* Programs that make unusual use of signals and system calls; argv[1] names one. The output is deterministic. */
#define _GNU_SOURCE
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Uses ms milliseconds of the thread's CPU time. */
static void work(long ms)
{
   struct timespec now, begun;
   volatile unsigned long sum = 0;
   long i;
   clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begun);
   do {
      for (i = 0; i < 20000; i++)
         sum = sum * 6364136223846793005ul + i;
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
   } while ((now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000 < ms);
}

static void *worker(void *ms)
{
   work((long)ms);
   return NULL;
}

static volatile int got[65], unexpected;
static void count(int signal) { got[signal]++; }

/* Installs a filter by prctl(2) or seccomp(2). Any call except write, exit, exit_group and rt_sigreturn kills. */
static int filter(int by_call, int all_threads)
{
   struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 4, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
   };
   struct sock_fprog program = {sizeof code / sizeof *code, code};
   if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
      return -1;
   if (by_call)
      return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                     all_threads ? SECCOMP_FILTER_FLAG_TSYNC : 0, &program);
   return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* Computes like work, without a system call. */
static void spin(void)
{
   volatile unsigned long sum = 0;
   unsigned long i;
   for (i = 0; i < 30000000; i++)
      sum = sum * 6364136223846793005ul + i;
}

static volatile int begun;

static void *spinner(void *unused)
{
   __atomic_fetch_add(&begun, 1, __ATOMIC_SEQ_CST);
   for (;;)
      spin();
   return unused;
}

static int filtered(int by_call, int threads)
{
   pthread_t others[2];
   int i;
   work(50);
   for (i = 0; i < threads; i++)
      pthread_create(&others[i], NULL, spinner, NULL);
   /* The C library's system calls at the start of a thread are over. */
   while (begun < threads)
      usleep(1000);
   if (filter(by_call, threads > 0) != 0)
      return 1;
   spin();
   syscall(SYS_write, 1, "filtered\n", 9);
   /* The C library's exit would make calls that the filter forbids. */
   syscall(SYS_exit_group, 0);
   return 1;
}

/* Installs the filter in a child; the parent goes on without it. */
static int filtered_child(void)
{
   int status;
   pid_t child;
   work(50);
   child = fork();
   if (child == 0)
      _exit(filtered(0, 0));
   waitpid(child, &status, 0);
   work(50);
   printf("child %d\n", status);
   return 0;
}

/* All threads block all signals; one takes them by sigwait(3) or signalfd(2). */
static int sigwait_all(int by_file)
{
   sigset_t all;
   pthread_t others[2];
   int i, signal, file;
   struct signalfd_siginfo info;
   sigfillset(&all);
   pthread_sigmask(SIG_BLOCK, &all, NULL);
   for (i = 0; i < 2; i++)
      pthread_create(&others[i], NULL, worker, (void *)200l);
   work(100);
   file = signalfd(-1, &all, SFD_CLOEXEC);
   for (i = 0; i < 20; i++) {
      work(5);
      kill(getpid(), SIGUSR1);
      work(5);
      if (by_file)
         signal = read(file, &info, sizeof info) == sizeof info ? (int)info.ssi_signo : -1;
      else
         sigwait(&all, &signal);
      if (signal != SIGUSR1)
         unexpected = signal;
   }
   for (i = 0; i < 2; i++)
      pthread_join(others[i], NULL);
   printf("unexpected: %d\n", unexpected);
   return 0;
}

/* Installs handlers of all real-time signals and sends each. */
static int all_handlers(void)
{
   struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
   int i, sum = 0;
   union sigval value = {0};
   for (i = SIGRTMIN; i <= SIGRTMAX; i++)
      if (sigaction(i, &action, NULL) != 0)
         return 1;
   for (i = 0; i < 300; i++) {
      work(1);
      sigqueue(getpid(), SIGRTMIN + i % (SIGRTMAX - SIGRTMIN + 1), value);
   }
   work(50);
   for (i = 0; i <= 64; i++)
      sum += got[i];
   printf("got %d\n", sum);
   return 0;
}

static volatile int cleaned;
static void clean(void *unused) { cleaned++; (void)unused; }

static void *victim(void *asynchronous)
{
   if (asynchronous)
      pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
   pthread_cleanup_push(clean, NULL);
   for (;;) {
      spin();
      if (!asynchronous)
         usleep(1000);
   }
   pthread_cleanup_pop(1);
   return NULL;
}

/* Cancels threads while they compute and while they wait; another thread goes on. */
static int cancelled(void)
{
   pthread_t other, victims[6];
   void *result;
   int i, sum = 0;
   pthread_create(&other, NULL, worker, (void *)500l);
   for (i = 0; i < 6; i++) {
      pthread_create(&victims[i], NULL, victim, (void *)(long)(i % 2));
      work(30);
      pthread_cancel(victims[i]);
      pthread_join(victims[i], &result);
      sum += result == PTHREAD_CANCELED;
   }
   pthread_join(other, NULL);
   printf("cancelled %d, cleaned %d\n", sum, cleaned);
   return 0;
}

/* Runs handlers on an alternative stack, and reads its settings back. */
static char there[1 << 16];
static void on_stack(int signal)
{
   char here;
   got[signal]++;
   work(2);
   if (&here < there || &here >= there + sizeof there)
      unexpected++;
}

static int alternative(void)
{
   stack_t stack = {.ss_sp = there, .ss_size = sizeof there}, seen;
   struct sigaction action = {.sa_handler = on_stack, .sa_flags = SA_ONSTACK};
   int i, same = 1;
   sigaltstack(NULL, &seen);
   printf("disabled: %d\n", seen.ss_sp == NULL && seen.ss_size == 0);
   sigaltstack(&stack, NULL);
   sigaction(SIGUSR1, &action, NULL);
   for (i = 0; i < 50; i++) {
      work(2);
      raise(SIGUSR1);
      sigaltstack(NULL, &seen);
      same &= seen.ss_sp == there && seen.ss_size == sizeof there && seen.ss_flags == 0;
   }
   printf("handled %d, elsewhere %d, same %d\n", got[SIGUSR1], unexpected, same);
   return 0;
}

int main(int count, char **words)
{
   const char *what = count > 1 ? words[1] : "";
   setvbuf(stdout, NULL, _IONBF, 0);
   if (strcmp(what, "prctl") == 0)
      return filtered(0, 0);
   if (strcmp(what, "seccomp") == 0)
      return filtered(1, 0);
   if (strcmp(what, "threads") == 0)
      return filtered(1, 2);
   if (strcmp(what, "child") == 0)
      return filtered_child();
   if (strcmp(what, "sigwait") == 0)
      return sigwait_all(0);
   if (strcmp(what, "signalfd") == 0)
      return sigwait_all(1);
   if (strcmp(what, "handlers") == 0)
      return all_handlers();
   if (strcmp(what, "cancel") == 0)
      return cancelled();
   if (strcmp(what, "alternative") == 0)
      return alternative();
   if (strcmp(what, "work") == 0) {
      work(300);
      printf("worked\n");
      return 3;
   }
   return 2;
}
