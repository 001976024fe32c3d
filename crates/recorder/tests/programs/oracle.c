/* Misses TLBs of all levels, page sizes and sides. Its stack lies in its own data, so that its addresses
   are the same under every engine. Exits with 42. */

#include "draw.h"

enum { PAGE = 4096, PAGES = 3000, LARGE = 40 };

static char heap[PAGES * PAGE] __attribute__((aligned(4096)));
static char far[LARGE][2 << 20] __attribute__((aligned(4096)));
static char copy[3 * PAGE];
char stack[16 * PAGE] __attribute__((aligned(4096)));

#define ON_ITS_OWN_PAGE(n) \
   __attribute__((noinline, aligned(4096))) static word f##n(word a) { return a * n + draw(7); }
#define TEN(n) \
   ON_ITS_OWN_PAGE(n##0) ON_ITS_OWN_PAGE(n##1) ON_ITS_OWN_PAGE(n##2) ON_ITS_OWN_PAGE(n##3) \
   ON_ITS_OWN_PAGE(n##4) ON_ITS_OWN_PAGE(n##5) ON_ITS_OWN_PAGE(n##6) ON_ITS_OWN_PAGE(n##7) \
   ON_ITS_OWN_PAGE(n##8) ON_ITS_OWN_PAGE(n##9)
TEN(1) TEN(2) TEN(3)

/* An instruction that crosses a page boundary. */
__asm__(".text\n.p2align 12\n.skip 4093\n.globl crosses\ncrosses: movabs $0x123456789abcdef0, %rax\n"
        "ret\n.p2align 12\n");
extern word crosses(void);

static word (*const functions[])(word) = {f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
                                          f20, f21, f22, f23, f24, f25, f26, f27, f28, f29,
                                          f30, f31, f32, f33, f34, f35, f36, f37, f38, f39};

static word deep(word n)
{
   volatile char frame[700];
   frame[0] = n;
   return n == 0 ? 0 : deep(n - 1) + frame[0];
}

void run(void)
{
   word i, sum = 0;
   for (i = 0; i < 6000; i++) {
      *(volatile char *)&heap[draw(PAGES) * PAGE + draw(PAGE)] += 1;
      sum += *(volatile char *)&heap[draw(60) * PAGE];
      sum += *(volatile char *)far[draw(LARGE)];
      /* Words that cross the end of a small and of a large page. */
      *(volatile word *)&heap[(draw(PAGES - 1) + 1) * PAGE - draw(12)] = i;
      *(volatile word *)(far[draw(LARGE - 1) + 1] - draw(12)) += i;
      sum += functions[draw(draw(3) ? 30 : 4)](i);
      if (i % 64 == 0) {
         sum += deep(draw(60)) + crosses();
         void *to = copy + draw(PAGE), *from = heap + draw(PAGES - 1) * PAGE;
         word n = 300;
         __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
         __asm__ volatile("lock xaddq %0, %1" : "+r"(sum), "+m"(heap[draw(PAGES) * PAGE]));
         __asm__ volatile("movups %0, %%xmm0\n movups %%xmm0, %1"
                          : : "m"(heap[(draw(9) + 1) * PAGE - 6]), "m"(copy[8]) : "xmm0", "memory");
      }
   }
#ifndef IN_A_BURST
   __asm__ volatile("syscall" : : "a"(231), "D"(42 + (sum == 1)) : "rcx", "r11", "memory");
#endif
}

#ifndef IN_A_BURST
__asm__(".text\n.globl _start\n_start: lea stack+65536(%rip), %rsp\ncall run\n");
#else
/* With the C library, so that the native engine can be preloaded. All of `run` is one burst (burst.h). */
#include "burst.h"

extern void run_in_a_burst(word process, word thread, word signal, int *info);
__asm__(".bss\nbefore: .quad 0\n.text\n.globl run_in_a_burst, burst_begins, burst_ends\n"
        "run_in_a_burst: mov %rsp, before(%rip)\nlea stack+65536(%rip), %rsp\n"
        "mov %rcx, %r10\nmov $297, %eax\nsyscall\nburst_begins: call run\nmov $110, %eax\nburst_ends: syscall\n"
        "mov before(%rip), %rsp\nret\n");

int main(void)
{
   run_in_a_burst(call(SYS_getpid, 0, 0, 0, 0), call(SYS_gettid, 0, 0, 0, 0), sampler_signal(),
                  sampler_info);
   return 42;
}
#endif
