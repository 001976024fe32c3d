/* Runs sequences of instructions, each from the same registers and memory, and prints the state afterwards. The
   output must be the same in a burst and natively. */
#include "../../recorder/tests/programs/burst.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

/* The state before and after a sequence: rax to r15 except rsp, flags, xmm0. */
struct state {
   unsigned long registers[16], flags, vector[2];
};

struct state before, after;
unsigned char memory[4096] __attribute__((aligned(4096)));
unsigned char stack[4096] __attribute__((aligned(4096)));

/* Loads the state, calls the sequence on a separate stack, saves the state. */
extern void run(void (*sequence)(void));
__asm__(".bss\nhere: .quad 0\nsequence: .quad 0\nsink: .quad 0\n.text\nrun:\n"
        "push %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rdi, sequence(%rip)\nmov %rsp, here(%rip)\n"
        "movups before+136(%rip), %xmm0\npush before+128(%rip)\npopfq\n"
        "mov before(%rip), %rax\nmov before+8(%rip), %rcx\nmov before+16(%rip), %rdx\n"
        "mov before+24(%rip), %rbx\nlea stack+2048(%rip), %rsp\nmov before+40(%rip), %rbp\n"
        "mov before+48(%rip), %rsi\nmov before+56(%rip), %rdi\nmov before+64(%rip), %r8\n"
        "mov before+72(%rip), %r9\nmov before+80(%rip), %r10\nmov before+88(%rip), %r11\n"
        "mov before+96(%rip), %r12\nmov before+104(%rip), %r13\nmov before+112(%rip), %r14\n"
        "mov before+120(%rip), %r15\ncall *sequence(%rip)\n"
        "mov %rax, after(%rip)\nmov %rcx, after+8(%rip)\nmov %rdx, after+16(%rip)\n"
        "mov %rbx, after+24(%rip)\nmov %rsp, after+32(%rip)\nmov %rbp, after+40(%rip)\n"
        "mov %rsi, after+48(%rip)\nmov %rdi, after+56(%rip)\nmov %r8, after+64(%rip)\n"
        "mov %r9, after+72(%rip)\nmov %r10, after+80(%rip)\nmov %r11, after+88(%rip)\n"
        "mov %r12, after+96(%rip)\nmov %r13, after+104(%rip)\nmov %r14, after+112(%rip)\n"
        "mov %r15, after+120(%rip)\nmovups %xmm0, after+136(%rip)\n"
        "mov here(%rip), %rsp\npushfq\npop after+128(%rip)\ncld\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n");

