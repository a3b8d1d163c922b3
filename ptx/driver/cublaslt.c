/* cuBLASLt by its documentation, one element after the other on the host, over a driver whose calls are done when they return. What
 * it is asked for beyond what is here is an error (15, not supported). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);

struct layout {
  int type;
  uint64_t rows, columns;
  int64_t leading, stride;
  int32_t batches;
  uint32_t apart;
};
struct description {
  int32_t transposed[2];
  uint64_t scales[2], bias;
  uint32_t epilogue;
  int32_t bias_type;
};

static size_t size_of(int type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 1; }

static float small_float(unsigned code, int mantissa, int bias, int finite) {
  int exponent = (code & 127) >> mantissa, fraction = code & ((1 << mantissa) - 1);
  float sign = code & 128 ? -1 : 1;
  if (finite ? (code & 127) == 127 : exponent == 31) return finite || fraction ? NAN : sign * INFINITY;
  float magnitude = exponent ? ldexpf((1 << mantissa) + fraction, exponent - bias - mantissa) : ldexpf(fraction, 1 - bias - mantissa);
  return sign * magnitude;
}

static float load(const void *from, int type) {
  float value;
  _Float16 half;
  uint32_t bits = 0;
  switch (type) {
    case F32: memcpy(&value, from, 4); return value;
    case F16: memcpy(&half, from, 2); return half;
    case BF16: memcpy((char *)&bits + 2, from, 2); memcpy(&value, &bits, 4); return value;
    case E4M3: return small_float(*(const uint8_t *)from, 3, 7, 1);
    default: return small_float(*(const uint8_t *)from, 2, 15, 0);
  }
}

static void store(void *to, int type, float value) {
  _Float16 half = value;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (isnan(value)) bits = 0x7fc00000;
  else bits += type == BF16 ? 0x7fff + (bits >> 16 & 1) : 0;
  if (type == F16) memcpy(to, &half, 2);
  else if (type == BF16) memcpy(to, (char *)&bits + 2, 2);
  else memcpy(to, &value, 4);
}

/* Where a matrix of a batch is: at a distance from the first, or where an array of addresses says. 0 if there is no such array. */
static uint64_t address(uint64_t from, const struct layout *of, int batch) {
  uint64_t found = 0;
  if (!of->apart) return from + batch * of->stride * size_of(of->type);
  return cuMemcpyDtoH_v2(&found, from + 8 * batch, 8) ? 0 : found;
}

/* A matrix, column by column, without what lies between columns. */
static float *read_matrix(uint64_t from, const struct layout *of) {
  size_t size = size_of(of->type);
  float *all = malloc((of->rows * of->columns + 1) * sizeof *all);
  char *column = malloc(of->rows * size + 1);
  for (uint64_t j = 0; all && column && j < of->columns; j++) {
    if (cuMemcpyDtoH_v2(column, from + j * of->leading * size, of->rows * size)) {
      free(all);
      all = NULL;
    }
    for (uint64_t i = 0; all && i < of->rows; i++) all[j * of->rows + i] = load(column + i * size, of->type);
  }
  free(column);
  return all;
}

