/* Calls an exported launcher with the numbers on its command line, in the order of the fields of its arguments. */
#include <stdio.h>
#include <stdlib.h>

#include HEADER

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAMED(suffix) JOIN(PREFIX, suffix)

int main(int argc, char **argv) {
    NAMED(_kernels) kernels;
    NAMED(_arguments) arguments;
    int next = 1;
#define TAKE(field) arguments.field = next < argc ? strtoull(argv[next++], NULL, 10) : 0;
    FIELDS
    printf("scratch %llu\n", (unsigned long long)NAMED(_scratch_bytes)(&arguments));
    int status = NAMED(_load)(&kernels);
    if (status == OFFLOAD_OK) status = NAMED(_run)(&kernels, (CUstream)77, &arguments);
    printf("status %d\n", status);
    return 0;
}