/* rsi and rdi point into the middle of memory, rcx is small, the other registers have arbitrary values. */
#define SEQUENCES \
   S(add, "add (%rsi), %rax\nadc %rax, 8(%rsi)\nsbb $5, %rbx") \
   S(lea, "lea 3(%rsi,%rcx,8), %rdx\nlea memory(%rip), %r9\nlea -8(%rsp), %r8") \
   S(relative, "mov memory+8(%rip), %rax\nadd %rbx, memory+16(%rip)\nmovups memory+32(%rip), %xmm0\n" \
               "cmpb $3, memory(%rip)\nsetc %al\nimul $77, memory+64(%rip), %r10") \
   S(high, "mov memory+5(%rip), %ah\nadd %bh, memory+6(%rip)\nmov %ch, (%rsi)") \
   S(all, "mov (%rsi,%rcx), %rax\nmov 8(%rsi), %rbx\nmov 16(%rsi), %rdx\nmov 24(%rsi), %rbp\n" \
          "mov 32(%rsi), %r8\nmov 40(%rsi), %r9\nmov 48(%rsi), %r10\nmov 56(%rsi), %r11\n" \
          "mov 64(%rsi), %r12\nmov 72(%rsi), %r13\nmov 80(%rsi), %r14\nmov 88(%rsi), %r15\n" \
          "mov 96(%rsi), %rcx\nmov 104(%rsi), %rdi\nmov 112(%rsi), %rsi") \
   S(redzone, "mov %rax, -8(%rsp)\nmov %rbx, -120(%rsp)\nadd %rcx, -8(%rsp)\nmov -120(%rsp), %rdx\n" \
              "add -8(%rsp), %rdx") \
   S(push, "push %rax\npush $-5\npush 8(%rsi)\npush %rsp\npop %rbx\npop 16(%rsi)\npop %rdx\npop %r15\n" \
           "pushfq\npop %r14\npush %rbp\nmov %rsp, %rbp\nsub $32, %rsp\nmov %rax, -8(%rbp)\nleave") \
   S(calls, "call 1f\njmp 2f\n1: add $1, %rax\nmov (%rsp), %rbx\nret\n2: sub %rbx, %r9\nlea 3f(%rip), %rdx\n" \
            "call *%rdx\nmov %rdx, 8(%rsi)\ncall *8(%rsi)\njmp 4f\n3: dec %r8\nret\n4: push $9\n" \
            "call 5f\njmp 6f\n5: ret $8\n6: sub %rbx, %rbx\nmovq $0, 8(%rsi)\nxor %edx, %edx") \
   S(table, "lea 1f(%rip), %rdx\nmov %rdx, 16(%rsi,%rcx,8)\njmp *16(%rsi,%rcx,8)\nud2\n1: movq $1, 16(%rsi,%rcx,8)\n" \
            "xor %edx, %edx") \
   S(loops, "mov $9, %ecx\n1: add %rcx, %rax\nadc %rax, (%rsi)\nloop 1b\njrcxz 2f\nud2\n2: mov $3, %ecx\n" \
            "3: cmp %ecx, %ecx\nloope 3b\nstc\njc 4f\nud2\n4: jnc 5f\njrcxz 6f\n5: ud2\n6:") \
   S(flags, "add %rbx, %rax\nmov (%rsi), %r8\nmov 8(%rsi), %r9\njo 1f\n1: jc 2f\n2: js 3f\n3: jp 4f\n4: jz 5f\n" \
            "5: jl 6f\n6: jle 7f\n7: ja 8f\n8: setc %r10b\nseto %r11b\nsetp %r12b\nlahf") \
   S(strings, "mov $300, %ecx\nrep movsb\nmov $4, %ecx\nlea memory(%rip), %rdi\nrep stosq\nlodsb\n" \
              "mov $50, %ecx\nrepne scasb\nlea memory(%rip), %rdi\nmov $20, %ecx\nrepe cmpsb\nmovsl\nstosw\n" \
              "std\nlodsq\nstosq\ncld\nmov $0, %ecx\nrep movsq\nmov %esi, %eax\nsub %edi, %eax") \
   S(locked, "lock xadd %rax, (%rsi)\nxchg %rbx, 8(%rsi)\nmov $7, %eax\nlock cmpxchg %r8, 16(%rsi)\n" \
             "lock incl 24(%rsi)\nlea memory+64(%rip), %rdi\nlock cmpxchg16b (%rdi)\nbtsl $5, (%rsi)\nxadd %ecx, %edx") \
   S(moves, "cmp %rax, %rbx\ncmovb (%rsi), %rax\ncmova 8(%rsi), %rbx\nmovzbl (%rsi), %r8d\nmovsbq 1(%rsi), %r9\n" \
            "movabs $0x123456789abcdef0, %r10\nbswap %r10\nmovnti %r10, 16(%rsi)\nlea memory(%rip), %rbx\nmov $200, %al\nxlatb\nsub %ebx, %ebx") \
   S(vectors, "movups (%rsi), %xmm1\npaddd %xmm1, %xmm0\nmovups %xmm0, 16(%rsi)\npshufb memory(%rip), %xmm0\n" \
              "cvtsi2sd 8(%rsi), %xmm2\nmulsd %xmm2, %xmm2\nmovsd %xmm2, 40(%rsi)\nmovd %xmm2, %ebx\n" \
              "lea memory+2048(%rip), %rdi\nmaskmovdqu %xmm1, %xmm0") \
   S(spared, "movups (%rsi), %xmm15\njmp 1f\n1: add $1, %rax\njmp 2f\n2: paddd %xmm15, %xmm15\nmovups %xmm15, 16(%rsi)\n" \
             "vinsertf128 $1, (%rsi), %ymm15, %ymm15\njmp 3f\n3: add $2, %rax\njmp 4f\n" \
             "4: vextractf128 $1, %ymm15, 32(%rsi)\njmp 5f\n5: vzeroupper\njmp 6f\n6: vextractf128 $1, %ymm15, 48(%rsi)\n" \
             "vmovdqu %xmm15, 64(%rsi)") \
   S(x87, "fldl (%rsi)\nfld1\nfaddp\nfstpl 8(%rsi)\nfnstcw 16(%rsi)\nfnstsw %ax\nemms") \
   S(narrow, "lea memory(%rip), %eax\nmov 4(%eax,%ecx,4), %r8d\nmov %r8d, 8(%eax)\nsub %rax, %rax\nmov %fs:0, %r9\n" \
             "sub %fs:0, %r9\nmov %fs:(%rax), %r10\nsub %r10, %r10") \
   S(system, "mov $39, %eax\nxor %edi, %edi\nsyscall\nsub %rax, %rax\nsub %rcx, %rcx\nsub %r11, %r11\nrdtsc\nsub %eax, %eax\n" \
             "sub %edx, %edx\ncpuid\nsub %ebx, %ebx\npause\nlfence\nendbr64") \
   S(left, "pushfq\npopfq\nmov $110, %eax\nsyscall\nsub %rax, %rax\nsub %rcx, %rcx\nsub %r11, %r11\n")

