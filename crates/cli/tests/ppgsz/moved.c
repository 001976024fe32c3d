/*
 * Has 6 MiB of code. Prints a line when it is up, and for each line on stdin whether all of the code still
 * works.
 */
#include <stdio.h>

__attribute__((noinline)) static long counted(long number)
{
	__asm__ volatile(".rept 1500000\n\t"
			 "addq $1, %0\n\t"
			 ".endr"
			 : "+r"(number));
	return number;
}

int main(void)
{
	char line[16];
	do {
		puts(counted(0) == 1500000 ? "right" : "wrong");
		fflush(stdout);
	} while (fgets(line, sizeof line, stdin));
	return 0;
}
