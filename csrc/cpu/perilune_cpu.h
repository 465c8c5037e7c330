/* The C ABI of libperilune_cpu.so: what this processor can run. No Python, no torch; callable from any language. */
#ifndef PERILUNE_CPU_H
#define PERILUNE_CPU_H

#include <stdint.h>

#define PERILUNE_API __attribute__((visibility("default")))

/* Raised by one whenever a function changes its arguments or meaning; `perilune.native.library` refuses any other value.
 * Every Perilune library exports it, so that a stale build is named instead of called. */
#define PERILUNE_ABI_VERSION 1

/* Instruction-set levels. On x86-64 each level includes the ones below it. */
enum perilune_isa {
  PERILUNE_ISA_PORTABLE = 0,
  PERILUNE_ISA_AVX2 = 1,   /* AVX2 and FMA */
  PERILUNE_ISA_AVX512 = 2, /* AVX-512 F, BW, VL, DQ */
  PERILUNE_ISA_AMX = 3,    /* AMX-TILE and AMX-BF16, and the kernel lets this process use the tiles */
  PERILUNE_ISA_NEON = 16   /* aarch64 */
};

/* The registers that decide the level on x86-64, as the processor reports them. */
struct perilune_cpu_registers {
  uint32_t leaf1_ecx;
  uint32_t leaf7_ebx;
  uint32_t leaf7_edx;
  uint64_t xcr0;            /* register sets that the operating system saves on a context switch */
  uint32_t tiles_permitted; /* 1 when the kernel granted this process the AMX tile data */
};

PERILUNE_API int32_t perilune_abi_version(void);

/* The highest level this process can use. On Linux it asks the kernel once for the AMX tiles, which the kernel grants per
 * process; without that, the first tile instruction would kill the process. */
PERILUNE_API int32_t perilune_cpu_isa(void);

/* The same decision over given register values: a pure function, for tests. Always decides as on x86-64. */
PERILUNE_API int32_t perilune_cpu_isa_of(const struct perilune_cpu_registers *registers);

#endif
