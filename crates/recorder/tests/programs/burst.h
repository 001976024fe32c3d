/* How a test program begins a burst at a place of its choice: by the sampler's own signal. A burst ends
   before getppid, which none makes. */

#include <sys/syscall.h>

static long call(long number, long a, long b, long c)
{
   register long d __asm__("r10") = 8;
   long result;
   __asm__ volatile("syscall"
                    : "=a"(result)
                    : "a"(number), "D"(a), "S"(b), "d"(c), "r"(d)
                    : "rcx", "r11", "memory");
   return result;
}

/* The one for which there is a handler; 0, which does nothing, without a sampler. */
static int sampler_signal(void)
{
   long action[4], signal;
   for (signal = 40; signal < 64; signal++)
      if (call(SYS_rt_sigaction, signal, 0, (long)action) == 0 && action[0])
         return signal;
   return 0;
}

static inline void begin_burst(void)
{
   call(SYS_tgkill, call(SYS_getpid, 0, 0, 0), call(SYS_gettid, 0, 0, 0), sampler_signal());
}

static inline void end_burst(void) { call(SYS_getppid, 0, 0, 0); }
