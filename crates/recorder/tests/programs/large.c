/* Reads memory on small pages, requests large pages, and reads it again. It needs no C library, so its
   addresses are always the same. Exits with 42. */

#include "draw.h"

enum { LARGE = 2 << 20, COUNT = 44 };

static char memory[COUNT][LARGE] __attribute__((aligned(2 << 20)));
static char small[600][4096] __attribute__((aligned(4096)));
char stack[16 * 4096] __attribute__((aligned(4096)));

static long call(long number, word a, word b, word c)
{
   long result;
   __asm__ volatile("syscall"
                    : "=a"(result)
                    : "a"(number), "D"(a), "S"(b), "d"(c)
                    : "rcx", "r11", "memory");
   return result;
}

static void read_all(void)
{
   word i;
   for (i = 0; i < 20000; i++) {
      *(volatile char *)&memory[draw(draw(4) ? 30 : COUNT)][draw(LARGE)] += 1;
      *(volatile char *)&small[draw(draw(4) ? 70 : 600)][draw(4096)] += 1;
   }
}

void run(void)
{
   word i;
   for (i = 0; i < 3000; i++)
      small[draw(600)][draw(4096)] = 1;
   /* MADV_HUGEPAGE; then MADV_POPULATE_WRITE, so that all pages exist before the first access. */
   if (call(28, (word)memory, sizeof memory, 14) != 0 ||
       call(28, (word)memory, sizeof memory, 23) != 0)
      call(231, 1, 0, 0);
   read_all();
   call(231, 42, 0, 0);
}

__asm__(".text\n.globl _start\n_start: lea stack+65536(%rip), %rsp\ncall run\n");
