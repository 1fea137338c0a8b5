/* The four driver calls of an exported launcher: they record what they were given, in the order it came, as words on stdout.
 *
 * KERNEL_TYPES names the parameters of each kernel as PTX does ('q' 64 bits, 'd' 32 bits), IMAGE_BYTES the size of each cubin;
 * the test defines both. FAIL_AT=n makes the n-th call fail. */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expected.h"

static int modules = 0, calls = 0;

static CUresult answer(void) {
    const char *fail_at = getenv("FAIL_AT");
    calls++;
    return fail_at && atoi(fail_at) == calls ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < IMAGE_BYTES[modules]; i++) hash = (hash ^ ((const unsigned char *)image)[i]) * 1099511628211u;
    printf("load %d %llu\n", modules, (unsigned long long)hash);
    *module = (CUmodule)(uintptr_t)(1000 + modules++);
    return answer();
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    printf("symbol %d %s\n", (int)(uintptr_t)module - 1000, name);
    *function = (CUfunction)((uintptr_t)module + 1000);
    return answer();
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    printf("attribute %d %d %d\n", (int)(uintptr_t)function - 2000, (int)attribute, value);
    return answer();
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
    int kernel = (int)(uintptr_t)function - 2000;
    printf("launch %d %u %u %u %u %u %u %u %llu %d", kernel, gx, gy, gz, bx, by, bz, shared,
           (unsigned long long)(uintptr_t)stream, extra != NULL);
    for (const char *type = KERNEL_TYPES[kernel]; *type; type++, parameters++) {
        uint64_t wide;
        int32_t narrow;
        if (*type == 'q') {
            memcpy(&wide, *parameters, sizeof wide);
            printf(" %llu", (unsigned long long)wide);
        } else {
            memcpy(&narrow, *parameters, sizeof narrow);
            printf(" %d", narrow);
        }
    }
    printf("\n");
    return answer();
}
