/*
 * Spins in a restartable sequence (rseq(2)) until the word `go` is set, and then commits. Exits with 0 if the
 * sequence was aborted after `go` was set, with 1 if it committed.
 *
 * The argument is a file with these words: go, inside the sequence, ready.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_rseq
#define SYS_rseq 334
#endif
#define SIGNATURE 0x53053053

static struct {
	uint32_t cpu_id_start, cpu_id;
	uint64_t sequence;
	uint32_t flags, padding[3];
} area __attribute__((aligned(32)));

static uint32_t *words;

/* Returns 1 if the sequence committed, 0 if it was aborted. */
static int attempt(void)
{
	__asm__ goto(
		".pushsection .data.sequence, \"aw\"\n"
		".balign 32\n"
		"7: .long 0, 0\n"
		".quad 1f, 3f - 1f, 4f\n"
		".popsection\n"
		"leaq 7b(%%rip), %%rax\n"
		"movq %%rax, %[sequence]\n"
		"1: movl $1, 4(%[words])\n"
		"2: movl (%[words]), %%eax\n"
		"testl %%eax, %%eax\n"
		"jz 2b\n"
		"3: jmp %l[committed]\n"
		".long 0x53053053\n"
		"4: movl $0, 4(%[words])\n"
		"jmp %l[aborted]\n"
		:
		: [sequence] "m"(area.sequence), [words] "r"(words)
		: "rax", "memory", "cc"
		: committed, aborted);
	__builtin_unreachable();
committed:
	return 1;
aborted:
	return 0;
}

int main(int argc, char **argv)
{
	int file = argc == 2 ? open(argv[1], O_RDWR) : -1;
	words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (file < 0 || words == MAP_FAILED || syscall(SYS_rseq, &area, sizeof area, 0, SIGNATURE) != 0) {
		perror("rseq");
		return 2;
	}
	words[2] = 1;
	while (!attempt())
		if (*(volatile uint32_t *)words)
			return 0;
	return 1;
}