#define S(name, text) \
   extern void name##_sequence(void); \
   __asm__(".text\n" #name "_sequence:\n" text "\nret\n");
SEQUENCES
#undef S

static const struct {
   const char *name;
   void (*run)(void);
} sequences[] = {
#define S(name, text) {#name, name##_sequence},
   SEQUENCES
#undef S
};

static void fill(unsigned long seed)
{
   unsigned long i;
   for (i = 0; i < sizeof memory; i++)
      memory[i] = i * 7 + seed * 13 + (i >> 8);
   memset(stack, seed, sizeof stack);
   for (i = 0; i < 16; i++)
      before.registers[i] = (i * 0x9e3779b97f4a7c15ul) ^ (seed << (i * 3));
   before.registers[1] = seed % 5;
   before.registers[6] = (unsigned long)memory + 1024;
   before.registers[7] = (unsigned long)memory + 2500;
   before.flags = 0x202 | (seed & 1) | (seed & 2) << 5 | (seed & 4) << 5 | (seed & 8) << 8;
   before.vector[0] = seed * 0x0101010101010101ul;
   before.vector[1] = ~seed;
}

static unsigned long sum(const unsigned char *bytes, unsigned long count)
{
   unsigned long sum = 14695981039346656037ul;
   while (count--)
      sum = (sum ^ *bytes++) * 1099511628211ul;
   return sum;
}

/* The registers at the first access to the unreadable memory. */
static greg_t at_fault[17];

static void faulted(int signal, siginfo_t *info, void *context)
{
   unsigned long i;
   for (i = 0; i < 17; i++)
      at_fault[i] = ((ucontext_t *)context)->uc_mcontext.gregs[i];
   mprotect(memory, sizeof memory, PROT_READ | PROT_WRITE);
   (void)signal, (void)info;
}

static void with_faults(const char *name, void (*sequence)(void))
{
   unsigned long r;
   memset(at_fault, 0, sizeof at_fault);
   mprotect(memory, sizeof memory, PROT_NONE);
   begin_burst();
   run(sequence);
   end_burst();
   mprotect(memory, sizeof memory, PROT_READ | PROT_WRITE);
   printf("%s after a fault: flags %lx vector %lx %lx memory %lx stack %lx registers", name, after.flags,
          after.vector[0], after.vector[1], sum(memory, sizeof memory), sum(stack, sizeof stack));
   for (r = 0; r < 16; r++)
      printf(" %lx", after.registers[r]);
   printf(" at it");
   for (r = 0; r < 17; r++)
      printf(" %llx", at_fault[r]);
   printf("\n");
}

int main(void)
{
   static unsigned char handlers[1 << 16];
   stack_t there = {.ss_sp = handlers, .ss_size = sizeof handlers};
   struct sigaction action = {.sa_sigaction = faulted, .sa_flags = SA_SIGINFO | SA_ONSTACK};
   unsigned long i, seed, r;
   sigaltstack(&there, NULL);
   sigaction(SIGSEGV, &action, NULL);
   for (i = 0; i < sizeof sequences / sizeof *sequences; i++) {
      for (seed = 0; seed < 16; seed++) {
         fill(seed);
         begin_burst();
         run(sequences[i].run);
         end_burst();
         /* Return addresses and stack addresses are the same each time: the program is at a fixed address. */
         printf("%s %lu: flags %lx vector %lx %lx memory %lx stack %lx registers", sequences[i].name, seed,
                after.flags, after.vector[0], after.vector[1], sum(memory, sizeof memory),
                sum(stack, sizeof stack));
         for (r = 0; r < 16; r++)
            printf(" %lx", after.registers[r]);
         printf("\n");
      }
      fill(i);
      with_faults(sequences[i].name, sequences[i].run);
   }
   return 0;
}
