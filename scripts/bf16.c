/* A function that LLVM calls to round to bf16 on processors without AVX512-BF16, and that libgcc has from GCC 13 on. Where neither is
 * there, CubeCL's kernels on the CPU fail with "Symbols not found: [ __truncsfbf2 ]", and scripts/test preloads this.
 *
 * A bf16 is returned in the low half of the register of a float. */
#include <stdint.h>
#include <string.h>

float __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000)
    bits = bits >> 16 | 0x40; /* NaN stays NaN, and quiet. */
  else
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* To nearest, ties to even. */
  memcpy(&value, &bits, sizeof value);
  return value;
}