int cublasLtMatmul(void *handle, const struct description *product, const float *alpha, uint64_t a, const struct layout *a_layout,
                   uint64_t b, const struct layout *b_layout, const float *beta, uint64_t c, const struct layout *c_layout, uint64_t d,
                   const struct layout *d_layout, const void *algorithm, void *workspace, size_t bytes, void *stream) {
  int turned_a = product->transposed[0], turned_b = product->transposed[1], type = d_layout->type;
  uint64_t rows = turned_a ? a_layout->columns : a_layout->rows, inner = turned_a ? a_layout->rows : a_layout->columns;
  uint64_t columns = turned_b ? b_layout->rows : b_layout->columns;
  if (inner != (turned_b ? b_layout->columns : b_layout->rows) || rows != d_layout->rows || columns != d_layout->columns) return INVALID_VALUE;
  if (a_layout->batches != d_layout->batches || b_layout->batches != d_layout->batches) return INVALID_VALUE;
  if (a_layout->apart != d_layout->apart || b_layout->apart != d_layout->apart) return INVALID_VALUE;
  if (*beta != 0 || (type != F32 && type != F16 && type != BF16)) return NOT_SUPPORTED;
  float factor = *alpha;
  for (int side = 0; side < 2; side++) {
    float scale = 1;
    if (product->scales[side] && cuMemcpyDtoH_v2(&scale, product->scales[side], 4)) return EXECUTION_FAILED;
    factor *= scale;
  }
  float *bias = NULL;
  if (product->bias && product->epilogue == 4) {
    struct layout row = {product->bias_type, rows, 1, rows, 0, 1, 0};
    if (!(bias = read_matrix(product->bias, &row))) return EXECUTION_FAILED;
  } else if (product->epilogue > 1) return NOT_SUPPORTED;
  size_t size = size_of(type);
  char *column = malloc(rows * size + 1);
  int failed = !column;
  for (int batch = 0; !failed && batch < d_layout->batches; batch++) {
    float *left = read_matrix(address(a, a_layout, batch), a_layout);
    float *right = read_matrix(address(b, b_layout, batch), b_layout);
    failed = !left || !right;
    for (uint64_t j = 0; !failed && j < columns; j++) {
      for (uint64_t i = 0; i < rows; i++) {
        float sum = 0;
        for (uint64_t k = 0; k < inner; k++)
          sum += left[turned_a ? i * a_layout->rows + k : k * a_layout->rows + i] * right[turned_b ? k * b_layout->rows + j : j * b_layout->rows + k];
        store(column + i * size, type, factor * sum + (bias ? bias[i] : 0));
      }
      failed = cuMemcpyHtoD_v2(address(d, d_layout, batch) + j * d_layout->leading * size, column, rows * size);
    }
    free(left);
    free(right);
  }
  free(column);
  free(bias);
  return failed ? EXECUTION_FAILED : SUCCESS;
}

int cublasLtCreate(void **handle) { return (*handle = malloc(1)) ? SUCCESS : EXECUTION_FAILED; }
int cublasLtDestroy(void *handle) { free(handle); return SUCCESS; }
int cublasLtMatrixLayoutCreate(struct layout **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  if (!(*layout = malloc(sizeof **layout))) return EXECUTION_FAILED;
  **layout = (struct layout){type, rows, columns, leading, 0, 1, 0};
  return leading < (int64_t)rows ? INVALID_VALUE : SUCCESS;
}
int cublasLtMatrixLayoutDestroy(struct layout *layout) { free(layout); return SUCCESS; }
static int set(void *to, size_t room, const void *from, size_t size) {
  if (size != room) return INVALID_VALUE;
  memcpy(to, from, size);
  return SUCCESS;
}
int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int attribute, const void *value, size_t size) {
  switch (attribute) {
    case 5: return set(&layout->batches, sizeof layout->batches, value, size);
    case 6: return set(&layout->stride, sizeof layout->stride, value, size);
    case 8: return set(&layout->apart, sizeof layout->apart, value, size);
    default: return NOT_SUPPORTED;
  }
}
int cublasLtMatmulDescCreate(struct description **description, int computes, int scales) {
  *description = calloc(1, sizeof **description);
  return *description ? SUCCESS : EXECUTION_FAILED;
}
int cublasLtMatmulDescDestroy(struct description *description) { free(description); return SUCCESS; }
int cublasLtMatmulDescSetAttribute(struct description *of, int attribute, const void *value, size_t size) {
  switch (attribute) {
    case 3: case 4: return set(&of->transposed[attribute - 3], 4, value, size);
    case 7: return set(&of->epilogue, 4, value, size);
    case 8: return set(&of->bias, 8, value, size);
    case 17: case 18: return set(&of->scales[attribute - 17], 8, value, size);
    case 25: return size == 1 ? SUCCESS : INVALID_VALUE;
    case 26: return set(&of->bias_type, 4, value, size);
    default: return NOT_SUPPORTED;
  }
}
/* Of preferences, none matters here. */
int cublasLtMatmulPreferenceCreate(void **preference) { return cublasLtCreate(preference); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return cublasLtDestroy(preference); }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size) { return SUCCESS; }

/* cublasLtMatmulHeuristicResult_t: the algorithm, the workspace, the state, waves and reserved. */
struct result {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int asked,
                                   struct result *found, int *count) {
  *count = asked > 0;
  if (*count) memset(found, 0, sizeof *found);
  return SUCCESS;
}
