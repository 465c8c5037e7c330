/* Which instruction set this process can use: the processor must have it and the operating system must save its registers. */
#include "perilune_cpu.h"

/* CPUID leaf 1, ECX */
#define BIT_FMA (1u << 12)
#define BIT_OSXSAVE (1u << 27)
/* CPUID leaf 7, EBX */
#define BIT_AVX2 (1u << 5)
#define BITS_AVX512 ((1u << 16) | (1u << 17) | (1u << 30) | (1u << 31)) /* F, DQ, BW, VL */
/* CPUID leaf 7, EDX */
#define BITS_AMX ((1u << 22) | (1u << 24)) /* BF16, TILE */
/* XCR0 */
#define STATE_AVX 0x6u     /* XMM, YMM */
#define STATE_AVX512 0xe0u /* mask registers, ZMM0-15 upper halves, ZMM16-31 */
#define STATE_AMX 0x60000u /* tile configuration, tile data */

static int has_all(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

int32_t perilune_abi_version(void) { return PERILUNE_ABI_VERSION; }

int32_t perilune_cpu_isa_of(const struct perilune_cpu_registers *r) {
  if (!has_all(r->leaf1_ecx, BIT_OSXSAVE | BIT_FMA) || !has_all(r->leaf7_ebx, BIT_AVX2) || !has_all(r->xcr0, STATE_AVX))
    return PERILUNE_ISA_PORTABLE;
  if (!has_all(r->leaf7_ebx, BITS_AVX512) || !has_all(r->xcr0, STATE_AVX | STATE_AVX512))
    return PERILUNE_ISA_AVX2;
  if (!has_all(r->leaf7_edx, BITS_AMX) || !has_all(r->xcr0, STATE_AMX) || !r->tiles_permitted)
    return PERILUNE_ISA_AVX512;
  return PERILUNE_ISA_AMX;
}

#if defined(__x86_64__)

#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* From the kernel's asm/prctl.h, spelled out because older headers lack it. */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static uint32_t request_tiles(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
#else
static uint32_t request_tiles(void) { return 0; }
#endif

static uint64_t read_xcr0(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}

int32_t perilune_cpu_isa(void) {
  struct perilune_cpu_registers r = {0};
  uint32_t eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) r.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    r.leaf7_ebx = ebx;
    r.leaf7_edx = edx;
  }
  if (has_all(r.leaf1_ecx, BIT_OSXSAVE)) r.xcr0 = read_xcr0(); /* xgetbv faults where the system has not enabled it */
  if (has_all(r.leaf7_edx, BITS_AMX)) r.tiles_permitted = request_tiles();
  return perilune_cpu_isa_of(&r);
}

#elif defined(__aarch64__)

int32_t perilune_cpu_isa(void) { return PERILUNE_ISA_NEON; } /* Advanced SIMD is part of the aarch64 baseline */

#else

int32_t perilune_cpu_isa(void) { return PERILUNE_ISA_PORTABLE; }

#endif
